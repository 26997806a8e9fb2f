package resource

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/headlease/headlease/internal/devcluster"
)

// ready is the first line that a resource process prints.
type ready struct {
	Address string `json:"address"`
}

// PrintReady is a Config.Ready that tells a StartProcess the address.
func PrintReady(w io.Writer) func(address string) {
	return func(address string) {
		// It fails if who started this has gone; then nobody needs it.
		_ = json.NewEncoder(w).Encode(ready{address})
	}
}

// ParseGuard reads the value of --guard.
func ParseGuard(s string) (unguarded bool, err error) {
	switch s {
	case "on":
		return false, nil
	case "off":
		return true, nil
	default:
		return false, fmt.Errorf("guard %q: write on, or off for the control run of a drill", s)
	}
}

// ProcessOptions of a resource process.
type ProcessOptions struct {
	Group *devcluster.Group
	// Binary is run with Args: `drill resource` with its flags by default.
	Binary string
	Args   func(ProcessOptions) []string
	// Env is added to this process's environment.
	Env []string
	// Dir of the data and Log file of what it says.
	Dir, Log string
	// Address on loopback; default 127.0.0.1:0.
	Address           string
	UnguardedForDrill bool
}

// DefaultArgs is how `headlease` is started as a resource.
func DefaultArgs(o ProcessOptions) []string {
	guard := "on"
	if o.UnguardedForDrill {
		guard = "off"
	}
	args := []string{"drill", "resource", "--dir", o.Dir, "--guard", guard}
	if o.Address != "" {
		args = append(args, "--address", o.Address)
	}
	return args
}

// Process is a running resource process.
type Process struct {
	*devcluster.Child
	Address string
}

// StartProcess starts a resource and returns when it serves. The group ends it.
func StartProcess(ctx context.Context, o ProcessOptions) (*Process, error) {
	if o.Args == nil {
		o.Args = DefaultArgs
	}
	first := make(chan ready, 1)
	out := devcluster.NewLines(func(line []byte) {
		var r ready
		if json.Unmarshal(line, &r) != nil || r.Address == "" {
			return
		}
		select {
		case first <- r:
		default: // it is known already
		}
	})
	child, err := o.Group.Start(devcluster.Spec{
		Name: "resource", Binary: o.Binary, Args: o.Args(o), Env: o.Env, Log: o.Log, Stdout: out,
	})
	if err != nil {
		return nil, err
	}
	select {
	case r := <-first:
		return &Process{child, r.Address}, nil
	case <-child.Done():
		return nil, fmt.Errorf("resource ended (%s) before it served; the end of its log:\n  %s", child.Exit(), child.LogTail())
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the resource to serve: %w", context.Cause(ctx))
	}
}
