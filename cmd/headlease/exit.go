package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes. run passes on its child's.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

// usageError is a command line that makes no sense.
type usageError struct {
	command string
	err     error
}

func (e *usageError) Error() string {
	return fmt.Sprintf("%v; see '%s --help'", e.err, e.command)
}

func (e *usageError) Unwrap() error { return e.err }

// exitError ends the process with a code of its own. With a nil err nothing is
// printed: the command has said what there is to say.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// execute runs the command line and is the only way out: it prints the error,
// if any, and returns the exit code. An interrupt or SIGTERM ends the command's
// context.
func execute(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	root := newRoot(&app{stdout: stdout, stderr: stderr})
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	return exitCode(root.ExecuteContext(ctx), stderr)
}

func exitCode(err error, stderr io.Writer) int {
	if err == nil {
		return exitOK
	}
	code := exitFailed
	if e := (*exitError)(nil); errors.As(err, &e) {
		if code = e.code; e.err == nil {
			return code
		}
	}
	if errors.As(err, new(*usageError)) {
		code = exitUsage
	}
	_, _ = fmt.Fprintf(stderr, "headlease: %v\n", err) // there is nobody left to tell
	return code
}

// usage makes a command's complaint about its arguments a usageError.
func usage(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			if strings.Contains(err.Error(), "arg(s)") { // cobra counts, and names none
				err = fmt.Errorf("received %s; write '%s'", count(len(args), "argument"), cmd.UseLine())
			}
			return &usageError{cmd.CommandPath(), err}
		}
		return nil
	}
}
