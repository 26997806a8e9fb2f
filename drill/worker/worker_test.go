package worker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/instant"
)

// freezeVar makes this test binary a process that freezes itself.
const freezeVar = "WORKER_TEST_FREEZE"

func TestMain(m *testing.M) {
	if os.Getenv(freezeVar) != "" {
		fmt.Println("before")
		if err := Freeze(); err != nil {
			fmt.Println(err)
		}
		fmt.Println("after")
		return
	}
	goleak.VerifyTestMain(m)
}

// fake is a lease and the resource behind it.
type fake struct {
	now     func() instant.Instant
	token   fence.Token
	ends    instant.Instant
	ctx     context.Context
	mark    fence.Token
	writes  []string
	failing error
	onStop  func()
}

func (f *fake) Token() fence.Token       { return f.token }
func (f *fake) Region() string           { return "eu" }
func (f *fake) Context() context.Context { return f.ctx }
func (f *fake) Valid() bool              { return f.now() < f.ends }
func (f *fake) Remaining() time.Duration { return max(0, f.ends.Sub(f.now())) }

func (f *fake) Claim(_ context.Context, name string, token fence.Token) (resource.Entry, error) {
	if token < f.mark {
		return resource.Entry{}, &fence.StaleError{Resource: name, Seen: f.mark, Given: token}
	}
	f.mark = token
	return resource.Entry{}, nil
}

func (f *fake) Write(_ context.Context, name string, token fence.Token, value string) (resource.Entry, error) {
	if token < f.mark {
		return resource.Entry{}, &fence.StaleError{Resource: name, Seen: f.mark, Given: token}
	}
	f.writes = append(f.writes, value)
	return resource.Entry{}, f.failing
}

// play runs a worker in a bubble for as long as it works, at most a minute.
func play(t *testing.T, change func(c *Config, f *fake, freeze chan struct{})) (kinds []Kind, events []Event, f *fake, err error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		bubble := clock.NewRuntime()
		f = &fake{now: bubble.Now, token: 1<<32 | 1, ends: bubble.Now().Add(time.Hour), ctx: ctx}
		freeze := make(chan struct{}, 1)
		c := Config{
			Name: "w", Lock: "lock/x", Resource: f, Clock: bubble, Freeze: freeze, Every: time.Second,
			Acquire: func(context.Context, string) (Lease, error) { return f, nil },
			Stop:    func() error { f.onStop(); return nil },
			Report: func(e Event) {
				events = append(events, e)
				kinds = append(kinds, e.Kind)
			},
		}
		change(&c, f, freeze)
		err = Run(ctx, c)
	})
	return kinds, events, f, err
}

// The late write is sent though the lease ended in the freeze: that is the
// point. It is refused by its token, and the worker stops.
func TestFreezeIsBetweenCheckAndSend(t *testing.T) {
	kinds, events, f, err := play(t, func(_ *Config, f *fake, freeze chan struct{}) {
		f.onStop = func() { f.ends, f.mark = 0, 2<<32|1 }
		freeze <- struct{}{}
	})
	tail := []Kind{Freezing, Resumed, Refused}
	if err != nil || len(kinds) < 5 || !slices.Equal(kinds[:2], []Kind{Acquired, Claimed}) || !slices.Equal(kinds[len(kinds)-3:], tail) {
		t.Fatalf("%v, %v", kinds, err)
	}
	n := len(events)
	freezing, late := events[n-3], events[n-1]
	if freezing.Until <= freezing.At || late.Until != 0 || late.Mark != 2<<32|1 || late.Value != freezing.Value || slices.Contains(f.writes, late.Value) {
		t.Errorf("freezing %+v, late %+v, writes %q", freezing, late, f.writes)
	}
}

func TestWorkerWritesUntilItIsStopped(t *testing.T) {
	kinds, _, f, err := play(t, func(*Config, *fake, chan struct{}) {})
	if err != nil || len(f.writes) < 59 || slices.ContainsFunc(kinds[2:], func(k Kind) bool { return k != Written }) {
		t.Errorf("%d writes, %v, %v", len(f.writes), kinds, err)
	}
}

func TestWorkerSendsNothingWithoutValidity(t *testing.T) {
	kinds, _, f, err := play(t, func(_ *Config, f *fake, _ chan struct{}) { f.ends = f.now().Add(2500 * time.Millisecond) })
	if err != nil || len(f.writes) != 3 || kinds[len(kinds)-1] != Lost {
		t.Errorf("%d writes, %v, %v", len(f.writes), kinds, err)
	}
}

func TestWorkerStopsWhenItsLeaseIsLost(t *testing.T) {
	_, events, _, err := play(t, func(_ *Config, f *fake, _ chan struct{}) {
		ctx, lose := context.WithCancelCause(f.ctx)
		lose(errors.New("withdrawn"))
		f.ctx = ctx
	})
	if last := events[len(events)-1]; err != nil || last.Kind != Lost || last.Reason != "withdrawn" {
		t.Errorf("%+v, %v", last, err)
	}
}

// A standby asks until the lock is free, and says once that it waits.
func TestWorkerWaitsForABusyLock(t *testing.T) {
	tries := 0
	kinds, _, _, err := play(t, func(c *Config, f *fake, _ chan struct{}) {
		c.Acquire = func(context.Context, string) (Lease, error) {
			if tries++; tries < 4 {
				return nil, &client.BusyError{Resource: "lock/x"}
			}
			return f, nil
		}
	})
	if err != nil || tries != 4 || !slices.Equal(kinds[:4], []Kind{Waiting, Acquired, Claimed, Written}) {
		t.Errorf("%d tries, %v, %v", tries, kinds, err)
	}
}

func TestWorkerReportsWhatFails(t *testing.T) {
	kinds, _, _, err := play(t, func(_ *Config, f *fake, _ chan struct{}) { f.failing = errors.New("no answer") })
	if err != nil || !slices.Contains(kinds, Failed) || slices.Contains(kinds, Written) {
		t.Errorf("%v, %v", kinds, err)
	}
	kinds, _, _, err = play(t, func(_ *Config, f *fake, _ chan struct{}) { f.mark = 9 << 32 })
	if err != nil || !slices.Equal(kinds, []Kind{Acquired, Refused}) {
		t.Errorf("a stale claim: %v, %v", kinds, err)
	}
	_, _, _, err = play(t, func(c *Config, _ *fake, _ chan struct{}) {
		c.Acquire = func(context.Context, string) (Lease, error) { return nil, client.ErrDenied }
	})
	if !errors.Is(err, client.ErrDenied) {
		t.Errorf("%v", err)
	}
}

func TestConfigSaysAllThatIsMissing(t *testing.T) {
	err := Run(t.Context(), Config{Freeze: make(chan struct{}), Poll: -1})
	for _, field := range []string{"name", "lock", "acquire", "resource", "clock", "stop", "report", "poll"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("no %s in %v", field, err)
		}
	}
}

// With a real process: it stops, goes on only at SIGCONT, and nothing is done
// in between.
func TestFreezeStopsTheProcess(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	g := devcluster.NewGroup()
	defer g.Stop(ctx, time.Second)
	var out strings.Builder
	p, err := g.Start(devcluster.Spec{
		Name: "frozen", Binary: os.Args[0], Env: []string{freezeVar + "=1", "GORACE=atexit_sleep_ms=0"},
		Log: filepath.Join(t.TempDir(), "log"), Stdout: &out,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.WaitStopped(ctx); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.Signal(syscall.SIGCONT), p.Wait(ctx)); err != nil {
		t.Fatal(err)
	}
	if out.String() != "before\nafter\n" {
		t.Errorf("%q", out.String())
	}
}
