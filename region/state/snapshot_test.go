package state

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
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

// richMachine has one of everything that level 2 brings.
func richMachine(t testing.TB) *harness {
	h := newOwner(t, "a", "b", "c", "d")
	h.ok(withDelay(withValue(cmdAcquire("a", 1, "x"), "value of x"), 15_000))
	h.ok(withWait(withDelay(withValue(cmdWait("b", 1, "x"), "b's"), 60_000), 5000))
	h.wait("c", 1, "x")
	h.ok(withDelay(cmdAcquire("d", 1, "y"), 7))
	h.ok(withSlots(cmdAcquire("a", 2, "s"), 1))
	h.ok(withWait(withSlots(withValue(cmdWait("b", 2, "s"), "slot's"), 3), 9)) // the second slot
	h.ok(withSlots(cmdWait("c", 2, "s"), 1))
	h.ok(withSlots(withValue(cmdWait("b", 3, "s"), "slot's"), 1))
	h.ok(withSlots(cmdWait("a", 3, "s"), 1))
	h.ok(cmdExpire("d")) // y is in a delay
	for id := range uint64(MaxRemovals) {
		h.grant("c", id+10, fmt.Sprintf("b%03d", id))
	}
	h.grant("c", 999, "w")
	h.ok(cmdClose("c")) // w is left
	h.m.piece = piece{removals: 1, looks: 1}
	inQ := func(a *pb.AcquireCommand) { a.Partition = "q" } // names that a sweep comes to last
	h.ok(with(withValue(cmdAcquire("a", 10, "zx"), "of a dropped epoch"), inQ))
	h.ok(with(cmdWait("b", 10, "zx"), inQ))
	h.ok(with(cmdAcquire("a", 11, "zy"), inQ))
	h.ok(cmdDrop("q", 1))
	h.ok(cmdAdopt("q", 7, h.accept("q", euValue(7))))
	h.ok(inEpoch(withDelay(cmdWait("a", 12, "qz"), 100), 7))
	h.ok(cmdDrain("q", 7, "us"))
	return h
}

func TestSnapshotRoundTrip(t *testing.T) {
	restore(t, New())
	restore(t, newHarness(t).m)
	restore(t, newHarness1(t).m)
	rich := richMachine(t)
	if v := rich.m.View(); !v.Sweeping() || v.Counts().Closing != 1 || v.Counts().Delays != 2 || v.Counts().Semaphores != 1 {
		t.Fatalf("%+v: the machine is not as rich as it should be", v.Counts())
	}
	again := &harness{t: t, m: restore(t, rich.m), index: rich.index}
	again.m.piece = rich.m.piece
	for range 50 { // it goes on as the original does
		rich.ok(cmdPulse())
		again.ok(cmdPulse())
		again.wantEvents(rich.events...)
	}
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

// snapshots are small ones of every format.
func snapshots(t testing.TB) map[string][]byte {
	first := newOwner1(t, "a", "b")
	first.grant("a", 1, "x")
	first.wait("b", 1, "x")
	return map[string][]byte{
		"empty": write(t, New()), "format 1": write(t, first.m), "busy": write(t, busyMachine(t).m), "rich": write(t, richMachine(t).m),
	}
}

func TestSnapshotTruncated(t *testing.T) {
	for name, data := range snapshots(t) {
		for n := range len(data) {
			if m, err := ReadSnapshot(bytes.NewReader(data[:n])); m != nil || !errors.Is(err, ErrSnapshot) {
				t.Fatalf("%s: cut to %d of %d bytes: %v", name, n, len(data), err)
			}
		}
		if m, err := ReadSnapshot(bytes.NewReader(append(bytes.Clone(data), 0))); m != nil || !errors.Is(err, ErrSnapshot) {
			t.Fatalf("%s: a byte after the footer: %v", name, err)
		}
		if _, err := ReadSnapshot(iotest.OneByteReader(bytes.NewReader(data))); err != nil {
			t.Fatalf("%s: byte by byte: %v", name, err)
		}
	}
}

func TestSnapshotFlippedBits(t *testing.T) {
	for name, data := range snapshots(t) {
		for i := range data {
			for bit := range 8 {
				data[i] ^= 1 << bit
				if m, err := ReadSnapshot(bytes.NewReader(data)); m != nil || !errors.Is(err, ErrSnapshot) {
					t.Fatalf("%s: bit %d of byte %d flipped: %v", name, bit, i, err)
				}
				data[i] ^= 1 << bit
			}
		}
	}
}

// Every chunk is there once, in its order.
func TestSnapshotOfMissingOrRepeatedChunks(t *testing.T) {
	for name, data := range snapshots(t) {
		frames := [][]byte{data[:len(snapshotMagic)]}
		for rest := data[len(snapshotMagic):]; len(rest) > 0; {
			n := 8 + binary.BigEndian.Uint32(rest)
			frames, rest = append(frames, rest[:n]), rest[n:]
		}
		refused := func(what string, i int, changed ...[]byte) {
			t.Helper()
			if m, err := ReadSnapshot(bytes.NewReader(bytes.Join(changed, nil))); m != nil || !errors.Is(err, ErrSnapshot) {
				t.Errorf("%s: chunk %d of %d %s: %v", name, i, len(frames)-1, what, err)
			}
		}
		for i := range frames {
			refused("missing", i, slices.Delete(slices.Clone(frames), i, i+1)...)
			refused("twice", i, slices.Insert(slices.Clone(frames), i, frames[i])...)
			if i+1 < len(frames) {
				swapped := slices.Clone(frames)
				swapped[i], swapped[i+1] = swapped[i+1], swapped[i]
				refused("swapped", i, swapped...)
			}
		}
	}
}

// A queue whose values do not fit one chunk goes on in the next.
func TestSnapshotSplitsAQueueOfLargeValues(t *testing.T) {
	h := newOwner(t, "a", "b")
	h.grant("a", 1, "x")
	h.ok(withSlots(cmdAcquire("a", 2, "s"), 1))
	for i := range uint64(40) {
		value := strings.Repeat(string(rune('a'+i%26)), MaxValue-int(i))
		h.ok(withValue(cmdWait("b", 2*i+1, "x"), value))
		h.ok(withSlots(withValue(cmdWait("b", 2*i+2, "s"), value), 1))
	}
	var w chunkCounter
	if err := h.m.View().WriteSnapshot(&w); err != nil || w.largest > 2*chunkTarget || w.writes < 20 {
		t.Fatalf("%d writes, the largest of %d bytes: %v", w.writes, w.largest, err)
	}
	restore(t, h.m)
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
