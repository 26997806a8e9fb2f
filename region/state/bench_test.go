package state

import (
	"bytes"
	"fmt"
	"io"
	"testing"

	"github.com/headlease/headlease/fence"
)

// benchMachine holds n leases, spread over n/10 sessions.
func benchMachine(b *testing.B, n int) *harness {
	h := newOwner(b)
	for i := range n {
		s := fmt.Sprintf("session-%08d", i/10)
		if i%10 == 0 {
			h.ok(cmdOpen(s))
		}
		h.ok(cmdAcquire(s, uint64(i%10)+1, fmt.Sprintf("lock/held-%08d", i)))
	}
	return h
}

// BenchmarkApplyAcquireRelease is one acquire and one release beside 100,000
// leases; views says how often a View is taken.
func BenchmarkApplyAcquireRelease(b *testing.B) {
	for _, views := range []int{1, 64, 0} {
		b.Run(fmt.Sprintf("view-each-%d", views), func(b *testing.B) {
			h := benchMachine(b, 100_000)
			names := make([]string, 1000)
			for i := range names {
				names[i] = fmt.Sprintf("lock/bench-%04d", i)
			}
			acquire := cmdAcquire("session-00000001", 0, "lock/bench")
			release := cmdRelease("session-00000001", "lock/bench", 0)
			id := uint64(100)
			b.ReportAllocs()
			for b.Loop() {
				id++
				a, r := acquire.GetAcquire(), release.GetRelease()
				a.RequestId, a.LowestOpenRequest, a.Resource = id, id, names[id%1000]
				res, _ := h.m.Apply(id, testTerm, acquire)
				r.Resource, r.Token = a.Resource, res.GetAcquire().GetGranted().GetToken()
				if res, _ := h.m.Apply(id, testTerm, release); res.GetError() != nil {
					b.Fatal(res)
				}
				if views > 0 && id%uint64(views) == 0 {
					h.m.View()
				}
			}
		})
	}
}

// BenchmarkApplyHandOver is a release that hands over, and a new wait, on a
// queue of the longest allowed length.
func BenchmarkApplyHandOver(b *testing.B) {
	h := newOwner(b)
	for i := range MaxQueue {
		s := fmt.Sprintf("session-%08d", i)
		h.ok(cmdOpen(s))
		h.ok(cmdWait(s, 1, "lock/hot"))
	}
	id := uint64(1)
	holder := 0
	b.ReportAllocs()
	for b.Loop() {
		l, _ := h.m.resources.Get("lock/hot")
		s := l.session
		h.m.Apply(id, testTerm, cmdRelease(s, "lock/hot", l.token))
		if holder++; holder%MaxQueue == 0 {
			id++
		}
		if res, _ := h.m.Apply(id, testTerm, cmdWait(s, id+1, "lock/hot")); res.GetError() != nil {
			b.Fatal(res)
		}
	}
}

func BenchmarkView(b *testing.B) {
	h := benchMachine(b, 100_000)
	pulse := cmdPulse()
	b.ReportAllocs()
	for b.Loop() {
		h.m.Apply(1, testTerm, pulse)
		h.m.View()
	}
}

func BenchmarkWriteSnapshot100k(b *testing.B) {
	v := benchMachine(b, 100_000).m.View()
	b.ReportAllocs()
	for b.Loop() {
		if err := v.WriteSnapshot(io.Discard); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkReadSnapshot100k(b *testing.B) {
	data := write(b, benchMachine(b, 100_000).m)
	b.ReportAllocs()
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		if _, err := ReadSnapshot(bytes.NewReader(data)); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkExpire ends a session of MaxRemovals leases with a waiter each.
func BenchmarkExpire(b *testing.B) {
	h := newOwner(b, "w")
	next := uint64(0)
	for b.Loop() {
		b.StopTimer()
		h.ok(cmdOpen("big"))
		var toks []fence.Token
		for i := range uint64(MaxRemovals) {
			name := fmt.Sprintf("lock/%04d", i)
			toks = append(toks, h.grant("big", i+1, name)+MaxRemovals)
			next++
			h.wait("w", next, name)
		}
		expire := cmdExpire("big")
		b.StartTimer()
		h.m.Apply(h.index, testTerm, expire)
		b.StopTimer()
		for i, tok := range toks {
			h.ok(cmdRelease("w", fmt.Sprintf("lock/%04d", i), tok))
		}
		b.StartTimer()
	}
}

// BenchmarkExpireSessions ends sessions of one lease each, as many as one command
// may, of 20,000.
func BenchmarkExpireSessions(b *testing.B) {
	const n = 20_000
	h := newOwner(b)
	name := func(i int) string { return fmt.Sprintf("session-%016x", uint64(i)*0x9e3779b97f4a7c15) }
	for i := range n {
		h.ok(cmdOpen(name(i)))
		h.ok(cmdAcquire(name(i), 1, fmt.Sprintf("lock/held-%08d", i)))
	}
	at := 0
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		ids := make([]string, 0, MaxRemovals)
		for range MaxRemovals {
			ids = append(ids, name(at%n))
			at++
		}
		h.m.View()
		b.StartTimer()
		h.m.Apply(h.index, testTerm, cmdExpire(ids...))
		b.StopTimer()
		for i, id := range ids {
			h.ok(cmdOpen(id))
			h.ok(cmdAcquire(id, 1, fmt.Sprintf("lock/held-%08d", at-MaxRemovals+i)))
		}
		b.StartTimer()
	}
}
