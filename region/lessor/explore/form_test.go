package explore

import (
	"encoding/binary"
	"fmt"

	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// key is the canonical form of the world.
func (w *world) key(b []byte) []byte {
	left := func(x instant.Instant) uint64 { return uint64(max(0, x.Sub(w.now))) }
	u := func(x uint64) { b = binary.AppendUvarint(b, x) }
	u(w.st.id)
	u(w.term)
	b = append(b, byte(w.cur), byte(w.taken), byte(w.breaks), byte(w.gaps))
	u(left(w.headRight))
	u(left(w.delayed))
	if w.o.wait > 0 {
		u(left(w.queued.Add(w.o.wait)))
	}
	u(uint64(w.lastToken))
	for l := range w.slots {
		s := &w.slots[l]
		if s.l == nil {
			b = append(b, 0)
		} else {
			b = append(b, 1)
			b = s.l.AppendState(b, w.clock(l), l != w.cur && !w.o.bug.keepsCommands)
			b = append(b, bit(s.arrived[0])|bit(s.arrived[1])<<1|bit(s.ticket != nil)<<2)
		}
		b = binary.AppendVarint(b, int64(s.skew))
		b = append(b, bit(s.ended[0])|bit(s.ended[1])<<1)
		for _, c := range s.pending {
			b = append(appendCommand(b, c.Command), 0)
		}
		b = append(b, 0xff)
		for i := range s.streams {
			u(uint64(s.streams[i]))
			for _, m := range s.queues[i] {
				b = appendMessage(b, m.m, w.now.Add(m.skew))
				if w.o.bug.agesMessages {
					b = binary.AppendVarint(b, int64(m.at.Sub(w.now)))
				}
			}
			b = append(b, 0xff)
		}
	}
	for i, c := range w.clients {
		b = c.AppendBelief(b, w.now)
		u(w.request[i])
		u(w.open[i])
		u(uint64(w.rel[i]))
		if r := w.reply[i]; r != nil {
			b = append(b, 1)
			u(r.m.GetTerm())
			u(r.m.GetGranted().GetToken())
			u(w.left(r.m.GetGranted().GetUntil(), r.skew))
			u(r.request)
		} else {
			b = append(b, 0)
		}
	}
	return w.x.append(b)
}

func appendCommand(b []byte, c *pb.Command) []byte {
	b = binary.AppendUvarint(b, c.GetTerm())
	switch k := c.GetKind().(type) {
	case *pb.Command_Expire:
		b = append(b, 1)
		for _, id := range k.Expire.GetSessionIds() {
			b = append(append(b, id...), 0)
		}
	case *pb.Command_Revoke:
		b = binary.AppendUvarint(append(b, 2), k.Revoke.GetToken())
	case *pb.Command_EndRevocation:
		b = binary.AppendUvarint(append(b, 3), k.EndRevocation.GetToken())
	case *pb.Command_EndWait:
		b = binary.AppendUvarint(append(append(b, 4), k.EndWait.GetSessionId()...), k.EndWait.GetRequestId())
	case *pb.Command_EndDelay:
		b = binary.AppendUvarint(append(b, 5), k.EndDelay.GetToken())
	default:
		panic(fmt.Sprintf("the lessor proposes %v", c))
	}
	return b
}

// appendMessage writes a message; sequence and stamp of an ack are left out,
// since each finds its keepalive, sent when it was stamped.
func appendMessage(b []byte, m *pb.AttachResponse, now instant.Instant) []byte {
	u := func(x uint64) { b = binary.AppendUvarint(b, x) }
	left := func(x int64) uint64 { return uint64(max(0, instant.Instant(x).Sub(now))) }
	heldForm := func(h *pb.Held) {
		u(h.GetToken())
		b = append(b, bit(h.GetUntil() != 0))
		u(left(h.GetUntil()))
	}
	end := func(e *pb.PartitionEnd) {
		u(uint64(e.GetEpoch()))
		u(left(e.GetUntil()))
	}
	u(m.GetTerm())
	switch k := m.GetKind().(type) {
	case *pb.AttachResponse_Ack:
		b = append(b, 1, bit(k.Ack.GetComplete()))
		u(left(k.Ack.GetSessionUntil()))
		for _, h := range k.Ack.GetHeld() {
			heldForm(h)
		}
		for _, e := range k.Ack.GetPartitions() {
			b = append(b, 0xfe)
			end(e)
		}
	case *pb.AttachResponse_Push:
		b = append(b, 2)
		for _, e := range k.Push.GetPartitions() {
			end(e)
		}
	case *pb.AttachResponse_Grant:
		b = append(b, 3)
		heldForm(k.Grant.GetHeld())
		u(k.Grant.GetRequestId())
		if e := k.Grant.GetPartition(); e != nil {
			end(e)
		}
	case *pb.AttachResponse_Withdrawal:
		b = append(b, 4, bit(k.Withdrawal.GetUntil() != 0))
		u(k.Withdrawal.GetToken())
		u(left(k.Withdrawal.GetUntil()))
	case *pb.AttachResponse_Ended:
		b = append(b, 5)
	case *pb.AttachResponse_Failed:
		b = append(b, 6)
		u(k.Failed.GetRequestId())
	case nil:
		b = append(b, 7)
	default:
		panic(fmt.Sprintf("the lessor sends %v", m))
	}
	return append(b, 0xfd)
}

func bit(b bool) byte {
	if b {
		return 1
	}
	return 0
}
