package state

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"testing/iotest"

	"google.golang.org/protobuf/proto"
)

func write(t interface {
	Helper()
	Fatal(...any)
}, m *Machine) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := m.View().WriteSnapshot(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func readBack(t testing.TB, data []byte) *Machine {
	t.Helper()
	m, err := ReadSnapshot(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// restore sends a machine through a snapshot and checks that it came back.
func restore(t testing.TB, m *Machine) *Machine {
	t.Helper()
	data := write(t, m)
	got, err := ReadSnapshot(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	if got.View().StateHash() != m.View().StateHash() || got.View().Counts() != m.View().Counts() {
		t.Fatal("the restored state differs")
	}
	if !bytes.Equal(write(t, got), data) {
		t.Fatal("the same state writes another snapshot")
	}
	return got
}

// busyMachine has one of everything.
func busyMachine(t testing.TB) *harness {
	h := newOwner(t, "a", "b", "c", "d")
	tx := h.grant("a", 1, "x")
	h.grant("b", 1, "y")
	h.wait("b", 2, "x")
	h.wait("c", 1, "x")
	h.wait("d", 9, "x")
	h.ok(cmdCancel("c", 7))
	h.ok(cmdRevoke("x", tx, "operator"))
	h.grant("a", 3, "qa")
	h.ok(withLowest(cmdAcquire("a", 5, "y"), 3))
	h.ok(cmdRecordVoters(voterRecord("witness/w1", 5, 6, 7)))
	h.ok(cmdPulse())
	h.own("q", 3)
	h.ok(cmdDrop("q", 3))
	return h
}

func TestSnapshotRoundTrip(t *testing.T) {
	restore(t, New())
	restore(t, newHarness(t).m)
	h := busyMachine(t)
	got := restore(t, h.m)
	if !proto.Equal(got.View().Configuration(), testConfiguration()) || got.View().PulseIndex() != h.m.View().PulseIndex() {
		t.Fatal("configuration or pulse differ")
	}
	if v, _ := got.View().Voter("witness/w1"); v != (VoterRecord{ID: "witness/w1", Incarnation: 5, Life: 6, Writes: 7}) {
		t.Fatalf("voter %+v", v)
	}
	// It goes on as the original does.
	other := &harness{t: t, m: got, index: h.index}
	for _, c := range []func(*harness){
		func(h *harness) { h.ok(cmdEndRevocation("x", token(1, 1))) },
		func(h *harness) { h.refused(cmdWait("c", 7, "z"), errStaleRequest(7)) },
		func(h *harness) { h.ok(cmdWait("d", 9, "x")) },
		func(h *harness) { h.grant("d", 10, "new") },
		func(h *harness) { h.ok(cmdExpire("b")) },
		func(h *harness) { h.ok(cmdReserve(0)) },
	} {
		c(h)
		c(other)
		other.wantEvents(h.events...)
	}
	if got.View().StateHash() != h.m.View().StateHash() {
		t.Fatal("the restored machine went another way")
	}
}

func TestSnapshotOfManyChunks(t *testing.T) {
	h := newOwner(t)
	for i := range uint64(3000) {
		id := fmt.Sprintf("session-%06d", i)
		h.ok(cmdOpen(id))
		h.grant(id, 1, fmt.Sprintf("lock/%032d", i))
		if i == 0 {
			continue
		}
		h.wait(id, 2, fmt.Sprintf("lock/%032d", i/2))
	}
	var w chunkCounter
	if err := h.m.View().WriteSnapshot(&w); err != nil {
		t.Fatal(err)
	}
	if w.writes < 5 || w.largest > 2*chunkTarget {
		t.Fatalf("%d writes, the largest of %d bytes", w.writes, w.largest)
	}
	restore(t, h.m)
}

type chunkCounter struct{ writes, largest int }

func (c *chunkCounter) Write(p []byte) (int, error) {
	c.writes++
	c.largest = max(c.largest, len(p))
	return len(p), nil
}

// A snapshot is taken while commands go on: it shows its index and no later.
func TestViewDoesNotChange(t *testing.T) {
	h := busyMachine(t)
	v := h.m.View()
	hash := v.StateHash()
	if h.m.View() != v {
		t.Fatal("a new View of an unchanged state")
	}
	h.ok(cmdEndRevocation("x", token(1, 1)))
	h.ok(cmdExpire("a", "b"))
	h.ok(cmdOpen("e"))
	h.grant("e", 1, "x9")
	h.own("p", 8)
	if v.StateHash() != hash {
		t.Fatal("a View changed under its reader")
	}
	if h.m.View().StateHash() == hash {
		t.Fatal("nothing changed: the test shows nothing")
	}
}

func TestSnapshotTruncated(t *testing.T) {
	data := write(t, busyMachine(t).m)
	for n := range len(data) {
		if m, err := ReadSnapshot(bytes.NewReader(data[:n])); m != nil || !errors.Is(err, ErrSnapshot) {
			t.Fatalf("cut to %d of %d bytes: %v", n, len(data), err)
		}
	}
	if m, err := ReadSnapshot(bytes.NewReader(append(bytes.Clone(data), 0))); m != nil || !errors.Is(err, ErrSnapshot) {
		t.Fatalf("a byte after the footer: %v", err)
	}
	if _, err := ReadSnapshot(iotest.OneByteReader(bytes.NewReader(data))); err != nil {
		t.Fatalf("byte by byte: %v", err)
	}
}

func TestSnapshotFlippedBits(t *testing.T) {
	data := write(t, busyMachine(t).m)
	for i := range data {
		for bit := range 8 {
			data[i] ^= 1 << bit
			if m, err := ReadSnapshot(bytes.NewReader(data)); m != nil || !errors.Is(err, ErrSnapshot) {
				t.Fatalf("bit %d of byte %d flipped: %v", bit, i, err)
			}
			data[i] ^= 1 << bit
		}
	}
}

func TestSnapshotWriterErrorsAreReturned(t *testing.T) {
	h := busyMachine(t)
	full := errors.New("disk full")
	for n := range 5 {
		if err := h.m.View().WriteSnapshot(&failingWriter{after: n, err: full}); !errors.Is(err, full) {
			t.Fatalf("after %d writes: %v", n, err)
		}
	}
	broken := errors.New("broken disk")
	if _, err := ReadSnapshot(iotest.ErrReader(broken)); !errors.Is(err, broken) || !errors.Is(err, ErrSnapshot) {
		t.Fatalf("%v", err)
	}
}

type failingWriter struct {
	after int
	err   error
}

func (w *failingWriter) Write(p []byte) (int, error) {
	if w.after == 0 {
		return 0, w.err
	}
	w.after--
	return len(p), nil
}
