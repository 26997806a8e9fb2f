package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headlease/headlease/internal/fault"
)

// far is the other end of a faulted connection: it notes what arrives when.
type far struct {
	mu  sync.Mutex
	got []arrival
	end error
}

type arrival struct {
	text string
	at   time.Duration
}

func (f *far) read(c net.Conn, start time.Time) {
	buf := make([]byte, 1<<20)
	for {
		n, err := c.Read(buf)
		f.mu.Lock()
		if n > 0 {
			f.got = append(f.got, arrival{string(buf[:n]), time.Since(start)})
		}
		f.end = err
		f.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (f *far) arrived() []arrival {
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.got
}

func (f *far) ended() error {
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.end
}

// bubble runs f in virtual time with a connection of eu-1 to us-1.
func bubble(t *testing.T, f func(t *testing.T, tbl *fault.Table, c *conn, other *far)) {
	synctest.Test(t, func(t *testing.T) {
		tbl, err := fault.NewTable(fault.Rules{})
		if err != nil {
			t.Fatal(err)
		}
		defer tbl.Close()
		l, err := New(Config{Identity: eu1, Insecure: true, Faults: tbl, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
		if err != nil {
			t.Fatal(err)
		}
		near, remote := net.Pipe()
		c, err := l.wrap(near, PlaneRaft)
		if err != nil {
			t.Fatal(err)
		}
		c.setPeer("us-1", "us")
		other := &far{}
		done := make(chan struct{})
		start := time.Now()
		go func() {
			defer close(done)
			other.read(remote, start)
		}()
		f(t, tbl, c, other)
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		<-done
		_ = remote.Close()
	})
}

func rule(t *testing.T, tbl *fault.Table, r fault.LinkRule) {
	t.Helper()
	if r.ID == "" {
		r.ID = "r"
	}
	if r.Expires == 0 {
		r.Expires = time.Hour
	}
	if err := tbl.Set(fault.Rules{Links: []fault.LinkRule{r}}); err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, c net.Conn, s string) {
	t.Helper()
	if n, err := c.Write([]byte(s)); err != nil || n != len(s) {
		t.Fatalf("write %q: %d, %v", s, n, err)
	}
}

func TestWithoutRulesWritesGoStraightThrough(t *testing.T) {
	bubble(t, func(t *testing.T, _ *fault.Table, c *conn, other *far) {
		write(t, c, "a")
		if c.running {
			t.Error("a goroutine carries the write")
		}
		if got := other.arrived(); len(got) != 1 || got[0] != (arrival{"a", 0}) {
			t.Error(got)
		}
	})
}

func TestDelayAndJitterNeverReorder(t *testing.T) {
	bubble(t, func(t *testing.T, tbl *fault.Table, c *conn, other *far) {
		rule(t, tbl, fault.LinkRule{Peer: "us-1", Plane: PlaneRaft, Link: fault.Link{Delay: 40 * time.Millisecond, Jitter: 100 * time.Millisecond, Loss: 0.2}})
		const n = 200
		var want bytes.Buffer
		for i := range n {
			s := fmt.Sprintf("%d,", i)
			want.WriteString(s)
			write(t, c, s) // does not block: no virtual time passes
		}
		if got := other.arrived(); len(got) != 0 {
			t.Fatalf("arrived at once: %v", got)
		}
		time.Sleep(20 * time.Second)
		var all bytes.Buffer
		got := other.arrived()
		for _, a := range got {
			all.WriteString(a.text)
			if a.at < 40*time.Millisecond {
				t.Errorf("%q arrived after %v", a.text, a.at)
			}
		}
		if all.String() != want.String() {
			t.Errorf("arrived %q", all.String())
		}
		if c.running {
			t.Error("the goroutine outlives the queue")
		}
	})
}

func TestDelayIsExact(t *testing.T) {
	bubble(t, func(t *testing.T, tbl *fault.Table, c *conn, other *far) {
		rule(t, tbl, fault.LinkRule{Peer: "region/us", Link: fault.Link{Delay: 40 * time.Millisecond}})
		write(t, c, "a")
		time.Sleep(10 * time.Millisecond)
		write(t, c, "b")
		time.Sleep(time.Second)
		got := other.arrived()
		if len(got) != 2 || got[0] != (arrival{"a", 40 * time.Millisecond}) || got[1] != (arrival{"b", 50 * time.Millisecond}) {
			t.Error(got)
		}
		// A rule taken away does not let the next write overtake.
		write(t, c, "c")
		tbl.Clear()
		write(t, c, "d")
		time.Sleep(time.Second)
		got = other.arrived()[2:]
		if len(got) != 2 || got[0].text != "c" || got[1].text != "d" {
			t.Error(got)
		}
	})
}

func TestLossDelaysAWriteByRetransmissions(t *testing.T) {
	seen := map[time.Duration]bool{}
	for range 2000 {
		seen[sendDelay(fault.Link{Loss: 0.5})] = true
	}
	for k := range maxRetransmits + 1 {
		want := retransmit * (1<<k - 1) // 0, 200 ms, 200+400, …
		if !seen[want] {
			t.Errorf("no write was delayed by %v", want)
		}
		delete(seen, want)
	}
	if len(seen) > 0 {
		t.Errorf("other delays: %v", seen)
	}
}

func TestDropHoldsBytesAndAShortOneHealsWithoutLoss(t *testing.T) {
	bubble(t, func(t *testing.T, tbl *fault.Table, c *conn, other *far) {
		rule(t, tbl, fault.LinkRule{Peer: "us-1", Link: fault.Link{Drop: true}, Expires: 2 * time.Second})
		write(t, c, "a")
		write(t, c, "b")
		time.Sleep(1999 * time.Millisecond)
		if got := other.arrived(); len(got) != 0 {
			t.Fatalf("passed the drop: %v", got)
		}
		time.Sleep(time.Millisecond) // the rule expires by itself
		got := other.arrived()
		if len(got) != 2 || got[0].text != "a" || got[1].text != "b" {
			t.Error(got)
		}
		write(t, c, "c")
		if got := other.arrived(); len(got) != 3 || c.running {
			t.Error(got, c.running)
		}
	})
}

func TestConnectionsHeldOverThreeSecondsAreResetOnHeal(t *testing.T) {
	bubble(t, func(t *testing.T, tbl *fault.Table, c *conn, other *far) {
		rule(t, tbl, fault.LinkRule{Peer: "us-1", Link: fault.Link{Drop: true}})
		write(t, c, "a")
		time.Sleep(3001 * time.Millisecond)
		if other.ended() != nil {
			t.Fatal("reset before it healed")
		}
		tbl.Clear()
		if got := other.arrived(); len(got) != 0 || other.ended() == nil {
			t.Errorf("arrived %v, end %v", got, other.ended())
		}
		if _, err := c.Write([]byte("b")); !errors.Is(err, syscall.ECONNRESET) {
			t.Error(err)
		}
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Error(err)
		}
	})
}

func TestIdleConnectionsOutliveADrop(t *testing.T) {
	bubble(t, func(t *testing.T, tbl *fault.Table, c *conn, other *far) {
		rule(t, tbl, fault.LinkRule{Peer: "us-1", Link: fault.Link{Drop: true}, Expires: time.Minute})
		time.Sleep(time.Minute)
		synctest.Wait()
		write(t, c, "a")
		if got := other.arrived(); len(got) != 1 {
			t.Error(got)
		}
	})
}

func TestADropIsOneWay(t *testing.T) {
	bubble(t, func(t *testing.T, tbl *fault.Table, c *conn, _ *far) {
		// The other direction is another process's table.
		near, remote := net.Pipe()
		back, err := c.links.wrap(near, PlaneRaft)
		if err != nil {
			t.Fatal(err)
		}
		back.setPeer("us-1", "us")
		rule(t, tbl, fault.LinkRule{Peer: "us-1", Link: fault.Link{Drop: true}})
		go func() { _, _ = remote.Write([]byte("x")) }()
		if n, err := back.Read(make([]byte, 1)); n != 1 {
			t.Error(n, err)
		}
		_ = remote.Close()
	})
}

func TestRulesAreForTheirPeerAndPlane(t *testing.T) {
	bubble(t, func(t *testing.T, tbl *fault.Table, c *conn, other *far) {
		rule(t, tbl, fault.LinkRule{ID: "1", Peer: "us-2", Link: fault.Link{Drop: true}})
		rule(t, tbl, fault.LinkRule{ID: "2", Peer: "us-1", Plane: PlaneVotes, Link: fault.Link{Drop: true}})
		rule(t, tbl, fault.LinkRule{ID: "3", Peer: "region/eu", Link: fault.Link{Drop: true}})
		write(t, c, "a")
		if got := other.arrived(); len(got) != 1 {
			t.Error(got)
		}
		rule(t, tbl, fault.LinkRule{ID: "4", Peer: "*", Link: fault.Link{Drop: true}})
		write(t, c, "b")
		if got := other.arrived(); len(got) != 1 {
			t.Error(got)
		}
		// Nothing is between a process and itself.
		c.setPeer("eu-1", "eu")
		if c.effect() != (fault.Link{}) {
			t.Error("a process cut from itself")
		}
	})
}

func TestAHeldConnectionBoundsWhatItHolds(t *testing.T) {
	bubble(t, func(t *testing.T, tbl *fault.Table, c *conn, other *far) {
		rule(t, tbl, fault.LinkRule{Peer: "us-1", Link: fault.Link{Drop: true}, Expires: 2 * time.Second})
		chunk := make([]byte, 1<<20)
		for range maxHeld / len(chunk) {
			if _, err := c.Write(chunk); err != nil {
				t.Fatal(err)
			}
		}
		// Full: the next write blocks to its deadline, and no longer.
		start := time.Now()
		if err := c.SetWriteDeadline(start.Add(time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(chunk); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(start) != time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		if err := c.SetWriteDeadline(time.Time{}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(chunk); err != nil || time.Since(start) != 2*time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		total := 0
		for _, a := range other.arrived() {
			total += len(a.text)
		}
		if total != maxHeld+len(chunk) {
			t.Errorf("%d bytes arrived", total)
		}
	})
}

func TestCloseWakesABlockedWriter(t *testing.T) {
	bubble(t, func(t *testing.T, tbl *fault.Table, c *conn, _ *far) {
		rule(t, tbl, fault.LinkRule{Peer: "us-1", Link: fault.Link{Drop: true}})
		if _, err := c.Write(make([]byte, maxHeld)); err != nil {
			t.Fatal(err)
		}
		failed := make(chan error)
		go func() {
			_, err := c.Write([]byte("x"))
			failed <- err
		}()
		synctest.Wait()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if err := <-failed; !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
}

func TestKilledDuringAWrite(t *testing.T) {
	bubble(t, func(t *testing.T, tbl *fault.Table, c *conn, _ *far) {
		near, remote := net.Pipe() // nobody reads: the goroutine's write blocks
		stuck, err := c.links.wrap(near, PlaneRaft)
		if err != nil {
			t.Fatal(err)
		}
		stuck.setPeer("us-1", "us")
		rule(t, tbl, fault.LinkRule{Peer: "us-1", Link: fault.Link{Delay: time.Millisecond}})
		write(t, stuck, "x")
		time.Sleep(time.Second)
		synctest.Wait()
		stuck.kill()
		synctest.Wait()
		if _, err := stuck.Write([]byte("y")); !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
		_ = remote.Close()
	})
}

func TestCloseStillSendsWhatIsOnItsWay(t *testing.T) {
	bubble(t, func(t *testing.T, tbl *fault.Table, c *conn, other *far) {
		rule(t, tbl, fault.LinkRule{Peer: "us-1", Link: fault.Link{Delay: 40 * time.Millisecond}})
		reader := make(chan error)
		go func() {
			_, err := c.Read(make([]byte, 1))
			reader <- err
		}()
		write(t, c, "last words")
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-reader; !errors.Is(err, net.ErrClosed) {
			t.Errorf("a reader of the closed connection gets %v", err)
		}
		if _, err := c.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
		if err := other.ended(); err != nil {
			t.Errorf("the far end learns of the close at once: %v", err)
		}
		time.Sleep(40 * time.Millisecond)
		got := other.arrived()
		if len(got) != 1 || got[0] != (arrival{"last words", 40 * time.Millisecond}) || !errors.Is(other.ended(), io.EOF) {
			t.Errorf("%v, %v", got, other.ended())
		}
	})
}

func TestACloseDoesNotPassADrop(t *testing.T) {
	bubble(t, func(t *testing.T, tbl *fault.Table, c *conn, other *far) {
		rule(t, tbl, fault.LinkRule{Peer: "us-1", Link: fault.Link{Drop: true}})
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(maxLinger - time.Millisecond)
		if other.ended() != nil {
			t.Error("the close passed the drop")
		}
		time.Sleep(time.Millisecond)
		if other.ended() == nil {
			t.Error("a closed connection stays for ever")
		}
	})
}

func TestDialsUnderADropHangToTheirDeadline(t *testing.T) {
	bubble(t, func(t *testing.T, tbl *fault.Table, c *conn, _ *far) {
		l := c.links
		rule(t, tbl, fault.LinkRule{Peer: "us-1", Link: fault.Link{Drop: true}, Expires: 10 * time.Second})
		start := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, err := l.dial(ctx, PlaneRaft, peerOf(us1, "127.0.0.1:1"))
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		// One with a later deadline goes on when the rule ends.
		ctx, cancel = context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		if err := l.passDial(ctx, PlaneRaft, peerOf(us1, "127.0.0.1:1")); err != nil || time.Since(start) != 10*time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}

func BenchmarkWrite(b *testing.B) {
	for _, name := range []string{"raw", "no table", "no rules"} {
		b.Run(name, func(b *testing.B) {
			var tbl *fault.Table
			if name == "no rules" {
				tbl, _ = fault.NewTable(fault.Rules{})
			}
			l, err := New(Config{Identity: eu1, Insecure: true, Faults: tbl})
			if err != nil {
				b.Fatal(err)
			}
			var c net.Conn = sink{}
			if name != "raw" {
				fc, err := l.wrap(sink{}, PlaneRaft)
				if err != nil {
					b.Fatal(err)
				}
				fc.setPeer("us-1", "us")
				c = fc
			}
			buf := make([]byte, 256)
			b.ReportAllocs()
			for b.Loop() {
				_, _ = c.Write(buf)
			}
			_ = l.Close()
		})
	}
}

// sink is a connection that costs nothing.
type sink struct{ net.Conn }

func (sink) Write(b []byte) (int, error) { return len(b), nil }
func (sink) Close() error                { return nil }
