package rungroup

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errDisk = errors.New("disk full")

func untilStopped(ctx context.Context) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

func TestFirstErrorStopsAllWithItsCause(t *testing.T) {
	var cause error
	err := Run(t.Context(),
		Task{"watch", func(ctx context.Context) error {
			<-ctx.Done()
			cause = context.Cause(ctx)
			return ctx.Err()
		}},
		Task{"store", func(context.Context) error { return errDisk }},
	)
	if !errors.Is(err, errDisk) || err.Error() != "store: disk full" {
		t.Errorf("error %v", err)
	}
	if cause == nil || cause.Error() != "store: disk full" {
		t.Errorf("cause %v", cause)
	}
}

func TestTasksStopInReverseOrder(t *testing.T) {
	var mu sync.Mutex
	var order []string
	stopping := func(name string) Task {
		return Task{name, func(ctx context.Context) error {
			<-ctx.Done()
			for range 50 { // let a task that was told too early overtake
				runtime.Gosched()
			}
			mu.Lock()
			defer mu.Unlock()
			order = append(order, name)
			return nil
		}}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Run(ctx, stopping("links"), stopping("raft"), stopping("api")); err != nil {
		t.Error(err)
	}
	if want := []string{"api", "raft", "links"}; !slices.Equal(order, want) {
		t.Errorf("order %v", order)
	}
}

func TestTheEndOfTheParentIsNoError(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("signal: terminated")
	cancel(why)
	if err := Run(ctx, Task{"a", untilStopped}, Task{"b", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }}); err != nil {
		t.Error(err)
	}
}

func TestNilLeavesTheOthersRunning(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan struct{})
	err := Run(ctx,
		Task{"once", func(context.Context) error { close(done); return nil }},
		Task{"long", func(ctx context.Context) error {
			<-done
			if ctx.Err() != nil {
				t.Error("stopped by a task that was done")
			}
			cancel()
			return untilStopped(ctx)
		}},
	)
	if err != nil {
		t.Error(err)
	}
	if err := Run(t.Context()); err != nil {
		t.Errorf("no tasks: %v", err)
	}
}

func TestAnErrorWhileStoppingIsKept(t *testing.T) {
	errFlush := errors.New("flush failed")
	err := Run(t.Context(),
		Task{"log", func(ctx context.Context) error { <-ctx.Done(); return errFlush }},
		Task{"store", func(context.Context) error { return errDisk }},
	)
	if !errors.Is(err, errDisk) || !errors.Is(err, errFlush) || err.Error() != "store: disk full\nlog: flush failed" {
		t.Errorf("error %v", err)
	}
}

func TestPanicIsAnErrorWithItsStack(t *testing.T) {
	err := Run(t.Context(), Task{"watch", untilStopped}, Task{"fsm", func(context.Context) error { panic(errDisk) }})
	var p *PanicError
	if !errors.As(err, &p) || !errors.Is(err, errDisk) {
		t.Fatalf("error %v", err)
	}
	if !strings.HasPrefix(err.Error(), "fsm: panic: disk full") || !strings.Contains(string(p.Stack), "rungroup_test.go") {
		t.Errorf("error %v", err)
	}
}

func TestGoexitIsAnError(t *testing.T) {
	err := Run(t.Context(), Task{"odd", func(context.Context) error { runtime.Goexit(); return nil }})
	if err == nil || err.Error() != "odd: "+errExited.Error() {
		t.Errorf("error %v", err)
	}
}
