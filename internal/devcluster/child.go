package devcluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Group starts processes that do not outlive this one: each leads a process
// group of its own and gets SIGKILL when this process dies. Cluster stands on
// one; a drill has another for its workers. Safe for concurrent use.
//
// All forks are made by one thread that lives as long as the group: the kernel
// sends the parent-death signal when the thread that forked ends, and the Go
// runtime may end threads.
type Group struct {
	work    chan func()
	done    chan struct{}
	reapers sync.WaitGroup

	mu       sync.Mutex // held over a fork
	children map[*Child]struct{}
	stopped  bool
}

// Spec is a process to start.
type Spec struct {
	// Name is for errors.
	Name   string
	Binary string
	Args   []string
	// Dir is the working directory; empty: this process's.
	Dir string
	// Env is added to this process's environment without HEADLEASE_
	// variables, which would override the child's cluster file.
	Env []string
	// Log is the file to which stderr is appended, and stdout if Stdout is nil.
	Log string
	// Stdout gets what the process prints. A write that blocks holds the
	// process up.
	Stdout io.Writer
}

// Child is one run of a process.
type Child struct {
	name string
	log  string
	cmd  *exec.Cmd
	done chan struct{}
	exit string // before done is closed
}

// NewGroup makes a group and its thread; Stop ends it.
func NewGroup() *Group {
	g := &Group{work: make(chan func()), done: make(chan struct{}), children: map[*Child]struct{}{}}
	go func() {
		defer close(g.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for f := range g.work {
			f()
		}
	}()
	return g
}

// Start forks a process.
func (g *Group) Start(s Spec) (*Child, error) {
	log, err := os.OpenFile(s.Log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("log of %s: %w", s.Name, err)
	}
	cmd := exec.Command(s.Binary, s.Args...)
	cmd.Dir = s.Dir
	cmd.Env = childEnv(os.Environ(), s.Env)
	cmd.Stdout, cmd.Stderr = log, log
	if s.Stdout != nil {
		cmd.Stdout = s.Stdout
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second // a grandchild may hold the pipe of Stdout open
	c := &Child{name: s.Name, log: s.Log, cmd: cmd, done: make(chan struct{})}
	err = g.fork(c)
	if err = errors.Join(err, log.Close()); err != nil {
		return nil, fmt.Errorf("start %s: %w", s.Name, err)
	}
	return c, nil
}

func (g *Group) fork(c *Child) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stopped {
		return ErrStopped
	}
	result := make(chan error, 1)
	g.work <- func() { result <- c.cmd.Start() }
	if err := <-result; err != nil {
		return err
	}
	g.children[c] = struct{}{}
	g.reapers.Go(func() {
		if err := c.cmd.Wait(); c.cmd.ProcessState != nil {
			c.exit = c.cmd.ProcessState.String()
		} else {
			c.exit = err.Error()
		}
		close(c.done)
		g.mu.Lock()
		delete(g.children, c)
		g.mu.Unlock()
	})
	return nil
}

// Stop ends all processes of the group, SIGTERM first and SIGKILL to what is
// left after grace or when ctx ends. It returns the names of those killed, when
// all are gone. Nothing can be started afterwards.
func (g *Group) Stop(ctx context.Context, grace time.Duration) (killed []string) {
	g.mu.Lock()
	if g.stopped {
		g.mu.Unlock()
		<-g.done
		return nil
	}
	g.stopped = true
	var all []*Child
	for c := range g.children {
		all = append(all, c)
		// The errors say that it has ended. A stopped process hears SIGTERM
		// only once it goes on.
		_ = c.cmd.Process.Signal(syscall.SIGTERM)
		_ = c.cmd.Process.Signal(syscall.SIGCONT)
	}
	g.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	for _, c := range all {
		if c.Wait(ctx) != nil {
			killed = append(killed, c.name)
			c.killGroup()
		}
	}
	g.reapers.Wait()
	close(g.work)
	<-g.done
	return killed
}

// Name is the spec's.
func (c *Child) Name() string { return c.name }

// PID of the process.
func (c *Child) PID() int { return c.cmd.Process.Pid }

// Done is closed when the process has ended.
func (c *Child) Done() <-chan struct{} { return c.done }

// Exit is how it ended, in words ("exit status 1", "signal: killed"); empty
// while it runs.
func (c *Child) Exit() string {
	if c.Running() {
		return ""
	}
	return c.exit
}

// Running reports whether the process has not ended; a stopped one runs.
func (c *Child) Running() bool {
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

// Signal sends a signal to the process alone. It does not wait.
func (c *Child) Signal(sig syscall.Signal) error {
	if err := c.cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("%v to %s: %w", sig, c.name, err)
	}
	return nil
}

// Wait returns nil when the process has ended, or the cause of ctx's end.
func (c *Child) Wait(ctx context.Context) error {
	select {
	case <-c.done:
		return nil
	default:
	}
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of %s: %w", c.name, context.Cause(ctx))
	}
}

// WaitStopped returns nil when the process is stopped, by SIGSTOP of whoever,
// and an error when it has ended or ctx has.
func (c *Child) WaitStopped(ctx context.Context) error {
	// There is no event for it but wait4, which would take the exit from Wait.
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if s, ok := readStat(c.PID()); ok && s.state == "T" {
			return nil
		}
		select {
		case <-tick.C:
		case <-c.done:
			return fmt.Errorf("%s ended (%s) and did not stop; the end of its log:\n  %s", c.name, c.exit, c.LogTail())
		case <-ctx.Done():
			return fmt.Errorf("wait for %s to stop: %w", c.name, context.Cause(ctx))
		}
	}
}

// LogTail is the last lines of the log, indented, for an error's text.
func (c *Child) LogTail() string { return logTail(c.log, tailLines) }

// killGroup ends the whole process group. The error says that it is gone.
func (c *Child) killGroup() { _ = syscall.Kill(-c.PID(), syscall.SIGKILL) }

func childEnv(own, extra []string) []string {
	return append(slices.DeleteFunc(slices.Clone(own), func(kv string) bool {
		return strings.HasPrefix(kv, "HEADLEASE_")
	}), extra...)
}

func logTail(path string, lines int) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = f.Close() }() // only read
	const most = 8 << 10
	if info, err := f.Stat(); err == nil && info.Size() > most {
		if _, err := f.Seek(-most, io.SeekEnd); err != nil {
			return err.Error()
		}
	}
	data, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil {
		return err.Error()
	}
	all := bytes.Split(bytes.TrimRight(data, "\n"), []byte{'\n'})
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	return string(bytes.Join(all, []byte("\n  ")))
}

// waitGone waits until a process that is not a child of this one has ended.
func waitGone(pid int, timeout time.Duration) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return true
	}
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(fd) }()
	deadline := time.Now().Add(timeout)
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(max(time.Until(deadline), 0).Milliseconds()))
		if !errors.Is(err, unix.EINTR) {
			return err == nil && n == 1
		}
	}
}
