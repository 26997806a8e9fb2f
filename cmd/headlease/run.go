package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/client"
)

// Exit codes of a command that could not be started, as shells give them.
const (
	exitNotExecutable = 126
	exitNotFound      = 127
	exitSignal        = 128 // plus the signal's number
)

const (
	// killAhead is how long before the end of the validity the kill is sent.
	killAhead = 25 * time.Millisecond
	// watchEvery bounds the time between two looks at the clock while the
	// command is being ended: timers count neither suspends nor freezes.
	watchEvery = 10 * time.Millisecond
)

func newRunCmd(a *app) *cobra.Command {
	var o leaseOptions
	cmd := &cobra.Command{
		Use:   "run RESOURCE [flags] -- COMMAND [ARGS…]",
		Short: "Run a command while a lease is held",
		Long: `Run acquires a lease, runs the command in a process group of its own, keeps the
lease meanwhile and releases it afterwards. The command finds the fencing token in
HEADLEASE_TOKEN and the resource in HEADLEASE_RESOURCE. It should send the token
with every write, so that the resource can refuse a late one.

When the lease is about to end and cannot be kept, the process group gets SIGTERM,
at the latest 100 ms before the lease ends, and SIGKILL before it has ended. If run
itself is frozen it does so as soon as it is not: only the token helps till then.

Signals are passed on to the process group, and what is left of it when the command
has ended is killed before the lease is released.

Run exits with the command's code, 128+N if signal N ended it, and 1 if it would be
0 but the lease was lost; 127 if the command was not found and 126 if it could not
be started.`,
		Example: `  headlease run lock/nightly-report -- ./report.sh
  headlease run shard/68 --wait --ttl 30s -- worker --shard 68
  headlease run lock/build --slots 4 --wait -- make`,
		Args: usage(resourceAndCommand),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.validate(cmd, args[0]); err != nil {
				return err
			}
			if _, err := exec.LookPath(args[1]); err != nil {
				return cannotStart(args[1], err)
			}
			return a.withClient(o, func(_ client.Config, c *client.Client) error {
				l, err := o.take(cmd, c, args[0])
				if err != nil {
					return err
				}
				err = runUnder(a, l, args[1:])
				if rel := release(cmd.Context(), l); rel != nil {
					// The close of the session is what is left to try.
					return errors.Join(err, rel)
				}
				return err
			})
		},
	}
	o.acquire(cmd)
	return cmd
}

// resourceAndCommand are the arguments of a command that runs another one.
func resourceAndCommand(cmd *cobra.Command, args []string) error {
	switch dash := cmd.ArgsLenAtDash(); {
	case len(args) == 0 || dash == 0:
		return errors.New("no resource is given; write RESOURCE -- COMMAND")
	case dash > 1:
		return fmt.Errorf("%d arguments before '--'; write one RESOURCE -- COMMAND", dash)
	case dash < 0 || len(args) < 2:
		return errors.New("no command is given; write RESOURCE -- COMMAND")
	}
	return nil
}

func cannotStart(name string, err error) error {
	code := exitNotExecutable
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		code = exitNotFound
	}
	return &exitError{code: code, err: fmt.Errorf("cannot start the command: %w", err)}
}

// passedOn are the signals that the command gets in our place.
var passedOn = []os.Signal{
	syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2,
	syscall.SIGWINCH, syscall.SIGTSTP, syscall.SIGCONT,
}

// runUnder runs a command under a lease and returns its exit code as an error.
func runUnder(a *app, l *client.Lease, argv []string) error {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, passedOn...)
	defer signal.Stop(signals)

	cmd := exec.Command(argv[0], argv[1:]...) //nolint:gosec // that is what run is for
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), "HEADLEASE_TOKEN="+l.Token().String(), "HEADLEASE_RESOURCE="+l.Resource())
	restore := ownGroup(cmd)
	defer restore()
	if l.Context().Err() != nil {
		return context.Cause(l.Context())
	}
	if err := cmd.Start(); err != nil {
		return cannotStart(argv[0], err)
	}
	group := -cmd.Process.Pid
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // ends with the command, which is waited for

	var (
		lost   = l.Context().Done()
		timer  <-chan time.Time
		reason error
	)
	for {
		select {
		case err := <-ended:
			// Nobody of the group works on once the lease is given back.
			_ = syscall.Kill(group, syscall.SIGKILL)
			return commandError(a, err, reason)
		case s := <-signals:
			if reason == nil { // else it has got its signal
				_ = syscall.Kill(group, s.(syscall.Signal)) // os/signal delivers no other kind; the group may have ended
			}
			continue
		case <-lost:
			lost, reason = nil, context.Cause(l.Context())
			_ = syscall.Kill(group, syscall.SIGTERM)
			_ = syscall.Kill(group, syscall.SIGCONT) // a stopped one must hear it
		case <-timer:
		}
		if reason == nil {
			continue
		}
		left := l.Remaining() - killAhead
		if left <= 0 {
			_ = syscall.Kill(group, syscall.SIGKILL)
			left = time.Second
		}
		timer = time.After(min(left, watchEvery))
	}
}

// commandError makes the error of a command that has ended: its exit code, and
// why the lease was lost, if it was.
func commandError(a *app, err, lost error) error {
	code := exitOK
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		code = exit.ExitCode()
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
			code = exitSignal + int(status.Signal())
		}
	case err != nil:
		return fmt.Errorf("wait for the command: %w", err)
	}
	switch {
	case lost != nil:
		return &exitError{code: max(code, exitFailed), err: fmt.Errorf("the command was ended: %w", lost)}
	case code != exitOK:
		return &exitError{code: code}
	}
	return nil
}
