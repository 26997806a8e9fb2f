package run

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// heldOn fails the test if the hold ended, or its epoch changed, since the last
// call of holds.
func heldOn(t *testing.T, r *rig, when string) {
	t.Helper()
	hs := r.holds()
	for i, h := range hs {
		if h.until == 0 || h.epoch != 1 || i > 0 && h.at > hs[i-1].until {
			t.Errorf("%s: %+v", when, hs)
		}
	}
	if !held(hs) {
		t.Errorf("%s: no hold", when)
	}
}

// TestH10AnOwnerLearnsTheNewerConfigurationAndHoldsOn: the voters have stored a
// newer configuration that the region has not heard of.
func TestH10AnOwnerLearnsTheNewerConfigurationAndHoldsOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		wait(d)
		heldOn(t, r, "before")
		next := config.WithVoter(r.View().Configuration(), &pb.Voter{Id: "witness/w3", Incarnation: 30})
		r.each(func(w *witness) { w.conf = next })
		wait(d)
		heldOn(t, r, "after")
		if v := r.View().Configuration().GetVersion(); v != 2 {
			t.Errorf("the region has configuration %d", v)
		}
		wait(d)
		heldOn(t, r, "long after")
	})
}

// TestH10VotersThatAreBehindAreGivenTheConfiguration, those without any too.
func TestH10VotersThatAreBehindAreGivenTheConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		wait(d)
		heldOn(t, r, "before")
		first := r.View().Configuration()
		next := config.WithoutVoter(first, "witness/w2")
		r.must(&pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: next}}})
		wait(d)
		heldOn(t, r, "after")
		if v := r.witnesses["witness/w1"].conf.GetVersion(); v != 2 {
			t.Errorf("w1 has configuration %d", v)
		}
		if v := r.witnesses["witness/w2"].conf.GetVersion(); v != 1 {
			t.Errorf("w2, which is no voter any more, has configuration %d", v)
		}
		// w2 comes back wiped, as a new incarnation without configuration.
		w2 := r.witnesses["witness/w2"]
		w2.set(func() { w2.incarnation, w2.conf, w2.regs = 99, nil, map[string]register.Register{} })
		r.must(&pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{
			Configuration: config.WithVoter(next, &pb.Voter{Id: "witness/w2", Incarnation: 99}),
		}}})
		wait(d)
		heldOn(t, r, "with w2 again")
		if v := w2.conf.GetVersion(); v != 3 {
			t.Errorf("w2 has configuration %d", v)
		}
	})
}

func explained(r *rig) bool {
	parts, _ := r.shell.Explain()
	return parts != nil
}

// TestARegionThatIsNoMemberAnyMoreLetsGo.
func TestARegionThatIsNoMemberAnyMoreLetsGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		wait(d)
		r.holds()
		next := config.Next(r.View().Configuration())
		next.Voters = append(next.Voters[1:], &pb.Voter{Id: "region/us", Incarnation: 50})
		r.must(&pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: next}}})
		wait(d)
		if hs := r.holds(); len(hs) != 1 || held(hs) || explained(r) {
			t.Errorf("%+v", hs)
		}
	})
}

// TestF5AVoterThatDoesNotCountIsReported in the status, until it counts again.
func TestF5AVoterThatDoesNotCountIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		wait(d)
		w1 := r.witnesses["witness/w1"]
		w1.set(func() { w1.incarnation++ })
		wait(time.Second)
		if ps := r.shell.Problems(); len(ps) != 1 || ps[0].Voter != "witness/w1" || !ps[0].Uncounted || !strings.Contains(ps[0].Text, "its data was made anew") {
			t.Errorf("%+v", ps)
		}
		w1.set(func() { w1.incarnation-- })
		wait(time.Second)
		if ps := r.shell.Problems(); len(ps) != 0 {
			t.Errorf("%+v", ps)
		}
		w1.set(func() { w1.script = lose })
		wait(2 * time.Second)
		if ps := r.shell.Problems(); len(ps) != 1 || ps[0].Voter != "witness/w1" || ps[0].Uncounted || ps[0].Text != errLost.Error() {
			t.Errorf("%+v", ps)
		}
	})
}
