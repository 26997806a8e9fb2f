package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Proc is a server process that the harness started. Only such processes are
// ever signalled, by their pid.
type Proc struct {
	Name string
	Pid  int
	args []string
	ns   string
	log  string
	cmd  *exec.Cmd
	done chan struct{}
}

// All starts go through one OS thread that lives as long as the harness, so
// that Pdeathsig ends the servers if the harness dies and not earlier.
var (
	starterOnce sync.Once
	starterCh   = make(chan func())
)

func onStarterThread(f func()) {
	starterOnce.Do(func() {
		go func() {
			runtime.LockOSThread()
			for g := range starterCh {
				g()
			}
		}()
	})
	done := make(chan struct{})
	starterCh <- func() { f(); close(done) }
	<-done
}

var (
	procMu  sync.Mutex
	procAll = map[*Proc]bool{}
)

func startProc(name, logFile, ns string, args ...string) (*Proc, error) {
	p := &Proc{Name: name, args: args, ns: ns, log: logFile}
	return p, p.start()
}

// portFree fails if something already listens on an address that a server of
// ours is about to take: another harness' servers would be measured instead.
func portFree(ns, addr string) error {
	try := func() error {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return fmt.Errorf("address is taken: %w", err)
		}
		return l.Close()
	}
	if ns != "" {
		return inNS(ns, try)
	}
	return try()
}

func (p *Proc) start() error {
	args := p.args
	if p.ns != "" {
		args = append([]string{"ip", "netns", "exec", p.ns}, args...)
	}
	if err := os.MkdirAll(filepath.Dir(p.log), 0o755); err != nil {
		return err
	}
	lf, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer func() { _ = lf.Close() }()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = lf, lf
	cmd.Dir = filepath.Dir(p.log)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	onStarterThread(func() { err = cmd.Start() })
	if err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	done := make(chan struct{})
	p.cmd, p.Pid, p.done = cmd, cmd.Process.Pid, done
	go func() {
		_ = cmd.Wait() // how it ended does not matter here
		close(done)
	}()
	procMu.Lock()
	procAll[p] = true
	procMu.Unlock()
	return nil
}

func (p *Proc) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

func (p *Proc) signal(s syscall.Signal) {
	if p != nil && p.cmd != nil && p.running() {
		_ = p.cmd.Process.Signal(s)
	}
}

func (p *Proc) pause()  { p.signal(syscall.SIGSTOP) }
func (p *Proc) resume() { p.signal(syscall.SIGCONT) }

// kill is kill -9 and waits for the process to be gone.
func (p *Proc) kill() {
	if p == nil || p.cmd == nil {
		return
	}
	p.signal(syscall.SIGKILL)
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
	}
	procMu.Lock()
	delete(procAll, p)
	procMu.Unlock()
}

func killAll() {
	procMu.Lock()
	var l []*Proc
	for p := range procAll {
		l = append(l, p)
	}
	procMu.Unlock()
	for _, p := range l {
		p.kill()
	}
}

// Usage is what the kernel accounts to a set of processes.
type Usage struct {
	CPU        float64 // seconds, user+system
	RSS        int64   // bytes
	WriteBytes int64   // bytes sent to the block layer (page granularity)
}

func (u Usage) sub(v Usage) Usage {
	return Usage{u.CPU - v.CPU, u.RSS - v.RSS, u.WriteBytes - v.WriteBytes}
}

func pidUsage(pid int) Usage {
	var u Usage
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return u
	}
	if i := bytes.LastIndexByte(b, ')'); i > 0 {
		f := strings.Fields(string(b[i+2:]))
		if len(f) > 21 {
			ut, _ := strconv.ParseFloat(f[11], 64)
			st, _ := strconv.ParseFloat(f[12], 64)
			u.CPU = (ut + st) / 100
			rss, _ := strconv.ParseInt(f[21], 10, 64)
			u.RSS = rss * int64(os.Getpagesize())
		}
	}
	b, err = os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
	if err == nil {
		for _, l := range strings.Split(string(b), "\n") {
			if v, ok := strings.CutPrefix(l, "write_bytes: "); ok {
				u.WriteBytes, _ = strconv.ParseInt(v, 10, 64)
			}
		}
	}
	return u
}

func usage(ps []*Proc) Usage {
	var t Usage
	for _, p := range ps {
		if !p.running() {
			continue
		}
		u := pidUsage(p.Pid)
		t.CPU += u.CPU
		t.RSS += u.RSS
		t.WriteBytes += u.WriteBytes
	}
	return t
}

// diskFlushes counts cache-flush requests the block device completed.
func diskFlushes() int64 {
	b, err := os.ReadFile("/sys/block/" + blockDev + "/stat")
	if err != nil {
		return 0
	}
	f := strings.Fields(string(b))
	if len(f) < 16 {
		return 0
	}
	n, _ := strconv.ParseInt(f[15], 10, 64)
	return n
}

// diskWritten is the number of bytes the block device wrote, machine-wide.
func diskWritten() int64 {
	b, err := os.ReadFile("/sys/block/" + blockDev + "/stat")
	if err != nil {
		return 0
	}
	f := strings.Fields(string(b))
	if len(f) < 7 {
		return 0
	}
	n, _ := strconv.ParseInt(f[6], 10, 64)
	return n * 512
}

var blockDev = "vda"
