package devcluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headlease/headlease/internal/clusterfile"
)

// ErrStopped is returned once Stop was called.
var ErrStopped = errors.New("the development cluster is stopped")

const (
	// orphanWait is how long New waits for children of a killed supervisor,
	// which the kernel is ending.
	orphanWait = 3 * time.Second
	tailLines  = 8
)

// Cluster is a cluster on a directory that no other supervisor uses. Its
// methods are safe for concurrent use.
type Cluster struct {
	opts    Options
	file    clusterfile.File
	redis   string // the redis-server's path; empty: no lease caches
	lock    *os.File
	group   *Group
	records sync.WaitGroup
	stop    sync.Once
	stopErr error

	// mu guards the rest, and is held over a fork and over writing dev.json;
	// never while waiting for a process.
	mu      sync.Mutex
	state   State
	runs    map[string]*run // the newest of each
	stopped bool
	// failStart ends a Start in progress when a child dies; else nil.
	failStart context.CancelCauseFunc
}

// run is one run of a process of the cluster.
type run struct {
	*Child
	// recorded is closed when the state says that it has ended.
	recorded chan struct{}
	// wanted: somebody asked for the end. Under the cluster's lock.
	wanted bool
}

func (r *run) ended() bool {
	if r == nil {
		return true
	}
	select {
	case <-r.recorded:
		return true
	default:
		return false
	}
}

// New makes the directory's cluster, or finds it there, and takes the
// directory. It starts nothing; call Stop also if Start is never called. It
// fails, with nothing changed, if the directory holds a cluster of another
// shape, something else, or if another supervisor runs it.
func New(opts Options) (*Cluster, error) {
	opts = opts.withDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	opts, err := opts.resolve()
	if err != nil {
		return nil, err
	}
	if err := check(opts); err != nil {
		return nil, err
	}
	if err := mkdir(opts.Dir); err != nil {
		return nil, fmt.Errorf("%w; make its parent first", err)
	}
	lock, err := lockDir(opts.Dir)
	if err != nil {
		return nil, err
	}
	c := &Cluster{opts: opts, lock: lock, runs: map[string]*run{}}
	if err := c.prepare(); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	c.group = NewGroup()
	return c, nil
}

func (c *Cluster) prepare() error {
	dir := c.opts.Dir
	if err := checkOrphans(dir, orphanWait); err != nil {
		return err
	}
	var err error
	if c.file, err = loadOrMake(c.opts); err != nil {
		return err
	}
	for _, name := range []string{faultsName, dataName, logsName} {
		if err := mkdir(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	if err := makeCerts(filepath.Join(dir, certsName), c.file, c.opts.Clients); err != nil {
		return err
	}
	if err := writeFaults(filepath.Join(dir, faultsName), c.file, c.opts.RTT); err != nil {
		return err
	}
	c.state = newState(dir, c.file, c.opts.RTT, c.opts.Clients)
	for _, p := range caches(c.file) {
		if c.redis, err = findRedis(); err != nil {
			return err
		}
		if err := mkdir(filepath.Join(dir, dataName, p.Name)); err != nil {
			return err
		}
	}
	return c.state.write()
}

// lockDir takes the directory for this supervisor. The kernel gives it free
// with the process, however it ends.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("dir: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		by := "another process"
		if s, err := ReadState(dir); err == nil && s.Supervisor != 0 {
			by = fmt.Sprintf("process %d", s.Supervisor)
		}
		err = fmt.Errorf("dir %s: its cluster is run by %s; stop that one or name another directory", dir, by)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// checkOrphans makes sure that no child of a supervisor that was killed is
// left; pids that belong to other processes by now are passed over.
func checkOrphans(dir string, wait time.Duration) error {
	old, err := ReadState(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	deadline := time.Now().Add(wait)
	for _, p := range old.Processes {
		if p.alive() && !waitGone(p.PID, time.Until(deadline)) {
			errs = append(errs, fmt.Errorf("dir %s: process %d (%s) of an earlier supervisor is still running; kill it", dir, p.PID, p.Name))
		}
	}
	return errors.Join(errs...)
}

// File is the cluster file.
func (c *Cluster) File() clusterfile.File { return c.file }

// Dir is the absolute path of the directory.
func (c *Cluster) Dir() string { return c.opts.Dir }

// State is what dev.json says.
func (c *Cluster) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.state
	s.Processes = slices.Clone(s.Processes)
	return s
}

// SetAgent writes where the drill agent is into the state.
func (c *Cluster) SetAgent(a *Agent) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Agent = a
	return c.state.write()
}

// Process returns the process of that name as it is now.
func (c *Cluster) Process(name string) (Process, bool) { return c.State().Process(name) }

// Start starts every process that is not running and waits until the options'
// Ready is content. If a process ends meanwhile, or ctx does, everything is
// stopped and the error has the end of that process's log.
func (c *Cluster) Start(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	err := c.startAll(cancel)
	if err == nil && c.opts.Ready != nil {
		err = c.opts.Ready(ctx, c)
	}
	c.mu.Lock()
	c.failStart = nil
	c.mu.Unlock()
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		err = errors.Join(cause, err)
	}
	if err == nil {
		return nil
	}
	return errors.Join(fmt.Errorf("start of the development cluster: %w", err), c.Stop(context.WithoutCancel(ctx)))
}

func (c *Cluster) startAll(fail context.CancelCauseFunc) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return ErrStopped
	}
	var errs []error
	for _, p := range c.state.Processes {
		if c.runs[p.Name].ended() {
			errs = append(errs, c.checkPorts(p))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	c.failStart = fail
	for _, p := range c.state.Processes {
		if !c.runs[p.Name].ended() {
			continue
		}
		if err := c.launch(p.Name); err != nil {
			return err
		}
	}
	return c.state.write()
}

// StartProcess starts a process that has ended, on the same data and ports. It
// returns once the process is forked.
func (c *Cluster) StartProcess(name string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return ErrStopped
	}
	i := c.index(name)
	if i < 0 {
		return c.unknown(name)
	}
	if r := c.runs[name]; !r.ended() {
		return fmt.Errorf("process %s is running already, with pid %d", name, r.PID())
	}
	if err := c.checkPorts(c.state.Processes[i]); err != nil {
		return err
	}
	if err := c.launch(name); err != nil {
		return err
	}
	return c.state.write()
}

// launch forks a process and records it in the state. Called under mu.
func (c *Cluster) launch(name string) error {
	i := c.index(name)
	p := &c.state.Processes[i]
	at := p.Region
	command := []string{c.opts.Binary}
	if p.Role == RoleRedis {
		args, err := redisArgs(*p)
		if err != nil {
			return err
		}
		command = append([]string{c.redis}, args...)
	} else {
		command = append(command, c.opts.Args(*p)...)
	}
	if p.Role == string(clusterfile.RoleWitness) {
		at = p.Name
	}
	if c.opts.Places != nil {
		command = append(c.opts.Places.Enter(at), command...)
	}
	child, err := c.group.Start(Spec{
		Name: name, Binary: command[0], Args: command[1:], Dir: c.opts.Dir, Env: c.opts.Env, Log: p.Log,
	})
	if err != nil {
		return err
	}
	r := &run{Child: child, recorded: make(chan struct{})}
	c.runs[name] = r
	p.PID, p.Running, p.Exit = child.PID(), true, ""
	p.StartTicks, _ = startTicks(p.PID)
	c.opts.Logger.Debug("process started", "name", name, "pid", p.PID)
	c.records.Go(func() { c.record(r, i) })
	return nil
}

// record waits for the end of a run and writes it into the state.
func (c *Cluster) record(r *run, i int) {
	<-r.Done()
	c.mu.Lock()
	p := &c.state.Processes[i]
	p.PID, p.StartTicks, p.Running, p.Exit = 0, 0, false, r.Exit()
	err := c.state.write()
	wanted := r.wanted || c.stopped
	fail := c.failStart
	close(r.recorded)
	c.mu.Unlock()
	if err != nil {
		c.opts.Logger.Error("state of the development cluster not written", "err", err)
	}
	if wanted {
		c.opts.Logger.Debug("process ended", "name", r.Name(), "pid", r.PID(), "exit", r.Exit())
	} else {
		c.opts.Logger.Warn("process ended by itself", "name", r.Name(), "pid", r.PID(), "exit", r.Exit(), "log", r.log)
		if fail != nil {
			fail(fmt.Errorf("%s ended (%s); the end of its log %s:\n  %s", r.Name(), r.Exit(), r.log, r.LogTail()))
		}
	}
	c.opts.OnExit(Exit{Name: r.Name(), PID: r.PID(), State: r.Exit(), Wanted: wanted})
}

// Signal sends a signal to a running process: SIGKILL, SIGSTOP and SIGCONT for
// drills. It does not wait.
func (c *Cluster) Signal(name string, sig syscall.Signal) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.index(name) < 0 {
		return c.unknown(name)
	}
	r := c.runs[name]
	if r.ended() {
		return fmt.Errorf("process %s is not running", name)
	}
	switch sig {
	case syscall.SIGSTOP, syscall.SIGCONT, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGHUP:
	default:
		r.wanted = true
	}
	return r.Signal(sig)
}

// Kill sends SIGKILL to processes, all before it waits for the end of any.
func (c *Cluster) Kill(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := c.Signal(name, syscall.SIGKILL); err != nil {
			return err
		}
	}
	for _, name := range names {
		if err := c.Wait(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// Wait returns when a process has ended, at once if it is not running.
func (c *Cluster) Wait(ctx context.Context, name string) error {
	c.mu.Lock()
	r := c.runs[name]
	known := c.index(name) >= 0
	c.mu.Unlock()
	if !known {
		return c.unknown(name)
	}
	if r.ended() {
		return nil
	}
	select {
	case <-r.recorded:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of %s: %w", name, context.Cause(ctx))
	}
}

// Stop ends all processes, SIGTERM first and SIGKILL after the options' Grace
// or when ctx ends, and gives the directory free. It returns when all are gone;
// a second call waits for the first.
func (c *Cluster) Stop(ctx context.Context) error {
	c.stop.Do(func() { c.stopErr = c.stopAll(ctx) })
	return c.stopErr
}

func (c *Cluster) stopAll(ctx context.Context) error {
	c.mu.Lock()
	c.stopped = true
	c.mu.Unlock()
	for _, name := range c.group.Stop(ctx, c.opts.Grace) {
		c.opts.Logger.Warn("process did not end by SIGTERM, killed", "name", name)
	}
	c.records.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Supervisor, c.state.Agent = 0, nil
	return errors.Join(c.state.write(), c.lock.Close())
}

func (c *Cluster) index(name string) int {
	return slices.IndexFunc(c.state.Processes, func(p Process) bool { return p.Name == name })
}

func (c *Cluster) unknown(name string) error {
	var names []string
	for _, p := range c.state.Processes {
		names = append(names, p.Name)
	}
	return fmt.Errorf("process %q: not one of the cluster's; known are %v", name, names)
}
