package run

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// wait lets d pass and everything that it brings happen.
func wait(d time.Duration) {
	time.Sleep(d) // the bubble's time
	synctest.Wait()
}

func TestPromotionAndRenewalsEveryFifthOfD(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		wait(d)
		hs := r.holds()
		if len(hs) != 6 {
			t.Fatalf("in one D there is the first round and one each D/5; the hold moved at %v", hs)
		}
		for i, h := range hs {
			if h.epoch != 1 || h.until.Sub(h.at) > hold || h.until.Sub(h.at) < hold-time.Millisecond {
				t.Errorf("hold %d: %+v; want %v from the start of its round", i, h, hold)
			}
			if i > 0 && h.at.Sub(hs[i-1].at) != d/5 {
				t.Errorf("renewal %d came after %v", i, h.at.Sub(hs[i-1].at))
			}
		}
		if p, _ := r.View().Partition("p"); !p.Live() || p.Epoch != 1 {
			t.Errorf("not adopted: %+v", p)
		}
	})
}

func TestLapseWhenVotesStopAndResumeWithTheSameEpoch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		wait(d)
		last := r.holds()
		until := last[len(last)-1].until
		for _, script := range []func(context.Context, *pb.VoterState) error{lose, silent} {
			r.each(func(w *witness) { w.script = script })
			wait(2 * d)
			hs := r.holds()
			end := hs[len(hs)-1]
			if held(hs) || len(hs) != 1 || end.at != until {
				t.Fatalf("with no votes since the hold until %v: %v", until, hs)
			}
			r.each(func(w *witness) { w.script = nil })
			wait(2 * d)
			hs = r.holds()
			if !held(hs) || hs[0].epoch != 1 {
				t.Fatalf("with votes again: %v", hs)
			}
			until = hs[len(hs)-1].until
		}
	})
}

// TestF33ALateAnswerCountsForItsOwnRound: answers take D/2; the hold runs from
// the start of their rounds, not from their arrival.
func TestF33ALateAnswerCountsForItsOwnRound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		wait(d)
		r.holds()
		const late = 1400 * time.Millisecond
		r.each(func(w *witness) {
			w.script = func(ctx context.Context, _ *pb.VoterState) error {
				select {
				case <-time.After(late):
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		})
		wait(2 * d)
		hs := r.holds()
		if !held(hs) || len(hs) < 8 {
			t.Fatalf("%v", hs)
		}
		for _, h := range hs[1:] {
			if left := h.until.Sub(h.at); left != hold-late {
				t.Errorf("an answer %v late leaves %v, want %v", late, left, hold-late)
			}
		}
	})
}

func TestAnswersThatDoNotCount(t *testing.T) {
	for name, script := range map[string]func(context.Context, *pb.VoterState) error{
		"wrong voter":         func(_ context.Context, st *pb.VoterState) error { st.Voter.Id = "witness/w9"; return nil },
		"own voter's name":    func(_ context.Context, st *pb.VoterState) error { st.Voter.Id = "region/eu"; return nil },
		"wrong round":         func(_ context.Context, st *pb.VoterState) error { st.Round++; return nil },
		"another incarnation": func(_ context.Context, st *pb.VoterState) error { st.Voter.Incarnation++; return nil },
		"F5 writes forgotten": func(_ context.Context, st *pb.VoterState) error { st.Writes = 1; return nil },
		"F5 a copy's life": func(_ context.Context, st *pb.VoterState) error {
			st.Life, st.Continues = 5, false
			st.Writes += 9
			return nil
		},
		"F5 rolled back by one write, then restarted": func(_ context.Context, st *pb.VoterState) error {
			st.Life, st.Continues = 5, true
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t)
				r.elect()
				wait(d)
				r.holds()
				r.each(func(w *witness) { w.script = script })
				wait(2 * d)
				if hs := r.holds(); held(hs) {
					t.Errorf("still holding: %v", hs)
				}
			})
		})
	}
}

// TestF5RestartsBetweenTwoQuestions: a witness that restarted several times
// while nobody asked is no copy; its new life is committed.
func TestF5RestartsBetweenTwoQuestions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		wait(d)
		r.each(func(w *witness) { w.script = lose })
		wait(2 * d)
		r.holds()
		for _, w := range r.witnesses {
			w.restart()
			w.restart()
			w.restart()
		}
		r.each(func(w *witness) { w.script = nil })
		wait(2 * d)
		if hs := r.holds(); !held(hs) {
			t.Fatalf("the witnesses' votes are not counted after three restarts: %v", hs)
		}
		n := 0
		for v := range r.View().Voters() {
			if n++; v.Life != 103 {
				t.Errorf("voter %s: life %d is committed", v.ID, v.Life)
			}
		}
		if n != 2 {
			t.Errorf("%d voters are recorded", n)
		}
	})
}

// TestF5TheNextLeaderKnowsTheLives: it counts no vote of data that its
// predecessor has seen ahead.
func TestF5TheNextLeaderKnowsTheLives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		wait(d)
		r.depose()
		wait(2 * d)
		r.holds()
		r.each(func(w *witness) { w.life, w.lives = 5, []uint64{5} })
		r.elect()
		wait(2 * d)
		if hs := r.holds(); held(hs) {
			t.Errorf("votes of another line of lives counted: %v", hs)
		}
	})
}

// TestF19AVoteOfBeforeAClockGapCountsForNoRoundAfterIt: the proposers of one
// term number their rounds alike.
func TestF19AVoteOfBeforeAClockGapCountsForNoRoundAfterIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		// The answers of the first rounds are on their way, whatever becomes of
		// their questions.
		release := make(chan struct{})
		r.each(func(w *witness) {
			w.script = func(context.Context, *pb.VoterState) error { <-release; return nil }
		})
		r.elect()
		wait(d / 8)
		r.each(func(w *witness) { w.script = silent })
		r.shell.ClockGap()
		synctest.Wait()
		close(release)
		wait(d / 8)
		parts, _ := r.shell.Explain()
		for _, st := range parts {
			if st.Text == "" || st.Held != 0 {
				t.Errorf("%+v", st)
			}
		}
		if p, _ := r.View().Partition("p"); !p.Register.Promised.IsZero() {
			t.Errorf("answers of before the gap went for a round after it: %+v", p.Register)
		}
	})
}

func TestF19AClockGapGivesUpWhatIsHeldAndResumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		wait(d)
		r.holds()
		r.shell.ClockGap()
		if hs := r.holds(); len(hs) != 1 || held(hs) {
			t.Fatalf("at the gap: %v", hs)
		}
		wait(d / 5)
		if hs := r.holds(); !held(hs) || hs[0].epoch != 1 {
			t.Fatalf("after the gap: %v", hs)
		}
	})
}

// TestF19ACommandOfBeforeAClockGapIsWaitedFor: the new proposer reads what is
// live from the state, so it begins when nothing is on its way there.
func TestF19ACommandOfBeforeAClockGapIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		gate := make(chan struct{})
		r.set(func() { r.gate = gate }) // holds ReserveBallot
		wait(d / 8)
		r.shell.ClockGap()
		wait(2 * d)
		if parts, restarts := r.shell.Explain(); parts != nil || restarts != 1 {
			t.Fatal("a proposer began while a command of its predecessor was on its way")
		}
		r.set(func() { r.gate = nil })
		close(gate)
		wait(d)
		if hs := r.holds(); !held(hs) {
			t.Fatalf("not promoted: %v", hs)
		}
	})
}

func TestDeposedInACampaignTellsNobodyAnythingMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		gate := make(chan struct{})
		r.set(func() { r.gate = gate })
		wait(d / 8)
		r.depose()
		close(gate)
		wait(2 * d)
		if hs := r.holds(); len(hs) != 0 {
			t.Errorf("a deposed leader's heads: %v", hs)
		}
		asked := r.witnesses["witness/w1"].questions()
		wait(2 * d)
		if now := r.witnesses["witness/w1"].questions(); now != asked {
			t.Errorf("a deposed leader asks: %d questions, then %d", asked, now)
		}
		r.set(func() { r.gate = nil })
		r.elect()
		wait(2 * d)
		if hs := r.holds(); !held(hs) {
			t.Errorf("the next leader: %v", hs)
		}
	})
}

func TestF30WithAStalePulseNoRoundCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		wait(d)
		r.holds()
		r.set(func() { r.stale = true })
		wait(2 * d)
		if hs := r.holds(); len(hs) != 1 || held(hs) {
			t.Fatalf("with a stale pulse: %v", hs)
		}
		r.set(func() { r.stale = false })
		wait(d)
		if hs := r.holds(); !held(hs) {
			t.Fatalf("with a fresh pulse: %v", hs)
		}
	})
}

// TestF50ASilentVoterIsAskedAgainInTime: after 1.5 s, and not faster than the
// back-off when it refuses at once.
func TestF50ASilentVoterIsAskedAgainInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		for _, c := range []struct {
			what     string
			script   func(context.Context, *pb.VoterState) error
			from, to int
		}{{"silent", silent, 2, 8}, {"refusing", lose, 4, 40}} {
			r.each(func(w *witness) { w.script = c.script })
			before := r.witnesses["witness/w1"].questions()
			r.elect()
			wait(minPatience + 100*time.Millisecond)
			if n := r.witnesses["witness/w1"].questions() - before; n < c.from || n > c.to {
				t.Errorf("a %s voter was asked %d times, want %d to %d", c.what, n, c.from, c.to)
			}
		}
	})
}

// TestF50AVoterThatIsFarForAWhileIsHeard: round trips of 2 to 2.5 s, longer than
// silence is waited for, cost no hold of 4 s: the first attempt goes on beside the
// fresh one.
func TestF50AVoterThatIsFarForAWhileIsHeard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t)
		r.elect()
		wait(d)
		heldOn(t, r, "near")
		var n atomic.Int64
		r.each(func(w *witness) {
			w.script = func(ctx context.Context, _ *pb.VoterState) error {
				select {
				case <-time.After(2*time.Second + time.Duration(n.Add(1)*97%500)*time.Millisecond):
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		})
		for range 20 {
			wait(d)
			heldOn(t, r, "far")
		}
		r.each(func(w *witness) { w.script = nil })
		wait(d)
		heldOn(t, r, "near again")
	})
}
