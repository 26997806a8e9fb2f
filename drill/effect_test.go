package drill

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/internal/clock"
)

// A leader that is parted from so many followers that it has no majority must be
// followed by another one, or the fault was none.
func TestLeaderless(t *testing.T) {
	w := three()
	for text, c := range map[string]struct {
		from, to string
		both     bool
		planes   []string
		lasts    time.Duration
		want     string
	}{
		"unheard":                   {"leader of owner of p", "followers of owner of p", false, []string{"raft"}, 2 * time.Second, "us"},
		"deaf, on all planes":       {"followers of owner of p", "leader of owner of p", false, nil, 2 * time.Second, "us"},
		"for a moment":              {"leader of owner of p", "followers of owner of p", false, []string{"raft"}, time.Second, ""},
		"on another plane":          {"leader of owner of p", "followers of owner of p", false, []string{"votes", "gossip"}, time.Minute, ""},
		"from one follower":         {"leader of owner of p", "server us-1", true, nil, time.Minute, ""},
		"followers from each other": {"server us-1", "server us-3", true, nil, time.Minute, ""},
		"another region":            {"owner of p", "region eu", true, nil, time.Minute, ""},
	} {
		s := plan.Step{Do: plan.OneWay, From: target(t, c.from), To: target(t, c.to), Both: c.both, Planes: c.planes}
		links, err := w.links(s)
		if err != nil {
			t.Fatal(err)
		}
		if got := w.leaderless(s, links, c.lasts); got != c.want {
			t.Errorf("%s: %q, want %q", text, got, c.want)
		}
	}
}

// What nobody can have felt has shown nothing.
func TestFaultsThatWereNone(t *testing.T) {
	w := three()
	sys, err := clock.NewSystem()
	if err != nil {
		t.Fatal(err)
	}
	links := []link{{site{"eu", true}, site{"us", true}}, {site{"us", true}, site{"eu", true}}}
	p := &player{rig: &rig{clock: sys, watch: &watch{}}}
	f := &check.Fault{From: sys.Now()}
	if err := p.flap(t.Context(), f, w, plan.Step{Do: plan.Flap, Up: time.Second, Down: time.Hour}, links, time.Second); err != nil || f.NoEffect == "" {
		t.Errorf("a flap without a cut: %+v, %v", f, err)
	}

	loss := plan.Step{Do: plan.Loss, Share: 1e-9}
	f = &check.Fault{Full: at(0), Until: at(1000)}
	for i := range 20 {
		p.rig.watch.samples = append(p.rig.watch.samples, sample{observer: "us", region: "eu", at: at(int64(50 * i)), silent: 250 * time.Millisecond})
	}
	if p.measureLoss(f, loss, links); f.NoEffect == "" {
		t.Errorf("loss of nothing: %+v", f)
	}
	f = &check.Fault{Full: at(0), Until: at(1000)}
	p.rig.watch.samples = append(p.rig.watch.samples, sample{observer: "us", region: "eu", at: at(500), silent: 600 * time.Millisecond})
	if p.measureLoss(f, loss, links); f.NoEffect != "" || f.Effect == "" {
		t.Errorf("a heartbeat was lost: %+v", f)
	}

	// With the watch of a drill that saw no other leader.
	unheard := plan.Step{Do: plan.OneWay, From: target(t, "leader of owner of p"), To: target(t, "followers of owner of p"), Planes: []string{"raft"}}
	within, err := w.links(unheard)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		term uint64
		none bool
	}{{3, true}, {4, false}} {
		p.rig.watch.answers = []check.Answer{
			{Region: "us", Term: 3, Asked: at(800), Answered: at(900)},
			{Region: "us", Term: c.term, Asked: at(3500), Answered: at(3600)},
		}
		f = &check.Fault{From: at(1000), Until: at(3000)}
		if p.measure(f, unheard, w, within, 2*time.Second); (f.NoEffect != "") != c.none {
			t.Errorf("in term %d after the cut: %+v", c.term, f)
		}
	}
}

// mortal is processes that end by themselves.
type mortal struct {
	nobody
	ends map[string]time.Time
	did  []string
}

func (m *mortal) Ended(ctx context.Context, name string) error {
	if at, ok := m.ends[name]; ok {
		select {
		case <-time.After(time.Until(at)):
			return nil
		case <-ctx.Done():
		}
	}
	<-ctx.Done()
	return ctx.Err()
}

func (m *mortal) Signal(context.Context, string, syscall.Signal, time.Duration) error { return nil }

func (m *mortal) Start(_ context.Context, name string) error {
	if at, ok := m.ends[name]; ok && !time.Now().Before(at) {
		m.did = append(m.did, name)
	}
	return nil
}

// A drill that is broken off while a disk is broken may not have seen yet that
// the process has ended, or is about to.
func TestWhatHasEndedUnseenIsStarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &mortal{ends: map[string]time.Time{"eu-1": time.Now(), "eu-2": time.Now().Add(time.Second), "eu-4": time.Now()}}
		p := &player{rig: &rig{processes: m}, down: map[string]bool{"eu-4": true}, mayEnd: map[string]bool{"eu-1": true, "eu-2": true, "eu-3": true, "eu-4": true}}
		began := time.Now()
		if err := p.startEnded(t.Context(), []string{"eu-1", "eu-2", "eu-3", "eu-4"}); err != nil {
			t.Fatal(err)
		}
		if want := []string{"eu-1", "eu-2"}; !slices.Equal(m.did, want) || time.Since(began) > endsWithin {
			t.Errorf("started %v after %v, want %v: who is down is started elsewhere", m.did, time.Since(began), want)
		}
		if left := fmt.Sprint(sortedKeys(p.mayEnd)); !strings.Contains(left, "eu-4") || strings.Contains(left, "eu-1") {
			t.Errorf("may end still: %s", left)
		}
	})
}
