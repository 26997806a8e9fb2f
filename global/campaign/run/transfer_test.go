package run

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

func (r *rig) partition() state.Partition {
	p, _ := r.View().Partition("p")
	return p
}

func startDrain(r *rig) *pb.Command {
	return &pb.Command{Term: r.term, Kind: &pb.Command_StartDrain{StartDrain: &pb.StartDrainCommand{Partition: "p", Epoch: 1, Successor: "us"}}}
}

func token(t *testing.T, seq fence.Seq) fence.Token {
	t.Helper()
	k, err := fence.NewToken(1, seq)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestF47TheEpochIsRaisedBeforeTheSequenceEnds: at the first grant past the mark
// the owner campaigns for its next epoch; it lets go of the old one first, and
// there is no Drop.
func TestF47TheEpochIsRaisedBeforeTheSequenceEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		time.Sleep(2 * d) // virtual
		r.shell.Applied([]state.Event{state.LeaseGranted{Partition: "p", Token: token(t, fence.RaiseSeq-1)}})
		time.Sleep(d) // virtual
		if p := r.partition(); p.Epoch != 1 {
			t.Fatalf("raised too early: %+v", p)
		}
		for range 3 { // grants go on until the raise is done
			r.shell.Applied([]state.Event{state.LeaseGranted{Partition: "p", Token: token(t, fence.RaiseSeq)}})
		}
		time.Sleep(time.Second) // virtual
		p := r.partition()
		if p.Epoch != 2 || !p.Live() || p.Dropped != 0 || p.Register.Value.Reason != register.ReasonRaised || p.Seq != 0 {
			t.Fatalf("%+v", p)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		lapsed := false
		for _, h := range r.heads {
			lapsed = lapsed || h.epoch == 1 && h.until == 0
			if h.epoch == 2 && !lapsed {
				t.Error("epoch 2 is held before epoch 1 was let go of")
			}
		}
		if last := r.heads[len(r.heads)-1]; last.epoch != 2 || last.until == 0 {
			t.Errorf("holds %+v", last)
		}
	})
}

// TestF26WhatHasDrainedIsReleased: not before it has, and not while an abort is
// under way; a new leader goes on.
func TestF26WhatHasDrainedIsReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		drained := false
		r := startWith(t, func(_ *pb.ClusterConfiguration, c *Config) {
			c.Drained = func(string, fence.Epoch) (bool, bool) { return drained, drained }
		})
		r.elect()
		time.Sleep(2 * d) // virtual
		r.must(startDrain(r))
		time.Sleep(d) // virtual
		if p := r.partition(); p.Register.Value.Released() || !p.Draining() {
			t.Fatalf("released before it has drained: %+v", p)
		}
		forget, ok := r.shell.KeepOn("p")
		if !ok {
			t.Fatal("too late to abort")
		}
		r.mu.Lock()
		drained = true
		r.mu.Unlock()
		time.Sleep(d) // virtual
		if p := r.partition(); p.Register.Value.Released() {
			t.Fatalf("released while an abort is under way: %+v", p)
		}
		r.elect()
		forget() // of a term that is over
		synctest.Wait()
		if r.shell.Releasing("p") {
			t.Error("a leader that has not led for D releases")
		}
		time.Sleep(d + time.Second) // virtual
		p := r.partition()
		if v := p.Register.Value; !v.Released() || v.Successor != "us" || v.Epoch != 1 || v.Reason != register.ReasonDrained {
			t.Fatalf("%+v", p)
		}
		if p.Live() || p.Draining() || p.Dropped != 1 {
			t.Errorf("after the release: %+v", p)
		}
		if _, ok := r.shell.KeepOn("p"); ok {
			t.Error("aborted after the release")
		}
	})
}

// TestFailbackBeginsATransfer: to the preferred region that is steady, once.
func TestFailbackBeginsATransfer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var graces []time.Duration
		verdict := register.VerdictCrashed
		r := startWith(t, func(conf *pb.ClusterConfiguration, c *Config) {
			conf.Partitions[0].Prefer, conf.Partitions[0].AutoFailback = []string{"us", "eu"}, true
			conf.Voters = append(conf.Voters, &pb.Voter{Id: "region/us", Incarnation: 9})
			c.Grace = func(_ string, grace time.Duration) { graces = append(graces, grace) }
			c.Verdict = func(string) register.Verdict { return verdict }
		})
		w := &witness{id: "region/us", clock: r.clock, incarnation: 9, life: 1, lives: []uint64{1}, writes: 1, regs: map[string]register.Register{}}
		r.each(func(o *witness) { w.conf = o.conf })
		r.mu.Lock()
		r.witnesses["region/us"] = w
		r.mu.Unlock()
		r.elect()
		time.Sleep(3 * time.Minute) // virtual
		if p := r.partition(); !p.Live() || p.Draining() {
			t.Fatalf("handed to a crashed region: %+v", p)
		}
		r.mu.Lock()
		verdict = register.VerdictHealthy
		r.mu.Unlock()
		time.Sleep(50 * time.Second) // virtual
		if p := r.partition(); p.Draining() {
			t.Fatal("handed back to a region that has just come up")
		}
		time.Sleep(20 * time.Second) // virtual
		if p := r.partition(); !p.Draining() || p.Successor != "us" {
			t.Fatalf("not handed back: %+v", p)
		}
		if len(graces) != 1 || graces[0] != failbackGrace {
			t.Errorf("graces %v", graces)
		}
	})
}
