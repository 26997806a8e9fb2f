package state

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// FuzzReadSnapshot: whatever the bytes, an error and no machine, or a machine
// that writes a snapshot of the same state.
func FuzzReadSnapshot(f *testing.F) {
	f.Add([]byte(nil))
	f.Add([]byte(snapshotMagic))
	f.Add(write(f, New()))
	for _, data := range snapshots(f) {
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := ReadSnapshot(bytes.NewReader(data))
		if err != nil {
			if m != nil || !errors.Is(err, ErrSnapshot) {
				t.Fatalf("machine %v with error %v", m, err)
			}
			return
		}
		restore(t, m)
	})
}

// FuzzRestoredContent goes behind the checksums: chunks of any content, with
// the right hash. What the loader takes must be a state on which all commands
// work.
func FuzzRestoredContent(f *testing.F) {
	for _, m := range []*Machine{New(), newHarness(f).m, newOwner1(f, "a").m, busyMachine(f).m, richMachine(f).m} {
		f.Add(chunksOf(f, write(f, m)))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		l := loader{m: New()}
		in := bytes.NewReader(data)
		for l.stage != stageFooter {
			c := &pb.SnapshotChunk{}
			if err := protodelim.UnmarshalFrom(in, c); err != nil {
				return
			}
			if k, ok := c.GetKind().(*pb.SnapshotChunk_Footer); ok && l.stage != stageStart {
				k.Footer = rightFooter(&l)
			}
			if err := l.take(c); err != nil {
				return
			}
		}
		h := &harness{t: t, m: l.m, index: l.m.applied}
		exercise(h)
		restore(t, h.m)
	})
}

// chunksOf strips a snapshot of its framing.
func chunksOf(f *testing.F, data []byte) []byte {
	l := loader{m: New(), in: bytes.NewReader(data[len(snapshotMagic):])}
	var out bytes.Buffer
	for {
		c, err := l.chunk()
		if err != nil {
			return out.Bytes()
		}
		if _, err := protodelim.MarshalTo(&out, c); err != nil {
			f.Fatal(err)
		}
	}
}

// exercise uses everything that a machine holds.
func exercise(h *harness) {
	v := h.m.View()
	for l := range v.Leases() {
		h.do(cmdRevoke(l.Resource, l.Token, "r"))
		h.do(cmdEndRevocation(l.Resource, l.Token))
	}
	for l := range h.m.View().Leases() {
		h.do(cmdRelease(l.Session, l.Resource, l.Token))
	}
	for d := range h.m.View().Delays() {
		h.do(cmdEndDelay(d.Resource, d.Token))
	}
	for s := range v.Sessions() {
		for w := range v.SessionWaiters(s.ID) {
			h.do(withSlots(cmdWait(w.Session, w.Request, w.Resource), w.Slots))
			h.do(cmdEndWait(w.Session, w.Request))
			h.do(cmdCancel(w.Session, w.Request))
		}
		h.do(withDelay(withSlots(withValue(cmdWait(s.ID, s.LowestOpen+9, "s"), "v"), 3), 5))
		h.do(cmdAcquire(s.ID, s.LowestOpen, "x"))
		h.do(cmdAcquire(s.ID, s.LowestOpen+5, "fresh"))
	}
	for p := range v.Partitions() {
		h.do(cmdReserve(0))
		h.do(cmdAdopt(p.Name, uint32(p.Epoch), p.Register.Accepted.Proto()))
		h.do(cmdAdopt(p.Name, uint32(p.Register.Value.Epoch), p.Register.Accepted.Proto()))
		h.do(cmdDrain(p.Name, uint32(p.Epoch), "us"))
		h.do(cmdAbort(p.Name, uint32(p.Epoch)))
		h.do(cmdSettle(p.Name, uint32(p.Epoch)))
		h.do(cmdDrop(p.Name, uint32(p.Epoch)))
	}
	for s := range v.Sessions() {
		h.do(cmdExpire(s.ID))
	}
	if got, want := h.m.root.hash(h.m.sum), h.m.fullHash(); got != want {
		h.t.Fatalf("the hash kept, %x, differs from the content's, %x", got, want)
	}
}

// FuzzApply: any commands that decode, in any order, neither panic nor bring
// the machine to a state that its snapshot cannot carry.
func FuzzApply(f *testing.F) {
	h := newOwner(f, "a")
	entry := &pb.Entry{}
	for _, c := range everyCommand(h) {
		entry.Commands = append(entry.Commands, c)
		f.Add(encode(f, &pb.Entry{Commands: []*pb.Command{c}}))
	}
	f.Add(encode(f, entry))
	f.Add(encode(f, &pb.Entry{Commands: []*pb.Command{
		cmdWait("a", 1, "x"), cmdWait("b", 1, "x"), cmdWait("b", 2, "y"), cmdExpire("a"), cmdRevoke("x", token(1, 2), strings.Repeat("é", 200)),
	}}))
	f.Add(encode(f, &pb.Entry{Commands: []*pb.Command{
		withDelay(withSlots(withValue(cmdWait("a", 1, "s"), "v"), 2), 9), withWait(withSlots(cmdWait("b", 1, "s"), 1), 5), cmdSetValue("b", "held", token(1, 1), "v"),
		cmdDrain("p", 1, "us"), cmdAbort("p", 1), cmdExpire("a"), cmdEndDelay("s#0", token(1, 2)), cmdDrop("p", 1), cmdRaise(3), cmdStateHash(1, 2),
	}}))
	f.Fuzz(func(t *testing.T, data []byte) {
		e := &pb.Entry{}
		if err := proto.Unmarshal(data, e); err != nil {
			return
		}
		h := newOwner(t, "a", "b")
		h.grant("b", 9, "held")
		for _, c := range e.GetCommands() {
			h.index++
			if res, _ := h.m.Apply(h.index, testTerm, c); res == nil {
				t.Fatal("no result")
			}
			h.m.View()
		}
		restore(t, h.m)
		if h.m.Poisoned() == nil {
			exercise(h)
		}
	})
}

func encode(f *testing.F, e *pb.Entry) []byte {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(e)
	if err != nil {
		f.Fatal(err)
	}
	return b
}
