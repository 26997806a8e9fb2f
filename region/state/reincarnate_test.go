package state

import (
	"bytes"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// TestF4ARestoredRegion keeps no session, lease and configuration, is another
// incarnation, counts its old head leases as running, and, through its snapshot
// and a new configuration, adopts no epoch up to its floor.
func TestF4ARestoredRegion(t *testing.T) {
	const jump, inc = 1 << 10, 0xdef
	for name, c := range map[string]struct {
		level   uint32
		history func(h *harness)
		floor   fence.Epoch // of p, without the jump
	}{
		"never owned":          {MaxLevel, func(*harness) {}, 0},
		"never owned, level 1": {1, func(*harness) {}, 0},
		"owned, with leases": {MaxLevel, func(h *harness) {
			h.own("p", 1)
			h.ok(cmdOpen("s1"))
			h.ok(cmdOpen("s2"))
			h.grant("s1", 1, "lock/a")
			h.wait("s2", 1, "lock/a")
		}, 1},
		"owned, level 1": {1, func(h *harness) { h.own("p", 3) }, 3},
		"dropped": {MaxLevel, func(h *harness) {
			h.own("p", 3)
			h.ok(cmdDrop("p", 3))
		}, 3},
		"raised, not adopted": {MaxLevel, func(h *harness) {
			h.own("p", 3)
			h.accept("p", &pb.Value{Owner: "eu", OwnerIncarnation: testInc, Epoch: 4, DNs: 4e9})
		}, 4},
		"another's": {MaxLevel, func(h *harness) {
			h.own("p", 3)
			h.accept("p", &pb.Value{Owner: "us", OwnerIncarnation: 9, Epoch: 5, DNs: 9e9})
		}, 5},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness1(t)
			if c.level > 1 {
				h.ok(cmdRaise(c.level))
			}
			c.history(h)
			was := h.m.View()
			m, err := was.Reincarnate(inc, jump)
			if err != nil {
				t.Fatal(err)
			}
			read := func(v View) *Machine { // as another server reads it
				var buf bytes.Buffer
				if err := v.WriteSnapshot(&buf); err != nil {
					t.Fatal(err)
				}
				m, err := ReadSnapshot(&buf)
				if err != nil {
					t.Fatal(err)
				}
				return m
			}
			v := read(m.View()).View()
			if n := v.Counts(); n != (Counts{}) || v.Configuration() != nil || v.Incarnation() != inc || v.Region() != "eu" || v.Level() < 2 {
				t.Fatalf("restored: %+v, configuration %v, incarnation %x, level %d", n, v.Configuration(), v.Incarnation(), v.Level())
			}
			if v.AppliedIndex() != was.AppliedIndex() || v.BallotRound() != was.BallotRound() {
				t.Errorf("index %d and round %d, before %d and %d", v.AppliedIndex(), v.BallotRound(), was.AppliedIndex(), was.BallotRound())
			}

			conf := proto.CloneOf(was.Configuration())
			conf.Voters[0].Incarnation = inc
			// A partition that is left out keeps its floor, too.
			conf.Partitions = conf.Partitions[:1]
			h.m = read(v)
			h.ok(cmdConfigure(conf))
			h.m = read(h.m.View())
			if q, ok := h.m.View().Partition("q"); !ok || q.Epoch != jump {
				t.Errorf("q is not configured any more and remembers %+v", q)
			}
			p, _ := h.m.View().Partition("p")
			floor := c.floor + jump
			if p.Live() || p.Epoch != floor || p.Dropped != floor {
				t.Fatalf("%+v; want the floor %d", p, floor)
			}
			self := register.Region{Name: "eu", Incarnation: inc}
			at := register.Restart(p.Register, 0)
			if d := at.Prepare(0, register.PrepareInput{Candidate: self, Dry: true}); d.Rule != register.RuleV2Running || at.Remaining(0) < 4*time.Second {
				t.Errorf("its head lease of before runs %v more: %+v", at.Remaining(0), d)
			}
			for _, epoch := range []fence.Epoch{1, c.floor + 1, floor, floor + 1} {
				b := h.accept("p", &pb.Value{Owner: "eu", OwnerIncarnation: inc, Epoch: uint32(epoch), DNs: 4e9})
				if err := h.do(cmdAdopt("p", uint32(epoch), b)).GetError(); (err != nil) != (epoch <= floor) {
					t.Errorf("adopt of epoch %d over the floor %d: %v", epoch, floor, err)
				}
			}
		})
	}
}

func TestReincarnationRefuses(t *testing.T) {
	h := newOwner(t)
	if _, err := h.m.View().Reincarnate(testInc, 1); err == nil {
		t.Error("the same incarnation again")
	}
	if _, err := h.m.View().Reincarnate(0, 1); err == nil {
		t.Error("no incarnation")
	}
	if _, err := h.m.View().Reincarnate(1, fence.MaxEpoch); err == nil {
		t.Error("epochs beyond the last")
	}
	if _, err := New().View().Reincarnate(1, 1); err == nil {
		t.Error("a region without configuration")
	}
}
