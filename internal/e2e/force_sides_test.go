package e2e

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/clusterclient"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/fault"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// side is one side of a cut on which an operator forces a quorum.
type side struct {
	region, witness devcluster.Process
	client          *client.Client
}

func (s *side) processes() []devcluster.Process { return []devcluster.Process{s.region, s.witness} }

// force runs force-quorum on the stopped processes, as docs/operations.md says.
func force(t *testing.T, of []devcluster.Process, destroyed ...string) {
	t.Helper()
	dir := t.TempDir()
	plan := filepath.Join(dir, "era.json")
	planning := []string{"force-quorum", "plan", "-o", plan, "--they-never-vote-again", "--destroyed", strings.Join(destroyed, ",")}
	planning = append(planning, inspected(t, dir, of)...)
	apply := []string{"force-quorum", "apply", plan}
	for _, p := range of {
		apply = append(apply, "--data", p.DataDir)
	}
	for _, args := range [][]string{planning, apply} {
		if _, errs, err := headlease(t, args...); err != nil {
			t.Fatal(err, errs)
		}
	}
}

// cutRules let nothing pass from a process to the other side.
func cutRules(id string, to *side, expires time.Duration) fault.Rules {
	var r fault.Rules
	for _, p := range to.processes() {
		r.Links = append(r.Links, fault.LinkRule{ID: id + "-" + p.Name, Peer: p.Name, Link: fault.Link{Drop: true}, Expires: expires})
	}
	return r
}

// startCut starts both sides so that they never met: the cut is there before
// the first packet, by the start-up tables, and is made lasting then.
func (c *cluster) startCut(t *testing.T, sides ...*side) {
	t.Helper()
	for i, s := range sides {
		other := sides[1-i]
		for _, p := range s.processes() {
			text, err := fault.FormatStartup(cutRules("first", other, 30*time.Second))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(p.Faults, text, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := c.StartProcess(p.Name); err != nil {
				t.Fatal(err)
			}
		}
	}
	ctx := within(t, 25*time.Second)
	for i, s := range sides {
		list := fault.ToProto(cutRules("lasting", sides[1-i], time.Hour))
		for _, p := range s.processes() {
			process, _ := c.File().Process(p.Name)
			for {
				err := c.admin.SetFaults(ctx, process, &pb.SetFaultsRequest{Faults: list.GetFaults()})
				if err == nil {
					break
				}
				select {
				case <-ctx.Done():
					t.Fatalf("%s takes no faults: %v", p.Name, err)
				case <-time.After(50 * time.Millisecond):
				}
			}
		}
	}
}

// met waits until the voters have met another era.
func (c *cluster) met(t *testing.T, of ...devcluster.Process) {
	t.Helper()
	ctx := within(t, 2*stepTimeout)
	for _, p := range of {
		process, _ := c.File().Process(p.Name)
		for {
			v, err := c.admin.DescribeVoter(ctx, process)
			if err == nil && v.GetEraStop().GetEra().GetCounter() == 1 {
				break
			}
			select {
			case <-ctx.Done():
				t.Fatalf("%s has not stopped: %v, %v", p.Name, v.GetEraStop(), err)
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
}

// TestF16TwoSidesAreForced: a cluster is cut in two, each side's operator takes
// the other one for destroyed, and each forces a quorum. Both sides grant, and
// no token twice: where they share a resource, one of them is fenced. When they
// meet both stop and say so; the side that is chosen and forced once more goes
// on above all that either has granted.
func TestF16TwoSidesAreForced(t *testing.T) {
	const lock, d = "lock/file-0", 2 * time.Second
	c := start(t, devcluster.Options{Regions: 2, Servers: 1, Witnesses: 3, D: d})
	servers, witnesses := c.byRole()
	j := startJournal(t)
	guard := resource.NewClient(j.address, "writer")
	before := once(t, c.client(servers[0].Region, 10*time.Second), guard, lock, stepTimeout)
	sides := []*side{{region: servers[0], witness: witnesses[0]}, {region: servers[1], witness: witnesses[1]}}
	for _, p := range c.State().Processes {
		if err := c.Kill(within(t, stepTimeout), p.Name); err != nil {
			t.Fatal(err)
		}
	}
	for i, s := range sides { // the third witness is gone indeed
		other := sides[1-i]
		force(t, s.processes(), "region/"+other.region.Region, "witness/"+other.witness.Name, "witness/"+witnesses[2].Name)
	}
	c.startCut(t, sides...)

	// Each grants what the other grants.
	granted := map[fence.Token]string{before: "before"}
	var held []*client.Lease
	var highest fence.Token
	for _, s := range sides {
		var own []client.Region
		for _, r := range clusterclient.Regions(c.File()) {
			if r.Name == s.region.Region {
				own = append(own, r)
			}
		}
		s.client = c.newClient(client.Config{Regions: own, Home: s.region.Region, Links: c.clientLinks(), TTL: 10 * time.Second})
		for range 3 {
			lease, err := s.client.Acquire(within(t, 2*stepTimeout), lock, client.Wait())
			if err != nil {
				t.Fatalf("%s: %v", s.region.Region, err)
			}
			if by := granted[lease.Token()]; by != "" || lease.Token() <= before {
				t.Errorf("token %v is granted by %s, and was by %q; before was %v", lease.Token(), s.region.Region, by, before)
			}
			granted[lease.Token()] = s.region.Region
			highest = max(highest, lease.Token())
			if err := lease.Release(within(t, stepTimeout)); err != nil {
				t.Fatal(err)
			}
		}
		lease, err := s.client.Acquire(within(t, stepTimeout), lock, client.Wait())
		if err != nil {
			t.Fatal(err)
		}
		highest = max(highest, lease.Token())
		held = append(held, lease)
	}
	a, b := held[0], held[1]
	if a.Token().Epoch() == b.Token().Epoch() {
		t.Errorf("both sides grant under epoch %d", a.Token().Epoch())
	}
	if !a.Valid() || !b.Valid() {
		t.Fatal("the two sides do not own side by side: this shows nothing")
	}
	// At the resource that both write to, the higher one alone gets through.
	low, high := min(a.Token(), b.Token()), max(a.Token(), b.Token())
	ctx := within(t, stepTimeout)
	for _, token := range []fence.Token{low, high} {
		if _, err := guard.Claim(ctx, lock, token); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := guard.Write(ctx, lock, high, "x"); err != nil {
		t.Error(err)
	}
	if e, err := guard.Write(ctx, lock, low, "late"); !errors.As(err, new(*fence.StaleError)) {
		t.Errorf("the lower side's write: %v, %v", e, err)
	}

	// They meet.
	for _, s := range sides {
		for _, p := range s.processes() {
			process, _ := c.File().Process(p.Name)
			if err := c.admin.ClearFaults(within(t, stepTimeout), process); err != nil {
				t.Fatal(err)
			}
		}
	}
	c.met(t, servers[0], servers[1])
	for _, l := range held {
		select {
		case <-l.Context().Done():
		case <-time.After(d + time.Second):
			t.Errorf("a lease of a side that has stopped lives on: %v", l.Token())
		}
	}
	for _, s := range sides {
		try, cancel := context.WithTimeout(t.Context(), 2*d)
		if l, err := s.client.Acquire(try, "lock/other"); err == nil {
			t.Errorf("%s grants %v after it has stopped", s.region.Region, l.Token())
		}
		cancel()
	}
	files := []string{"-f", filepath.Join(c.Dir(), "cluster.yaml"), "--certs", filepath.Join(c.Dir(), "certs")}
	status, errs, err := headlease(t, append([]string{"status"}, files...)...)
	if err == nil || strings.Count(status, "votes no more: two operators have forced a quorum on two sides") < 2 {
		t.Errorf("status: %v, %s%s", err, status, errs)
	}

	// One is chosen: the runbook's last resort.
	for _, s := range sides {
		for _, p := range s.processes() {
			if err := c.Kill(within(t, stepTimeout), p.Name); err != nil {
				t.Fatal(err)
			}
		}
	}
	chosen, other := sides[0], sides[1]
	if a.Token() > b.Token() { // the side of the lower tokens
		chosen, other = other, chosen
	}
	force(t, chosen.processes(), "region/"+other.region.Region, "witness/"+other.witness.Name, "witness/"+witnesses[2].Name)
	for _, s := range sides { // the other one is not stopped as it should be
		for _, p := range s.processes() {
			if err := os.WriteFile(p.Faults, []byte("{}"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := c.StartProcess(p.Name); err != nil {
				t.Fatal(err)
			}
		}
	}
	after := once(t, c.client(chosen.region.Region, 10*time.Second), guard, lock, 2*stepTimeout)
	if after <= highest {
		t.Errorf("token %v after %v", after, highest)
	}
	j.highest()
	conf, errs, err := headlease(t, append([]string{"config", "show"}, files...)...)
	if err != nil || !strings.Contains(conf, "era 2-") {
		t.Errorf("config show: %v, %s%s", err, conf, errs)
	}
}
