package devcluster

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// small is a cluster of this test binary: two regions of one server and a witness.
func small(t *testing.T, dir string, more ...string) (Options, hello) {
	t.Helper()
	h, err := newHello()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.l.Close() })
	return Options{
		Dir: dir, Binary: os.Args[0], Regions: 2, Servers: 1, Witnesses: 1, D: 2 * time.Second,
		Logger: quiet, Ready: h.wait, Env: h.env("child", more...),
	}, h
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func started(t *testing.T, o Options) *Cluster {
	t.Helper()
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Stop(context.Background()) })
	if err := c.Start(within(t)); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestRunKillStartStopResume(t *testing.T) {
	t.Setenv("HEADLEASE_D", "9s") // must not reach the children
	dir := filepath.Join(t.TempDir(), "cluster")
	o, h := small(t, dir)
	exits := make(chan Exit, 10)
	o.OnExit = func(e Exit) { exits <- e }
	c := started(t, o)
	ctx := within(t)

	before := c.State()
	onDisk, err := ReadState(dir)
	if err != nil {
		t.Fatal(err)
	}
	if onDisk.Supervisor != os.Getpid() || len(onDisk.Processes) != 3 {
		t.Fatalf("dev.json: %+v", onDisk)
	}
	for _, p := range onDisk.Processes {
		if !p.alive() || !p.Running {
			t.Errorf("%s is not alive by dev.json: %+v", p.Name, p)
		}
		if pgid, err := unix.Getpgid(p.PID); err != nil || pgid != p.PID {
			t.Errorf("%s leads no process group of its own: %d, %v", p.Name, pgid, err)
		}
		for _, path := range []string{p.Cert, p.Key, p.Config, p.Faults, p.DataDir, p.Log} {
			if _, err := os.Stat(path); err != nil || !filepath.IsAbs(path) {
				t.Errorf("%s: path %q: %v", p.Name, path, err)
			}
		}
	}

	// Killed: it stays dead until it is started again, on the same ports.
	const name = "us-virginia-1"
	if err := c.Kill(ctx, name); err != nil {
		t.Fatal(err)
	}
	if e := <-exits; e.Name != name || e.State != "signal: killed" || !e.Wanted {
		t.Errorf("exit %+v", e)
	}
	if p, _ := c.Process(name); p.Running || p.PID != 0 || p.Exit != "signal: killed" {
		t.Errorf("after the kill: %+v", p)
	}
	if err := c.Signal(name, syscall.SIGTERM); err == nil || !strings.Contains(err.Error(), "not running") {
		t.Errorf("signal to a dead process: %v", err)
	}
	if err := c.StartProcess(name); err != nil {
		t.Fatal(err)
	}
	if names, err := h.heard(ctx, 1); err != nil || !names[name] {
		t.Fatalf("up again: %v, %v", names, err)
	}
	if err := c.StartProcess(name); err == nil || !strings.Contains(err.Error(), "running already") {
		t.Errorf("started twice: %v", err)
	}
	if err := c.StartProcess("eu-1"); err == nil || !strings.Contains(err.Error(), "eu-frankfurt-1 us-virginia-1 w-oregon") {
		t.Errorf("unknown name: %v", err)
	}
	p, _ := c.Process(name)
	log, err := os.ReadFile(p.Log)
	if err != nil || strings.Count(string(log), "is up") != 2 {
		t.Errorf("log of %s is %q, %v", name, log, err)
	}

	// A second supervisor is kept out.
	if _, err := New(o); err == nil || !strings.Contains(err.Error(), "its cluster is run by process") {
		t.Errorf("second supervisor: %v", err)
	}

	// Stop ends a stopped process, too, and all by SIGTERM.
	if err := c.Signal("w-oregon", syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := c.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if e := <-exits; e.State != "exit status 0" || !e.Wanted {
			t.Errorf("at the end %+v", e)
		}
	}
	if s, err := ReadState(dir); err != nil || s.Supervisor != 0 || slices.ContainsFunc(s.Processes, func(p Process) bool { return p.Running || p.PID != 0 }) {
		t.Errorf("dev.json after Stop: %+v, %v", s, err)
	}
	if err := c.StartProcess(name); err == nil {
		t.Error("a stopped cluster starts processes")
	}

	// Resumed with the shape left out: same addresses, certificates and data.
	file, err := os.ReadFile(filepath.Join(dir, clusterName))
	if err != nil {
		t.Fatal(err)
	}
	cert, err := os.ReadFile(p.Cert)
	if err != nil {
		t.Fatal(err)
	}
	o2, _ := small(t, dir)
	o2.Regions, o2.Servers, o2.Witnesses, o2.D = 0, 0, 0, 0
	after := started(t, o2).State()
	for i, p := range after.Processes {
		b := before.Processes[i]
		p.PID, p.StartTicks, b.PID, b.StartTicks = 0, 0, 0, 0
		if p != b {
			t.Errorf("resumed as %+v, was %+v", p, b)
		}
	}
	if again, err := os.ReadFile(filepath.Join(dir, clusterName)); err != nil || string(again) != string(file) {
		t.Errorf("cluster.yaml changed: %v", err)
	}
	if again, err := os.ReadFile(p.Cert); err != nil || string(again) != string(cert) {
		t.Errorf("certificate changed: %v", err)
	}
}

// A child that ends during the start fails it with the end of its log, and no
// process is left.
func TestStartFailsWithTheChildsLog(t *testing.T) {
	dir := t.TempDir()
	o, _ := small(t, dir, failVar+"=w-oregon")
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	err = c.Start(within(t))
	if err == nil || !strings.Contains(err.Error(), "w-oregon ended (exit status 3)") || !strings.Contains(err.Error(), "error: no luck today for w-oregon") {
		t.Fatalf("start: %v", err)
	}
	s, err := ReadState(dir)
	if err != nil || slices.ContainsFunc(s.Processes, func(p Process) bool { return p.Running }) {
		t.Fatalf("left behind: %+v, %v", s.Processes, err)
	}
	// The directory is free again, and good.
	o, _ = small(t, dir)
	started(t, o)
}

func TestStartEndsWithItsContext(t *testing.T) {
	o, _ := small(t, t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	o.Ready = func(ctx context.Context, _ *Cluster) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	}
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(ctx); err == nil || !strings.Contains(err.Error(), "canceled") {
		t.Fatalf("start: %v", err)
	}
	if s := c.State(); s.Supervisor != 0 || s.Processes[0].Running {
		t.Fatalf("left behind: %+v", s)
	}
}

func TestStopKillsWhoDoesNotListen(t *testing.T) {
	o, _ := small(t, t.TempDir(), stubbornVar+"=eu-frankfurt-1")
	o.Grace = 500 * time.Millisecond
	exits := make(chan Exit, 3)
	o.OnExit = func(e Exit) { exits <- e }
	if err := started(t, o).Stop(within(t)); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for range 3 {
		e := <-exits
		got[e.Name] = e.State
	}
	if got["eu-frankfurt-1"] != "signal: killed" || got["us-virginia-1"] != "exit status 0" {
		t.Errorf("ended %v", got)
	}
}

// SIGKILL of the supervisor leaves no child, and the next start resumes on a
// dev.json with dead pids.
func TestChildrenDieWithTheirSupervisor(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), modeVar+"=supervisor", dirVar+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "ready\n" {
		_ = cmd.Process.Kill()
		t.Fatalf("supervisor: %q, %v", line, err)
	}
	s, err := ReadState(dir)
	if err != nil || len(s.Processes) != 3 || s.Supervisor != cmd.Process.Pid {
		t.Fatalf("state %+v, %v", s, err)
	}
	for _, p := range s.Processes {
		if !p.alive() {
			t.Fatalf("%s does not run", p.Name)
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	for _, p := range s.Processes {
		if !waitGone(p.PID, 10*time.Second) {
			t.Errorf("%s (pid %d) outlived its supervisor", p.Name, p.PID)
			if p.alive() {
				_ = syscall.Kill(p.PID, syscall.SIGKILL)
			}
		}
	}
	if stale, err := ReadState(dir); err != nil || !stale.Processes[0].Running {
		t.Fatalf("dev.json was to be stale: %+v, %v", stale, err)
	}
	o, _ := small(t, dir)
	o.D = 0
	started(t, o)
}

// A process of an earlier supervisor that is still there is not run beside; a
// pid that another process has by now is not mistaken for it.
func TestOrphansAreNamed(t *testing.T) {
	dir := t.TempDir()
	ticks, ok := startTicks(os.Getpid())
	if !ok {
		t.Fatal("own start time unknown")
	}
	s := State{Dir: dir, Processes: []Process{{Name: "eu-frankfurt-1", PID: os.Getpid(), StartTicks: ticks + 1}}}
	if err := s.write(); err != nil {
		t.Fatal(err)
	}
	if err := checkOrphans(dir, 0); err != nil {
		t.Errorf("another process with that pid: %v", err)
	}
	s.Processes[0].StartTicks = ticks
	if err := s.write(); err != nil {
		t.Fatal(err)
	}
	err := checkOrphans(dir, 0)
	if want := fmt.Sprintf("process %d (eu-frankfurt-1) of an earlier supervisor is still running; kill it", os.Getpid()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q", err, want)
	}
}

func TestOccupiedPortIsNamedBeforeAnyStart(t *testing.T) {
	o, _ := small(t, t.TempDir())
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	p, _ := c.File().Process("us-virginia-1")
	l, err := net.Listen("tcp", p.Raft) // Takes a port away.
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	u, err := net.ListenPacket("udp", p.Gossip) // As above.
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	err = c.Start(within(t))
	for _, want := range []string{"raft address " + p.Raft + " of us-virginia-1 is used by another process", "gossip address " + p.Gossip} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("start: %v, want %q", err, want)
		}
	}
	for _, p := range c.State().Processes {
		if _, err := os.Stat(p.Log); err == nil {
			t.Errorf("%s was started", p.Name)
		}
	}
}

// What a drill's worker needs: a process of a group that stops itself is seen
// to be stopped, goes on, and its output is read.
func TestGroupSeesAProcessStopItself(t *testing.T) {
	g := NewGroup()
	defer g.Stop(t.Context(), time.Second)
	var out strings.Builder
	log := filepath.Join(t.TempDir(), "worker.log")
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	ctx := within(t)
	c, err := g.Start(Spec{Name: "worker", Binary: sh, Args: []string{"-c", `echo "$WHO"; kill -STOP $$; echo late; echo why >&2; exit 4`}, Env: []string{"WHO=me"}, Log: log, Stdout: &out})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.WaitStopped(ctx); err != nil {
		t.Fatal(err)
	}
	if !c.Running() || c.Exit() != "" {
		t.Error("a stopped process has ended")
	}
	if err := c.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if c.Exit() != "exit status 4" || out.String() != "me\nlate\n" || c.LogTail() != "why" {
		t.Errorf("ended with %q, printed %q, log %q", c.Exit(), out.String(), c.LogTail())
	}
	if err := c.WaitStopped(ctx); err == nil || !strings.Contains(err.Error(), "ended (exit status 4)") {
		t.Errorf("%v", err)
	}
	g.Stop(ctx, time.Second)
	if _, err := g.Start(Spec{Name: "worker", Binary: sh, Log: log}); err == nil {
		t.Error("a stopped group starts processes")
	}
}
