package witness

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// planOf makes era 1 of region eu and witness w1.
func planOf(r *rig, seen uint32) *pb.EraPlan {
	c := config.WithoutVoter(r.configuration(), "region/us")
	c.Era, c.PreviousVoters = &pb.Era{Counter: 1, Id: 7}, c.GetVoters()
	c.DestroyedVoters = []*pb.Voter{{Id: "region/us", Incarnation: uint64(us.Incarnation)}}
	p := &pb.EraPlan{Configuration: c}
	for _, s := range c.GetPartitions() {
		p.Epochs = append(p.Epochs, &pb.EraEpoch{Partition: s.GetName(), Epoch: seen + 1024, DNs: int64(testD)})
	}
	return p
}

// eraOf what the refusal says of the voter's era.
func eraOf(t *testing.T, err error) register.Era {
	t.Helper()
	for _, d := range status.Convert(err).Details() {
		if m, ok := d.(*pb.EraMismatch); ok {
			return register.EraOf(m.GetEra())
		}
	}
	t.Fatalf("no era in %v", err)
	return register.Era{}
}

// TestF16ForceQuorumOnAWitness: offline, again without an effect, never while it
// runs, and what was before is over.
func TestF16ForceQuorumOnAWitness(t *testing.T) {
	dir := t.TempDir()
	r := start(t, dir, &disk{}).setUp(t)
	r.mustPrepare(t, prepareOf(us, 3, "p"))
	r.mustAccept(t, acceptOf(us, 3, 9, "p"))
	plan := planOf(r, 9)
	if _, err := Facts(dir); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("facts of a running witness: %v", err)
	}
	if _, err := BeginEra(dir, plan); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("a running witness: %v", err)
	}
	self := r.self
	if err := r.store.close(); err != nil {
		t.Fatal(err)
	}
	f, err := Facts(dir)
	if err != nil || f.GetCluster() != "test" || f.GetVoter().GetId() != "witness/w1" || f.GetVoter().GetIncarnation() != uint64(self.incarnation) ||
		!proto.Equal(f.GetConfiguration(), r.configuration()) || f.GetEpochs()[0].GetEpoch() != 9 || f.GetEpochs()[1].GetEpoch() != 0 {
		t.Errorf("%v, %v", f, err)
	}
	bent := proto.CloneOf(plan)
	bent.Epochs[0].Epoch = 9
	if _, err := BeginEra(dir, bent); err == nil || !strings.Contains(err.Error(), "made without this data") {
		t.Errorf("a plan without this data: %v", err)
	}
	for i, want := range []bool{false, true} {
		if already, err := BeginEra(dir, plan); err != nil || already != want {
			t.Fatalf("time %d: already %v, %v", i+1, already, err)
		}
	}
	r = start(t, dir, &disk{})
	defer func() { _ = r.store.close() }()
	if r.self.incarnation != self.incarnation || r.self.previous != self.life || r.voter.configuration.GetVersion() != 2 {
		t.Errorf("%+v, %v", r.self, r.voter.configuration)
	}
	// A candidate of before is told the era, and stops nothing here.
	if _, err := r.prepare(t.Context(), prepareOf(us, 9, "p")); eraOf(t, err) != (register.Era{Counter: 1, ID: 7}) {
		t.Error(err)
	}
	if r.eraStop != nil {
		t.Error("a lower era stops a witness")
	}
	// The survivor takes it once D has passed since the start, and not before.
	ask := func(round uint64) *pb.PrepareRequest {
		req := prepareOf(eu, round, "p")
		req.Header.Era, req.Header.ConfigVersion, req.Ballot.Era = plan.GetConfiguration().GetEra(), 2, plan.GetConfiguration().GetEra()
		return req
	}
	r.clock.Advance(testD - 1)
	if rules := r.mustPrepare(t, ask(5)); !same(rules, register.RuleV2Running) {
		t.Errorf("before D has passed: %v", rules)
	}
	r.clock.Advance(1)
	if rules := r.mustPrepare(t, ask(6)); !same(rules, register.RuleNone) {
		t.Errorf("after D: %v", rules)
	}
}

// TestF16AWitnessThatMetAnotherEraStops, also after a restart: a higher one, or
// another one of its own count. It tells those that ask in its own.
func TestF16AWitnessThatMetAnotherEraStops(t *testing.T) {
	dir := t.TempDir()
	r := start(t, dir, &disk{}).setUp(t)
	req := prepareOf(eu, 1, "p")
	req.Header.Era = &pb.Era{Counter: 1, Id: 7}
	if _, err := r.prepare(t.Context(), req); eraOf(t, err) != (register.Era{}) {
		t.Error(err)
	}
	check := func(when string) {
		t.Helper()
		for name, call := range map[string]func() error{
			"prepare": func() error { _, err := r.prepare(t.Context(), prepareOf(us, 2, "p")); return err },
			"accept":  func() error { _, err := r.accept(t.Context(), acceptOf(us, 2, 1, "p")); return err },
			"configure": func() error {
				_, err := r.configure(t.Context(), config.Next(r.voter.configuration), "admin")
				return err
			},
			"config": func() error { _, err := r.prepareConfig(t.Context(), prepareConfigOf(1, 1)); return err },
			"again": func() error {
				_, err := r.acceptAgain(t.Context(), &pb.AcceptAgainRequest{ClusterId: "c", Version: 1})
				return err
			},
		} {
			if err := call(); err == nil || !strings.Contains(err.Error(), "votes no more") || eraOf(t, err).Counter != 1 {
				t.Errorf("%s, %s: %v", when, name, err)
			}
		}
		d, err := r.describe(context.Background())
		if err != nil || d.GetEraStop().GetBy() != "region/eu" || r.stopped.Load() == nil {
			t.Errorf("%s: %v, %v", when, d, err)
		}
	}
	check("at once")
	if err := r.store.close(); err != nil {
		t.Fatal(err)
	}
	r = start(t, dir, &disk{})
	check("after a restart")
	plan := planOf(r, 0)
	if err := r.store.close(); err != nil {
		t.Fatal(err)
	}
	// A survivor of it votes again.
	if _, err := BeginEra(dir, plan); err != nil {
		t.Fatal(err)
	}
	r = start(t, dir, &disk{})
	defer func() { _ = r.store.close() }()
	if r.eraStop != nil || r.stopped.Load() != nil {
		t.Error("stopped in the era that it began")
	}
	// And stops when somebody gives it the configuration of another one of that
	// count.
	other := proto.CloneOf(plan.GetConfiguration())
	other.Era.Id++
	if _, err := r.configure(t.Context(), other, "region/us/us-1"); eraOf(t, err) != (register.Era{Counter: 1, ID: 7}) || r.eraStop.GetBy() != "region/us/us-1" {
		t.Error(err, r.eraStop)
	}
}
