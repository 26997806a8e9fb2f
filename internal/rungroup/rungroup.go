// Package rungroup runs the parts of a process, each as a named task: the first
// error stops all of them, a panic is an error, and Run returns only when every
// task has.
package rungroup

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
)

// Task is one part of a process. Run must return when its context ends; an
// error that is no more than the context's own is then no failure. A task that
// returns nil is done, and the others go on.
type Task struct {
	Name string
	Run  func(ctx context.Context) error
}

// PanicError is a panic of a task.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v\n%s", e.Value, e.Stack) }

// Unwrap returns the panic's value if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

var (
	errExited  = errors.New("task ended its goroutine instead of returning")
	errStopped = errors.New("run group stopped")
)

type result struct {
	index int
	err   error
}

// Run starts the tasks in order and waits for all of them. When one fails, or
// ctx ends, it stops them in reverse order: a task's context ends, with the
// first error as its cause, only after every task listed behind it has
// returned. So list what others lean on (the store, the links) before them.
//
// It returns nil if every task returned nil, or nothing but the end of ctx
// stopped them; else the first error, under its task's name, joined with
// the errors of tasks that failed while stopping.
func Run(ctx context.Context, tasks ...Task) error {
	n := len(tasks)
	results := make(chan result, n)
	cancels := make([]context.CancelCauseFunc, n)
	running := make([]bool, n)
	for i, task := range tasks {
		// Detached from ctx's end, not from its values: it is stopped in its
		// turn.
		taskCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
		cancels[i], running[i] = cancel, true
		defer cancel(errStopped)
		go call(taskCtx, task, func(err error) { results <- result{i, err} })
	}

	var errs []error
	var cause error
	collect := func(r result) {
		running[r.index] = false
		if r.err == nil || cause != nil && isEcho(r.err, cause) {
			return
		}
		err := fmt.Errorf("%s: %w", tasks[r.index].Name, r.err)
		errs = append(errs, err)
		if cause == nil {
			cause = err
		}
	}
	for left := n; left > 0 && cause == nil; {
		select {
		case r := <-results:
			collect(r)
			left--
		case <-ctx.Done():
			cause = context.Cause(ctx)
		}
	}
	for i := n - 1; i >= 0; i-- {
		cancels[i](cause)
		for running[i] {
			collect(<-results)
		}
	}
	return errors.Join(errs...)
}

// isEcho reports whether err only repeats why the task was stopped.
func isEcho(err, cause error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, cause)
}

// call runs one task and hands its result to done, also if it panics or ends
// its goroutine.
func call(ctx context.Context, task Task, done func(error)) {
	err := errExited
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
		done(err)
	}()
	err = task.Run(ctx)
}
