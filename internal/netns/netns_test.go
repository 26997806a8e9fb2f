package netns

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var (
	flagNetns  = flag.Bool("netns", false, "make network namespaces (root; needs ip, nft, nsenter, unshare)")
	flagWithin = flag.Bool("within", false, "this process is in a namespace of its own")
)

const limit = 20 * time.Second

// within runs a test of this program in a network namespace of its own.
func within(t *testing.T, name string) *exec.Cmd {
	t.Helper()
	if !*flagNetns {
		t.Skip("makes network namespaces: run it by `make netns`, as `make test` does")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return exec.CommandContext(t.Context(), "unshare", "--net", self, "-test.run", "^"+name+"$", "-netns", "-within", "-test.v")
}

// socket is a UDP socket at a site.
func socket(t *testing.T, l *Lab, i int) *net.UDPConn {
	t.Helper()
	type opened struct {
		conn *net.UDPConn
		err  error
	}
	result := make(chan opened)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread stays at the site, and ends
		if err := unix.Setns(int(l.homes[i].Fd()), unix.CLONE_NEWNET); err != nil {
			result <- opened{nil, err}
			return
		}
		conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(l.Host(l.sites[i])), Port: 4000})
		result <- opened{conn, err}
	}()
	o := <-result
	if o.err != nil {
		t.Fatal(o.err)
	}
	t.Cleanup(func() { _ = o.conn.Close() })
	return o.conn
}

// passes sends datagrams until one arrives, or long enough for all to be lost.
func passes(t *testing.T, from, to *net.UDPConn, patience time.Duration) bool {
	t.Helper()
	text := fmt.Sprint(time.Now().UnixNano())
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if _, err := from.WriteTo([]byte(text), to.LocalAddr()); err != nil && !errors.Is(err, unix.EHOSTUNREACH) {
			t.Fatal(err)
		}
		_ = to.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		buf := make([]byte, 100)
		for n, _, err := to.ReadFrom(buf); err == nil; n, _, err = to.ReadFrom(buf) {
			if string(buf[:n]) == text {
				return true
			}
		}
	}
	return false
}

// TestCuts: what a cut drops, what it does not, and when it is over.
func TestCuts(t *testing.T) {
	if !*flagWithin {
		out, err := within(t, t.Name()).CombinedOutput()
		if t.Log(string(out)); err != nil {
			t.Fatal(err)
		}
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	l, err := New(ctx, []string{"a", "b", "c"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(ctx, []string{"a"}); err == nil || !strings.Contains(err.Error(), "unshare --net") {
		t.Errorf("a second lab in one namespace: %v", err)
	}
	a, b, c := socket(t, l, 0), socket(t, l, 1), socket(t, l, 2)
	want := func(what string, from, to *net.UDPConn, passing bool) {
		t.Helper()
		patience := limit
		if !passing {
			patience = 300 * time.Millisecond
		}
		if got := passes(t, from, to, patience); got != passing {
			t.Errorf("%s: passes %v", what, got)
		}
	}
	for _, x := range []*net.UDPConn{a, b, c} {
		for _, y := range []*net.UDPConn{a, b, c} {
			want("at first", x, y, true)
		}
	}
	ab := []Link{{"a", "b"}}
	cut := func(links []Link, lasts time.Duration) {
		t.Helper()
		if err := l.Cut(ctx, links, lasts); err != nil {
			t.Fatal(err)
		}
	}
	cut(ab, time.Hour)
	cut(ab, time.Millisecond) // the longer one stands
	want("cut a -> b", a, b, false)
	want("cut a -> b, the other direction", b, a, true)
	want("cut a -> b, another site", a, c, true)
	if n, err := l.Dropped(ctx); err != nil || len(n) != 1 || n[ab[0]] < 2 {
		t.Errorf("dropped: %v, %v", n, err)
	}
	if err := l.Heal(ctx); err != nil {
		t.Fatal(err)
	}
	want("healed", a, b, true)
	cut([]Link{{"a", "b"}, {"b", "a"}}, 200*time.Millisecond)
	cut(ab, 900*time.Millisecond) // longer than it was
	want("cut both ways, one for longer", a, b, false)
	want("it ends by itself", a, b, true)
	if n, err := l.Dropped(ctx); err != nil || len(n) != 0 {
		t.Errorf("dropped, when all is over: %v, %v", n, err)
	}
	if err := l.Cut(ctx, []Link{{"a", "mars"}}, time.Second); err == nil {
		t.Error("a site that there is not")
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := alone(); err != nil {
		t.Errorf("after Close: %v", err)
	}
}

// TestNothingIsLeft when the process is killed.
func TestNothingIsLeft(t *testing.T) {
	if *flagWithin {
		l, err := New(t.Context(), []string{"a", "b"})
		if err != nil {
			t.Fatal(err)
		}
		for i := range l.sites {
			home, err := os.Readlink(l.path(i))
			if err != nil {
				t.Fatal(err)
			}
			fmt.Println("HOME", home)
		}
		fmt.Println("READY")
		_, _ = io.Copy(io.Discard, os.Stdin) // until it is killed
		return
	}
	cmd := within(t, t.Name())
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stdin.Close() }()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	homes := map[string]bool{}
	ready := false
	for lines := bufio.NewScanner(out); !ready && lines.Scan(); {
		if home, ok := strings.CutPrefix(lines.Text(), "HOME "); ok {
			homes[home] = true
		}
		ready = lines.Text() == "READY"
	}
	if !ready || len(homes) != 2 {
		t.Fatalf("ready %v, namespaces %v", ready, homes)
	}
	held := holders(t, homes)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	if left := holders(t, homes); held == 0 || left > 0 {
		t.Errorf("%d hold the namespaces before the kill, %d after it", held, left)
	}
}

// holders counts what keeps namespaces there: processes in them, descriptors of
// processes, mounts.
func holders(t *testing.T, homes map[string]bool) (n int) {
	t.Helper()
	for _, pattern := range []string{"/proc/[0-9]*/ns/net", "/proc/[0-9]*/fd/*"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range paths {
			if to, err := os.Readlink(p); err == nil && homes[to] {
				n++
			}
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for home := range homes {
		n += strings.Count(string(mounts), home)
	}
	return n
}
