package witness

import (
	"context"
	"log/slog"
	"sync"
	"testing"

	"github.com/headlease/headlease/detector/phi"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/clock"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// disk is a fault.Disk that asks a function, if set.
type disk struct {
	mu     sync.Mutex
	before func(op string) error
}

func (d *disk) Before(op string) error {
	d.mu.Lock()
	before := d.before
	d.mu.Unlock()
	if before == nil {
		return nil
	}
	return before(op)
}

func (d *disk) set(before func(op string) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.before = before
}

// suspects holds every region to be as said; unknown else.
type suspects map[string]register.Verdict

func (s suspects) Suspicion(region string) phi.Suspicion {
	return phi.Suspicion{Verdict: s[region]}
}
func (suspects) Reports() []*pb.PeerReport   { return []*pb.PeerReport{{Region: "eu"}} }
func (suspects) RoundTrips() []*pb.RoundTrip { return []*pb.RoundTrip{{Peer: "eu-1", RttNs: 7}} }

// rig is a voter on a store in a directory.
type rig struct {
	*voter
	clock    *clock.Manual
	suspects suspects
	disk     *disk
	dir      string
	failures []error
	exits    []int
}

type testing_ interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
}

// start opens dir's data in a new voter, as a process does.
func start(t testing_, dir string, d *disk) *rig {
	t.Helper()
	r := &rig{clock: &clock.Manual{}, suspects: suspects{}, disk: d, dir: dir}
	r.voter = &voter{
		id: "witness/w1", name: "w1", cluster: "test", version: "v", clock: r.clock, suspects: r.suspects, logger: quiet(),
		exit:       func(code int) { r.exits = append(r.exits, code) },
		failed:     func(err error) { r.failures = append(r.failures, err) },
		configured: func(*pb.ClusterConfiguration) {},
	}
	s, got, err := openStore(storeConfig{dir: dir, name: "w1", cluster: "test", disk: d})
	if err != nil {
		t.Fatal(err)
	}
	r.load(s, got)
	return r
}

func (r *rig) configuration() *pb.ClusterConfiguration {
	return &pb.ClusterConfiguration{
		ClusterId: "c", ClusterName: "test", Version: 1, Shards: 256, DNs: int64(testD),
		Voters: []*pb.Voter{
			{Id: "region/eu", Incarnation: uint64(eu.Incarnation)}, {Id: "region/us", Incarnation: uint64(us.Incarnation)},
			{Id: "witness/w1", Incarnation: uint64(r.self.incarnation)},
		},
		Partitions: []*pb.PartitionSpec{
			{Name: "p", Shards: []*pb.ShardRange{{First: 0, Last: 127}}, Prefer: []string{"eu", "us"}},
			{Name: "q", Shards: []*pb.ShardRange{{First: 128, Last: 255}}, Prefer: []string{"us", "eu"}},
		},
	}
}

func (r *rig) setUp(t testing_) *rig {
	t.Helper()
	if _, err := r.configure(context.Background(), r.configuration(), "admin"); err != nil {
		t.Fatal(err)
	}
	return r
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := start(t, t.TempDir(), &disk{}).setUp(t)
	t.Cleanup(func() { _ = r.store.close() })
	return r
}

func header(who register.Region) *pb.VoteHeader {
	return &pb.VoteHeader{ClusterId: "c", ConfigVersion: 1, Candidate: who.Name, CandidateIncarnation: uint64(who.Incarnation), Round: 5}
}

func ballot(round uint64, who register.Region) register.Ballot {
	return register.Ballot{Round: round, Region: who.Name, Incarnation: who.Incarnation}
}

func value(who register.Region, epoch uint32) *pb.Value {
	return &pb.Value{Owner: who.Name, OwnerIncarnation: uint64(who.Incarnation), Epoch: epoch, DNs: int64(testD)}
}

func prepareOf(who register.Region, round uint64, partitions ...string) *pb.PrepareRequest {
	return &pb.PrepareRequest{Header: header(who), Ballot: ballot(round, who).Proto(), Partitions: partitions}
}

func acceptOf(who register.Region, round uint64, epoch uint32, partitions ...string) *pb.AcceptRequest {
	req := &pb.AcceptRequest{Header: header(who)}
	for _, p := range partitions {
		req.Items = append(req.Items, &pb.AcceptItem{Partition: p, Ballot: ballot(round, who).Proto(), Value: value(who, epoch)})
	}
	return req
}

// rules of the answers, in order.
func (r *rig) mustPrepare(t testing_, req *pb.PrepareRequest) []register.Rule {
	t.Helper()
	resp, err := r.prepare(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	var out []register.Rule
	for _, a := range resp.GetAnswers() {
		out = append(out, register.RuleOf(a.GetRefusal().GetRule()))
	}
	return out
}

func (r *rig) mustAccept(t testing_, req *pb.AcceptRequest) []register.Rule {
	t.Helper()
	resp, err := r.accept(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	var out []register.Rule
	for _, a := range resp.GetAnswers() {
		out = append(out, register.RuleOf(a.GetRefusal().GetRule()))
	}
	return out
}

func same(a []register.Rule, b ...register.Rule) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}
