package explore

import (
	"encoding/binary"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// flat is a client with one table whatever the stream, and no memory of dead
// tokens but of what it released itself. The shipped client keeps a table per
// stream and term, which alone stops what [L5] is about; here the rule stands
// alone, to show that it is needed where tables are shared. (A flat client is
// not fit for use: a push on a new stream, before its first ack, would reach
// what an older one named.)
type flat struct {
	rule         bool
	term         uint64
	streams      validity.StreamID
	sequence     uint64
	token, floor fence.Token
	until        instant.Instant
	session, end instant.Instant
	epoch        uint32
	own          bool // the token has an end of its own
	over         bool
}

func newFlat(rule bool) client { return &flat{rule: rule} }

func (f *flat) clone() client {
	c := *f
	return &c
}

func (f *flat) Term() uint64 {
	if !f.rule {
		return 0
	}
	return f.term
}

func (f *flat) StreamOpened() validity.StreamID {
	f.streams++
	return f.streams
}

func (f *flat) StreamBroken(validity.StreamID)      {}
func (f *flat) RequestBegun(string, uint64, string) {}
func (f *flat) Releasing(_ instant.Instant, _, _ string, t fence.Token) {
	f.floor, f.token = max(f.floor, t), 0
}

func (f *flat) AcquireAnswered(_, _ instant.Instant, _ string, _ uint64, _ *pb.AcquireResponse) []validity.Event {
	return nil
}

func (f *flat) Keepalive(_ instant.Instant, session string, _ validity.StreamID) *pb.Keepalive {
	if f.over {
		return nil
	}
	f.sequence++
	ka := &pb.Keepalive{SessionId: session, Sequence: f.sequence}
	if f.token != 0 {
		ka.TokensHash = validity.TokenHash(resource, f.token)
	}
	return ka
}

func (f *flat) Lease(string, string) (fence.Token, bool) { return f.token, f.token != 0 }

func (f *flat) Valid(now instant.Instant, _, _ string, t fence.Token) bool {
	return t != 0 && t == f.token && now < f.session && now < f.end && uint32(t.Epoch()) == f.epoch && (!f.own || now < f.until)
}

func (f *flat) Received(_ instant.Instant, _ validity.StreamID, m *pb.AttachResponse) []validity.Event {
	if m.GetTerm() < f.term && f.rule {
		return nil
	}
	f.term = max(f.term, m.GetTerm())
	switch k := m.GetKind().(type) {
	case *pb.AttachResponse_Ack:
		f.session = max(f.session, instant.Instant(k.Ack.GetSessionUntil()))
		f.ends(k.Ack.GetPartitions())
		if k.Ack.GetComplete() {
			f.token, f.own = 0, false
		}
		for _, h := range k.Ack.GetHeld() {
			f.name(h)
		}
	case *pb.AttachResponse_Push:
		f.ends(k.Push.GetPartitions())
	case *pb.AttachResponse_Grant:
		if e := k.Grant.GetPartition(); e != nil {
			f.ends([]*pb.PartitionEnd{e})
		}
		f.name(k.Grant.GetHeld())
	case *pb.AttachResponse_Withdrawal:
		if fence.Token(k.Withdrawal.GetToken()) != f.token {
			return nil
		}
		if k.Withdrawal.GetUntil() == 0 {
			f.token = 0
			return nil
		}
		if u := instant.Instant(k.Withdrawal.GetUntil()); !f.own || u < f.until {
			f.own, f.until = true, u
		}
	case *pb.AttachResponse_Ended:
		f.token, f.over = 0, true
	}
	return nil
}

func (f *flat) ends(ends []*pb.PartitionEnd) {
	for _, e := range ends {
		f.epoch, f.end = e.GetEpoch(), instant.Instant(e.GetUntil())
	}
}

func (f *flat) name(h *pb.Held) {
	t := fence.Token(h.GetToken())
	if t <= f.floor || t < f.token {
		return
	}
	f.token, f.own, f.until = t, h.GetUntil() != 0, instant.Instant(h.GetUntil())
}

func (f *flat) AppendBelief(b []byte, now instant.Instant) []byte {
	for _, x := range []instant.Instant{f.session, f.end, f.until} {
		b = binary.AppendUvarint(b, uint64(max(0, x.Sub(now))))
	}
	b = append(b, bit(f.own), bit(f.over), byte(f.epoch), byte(f.term), byte(f.streams))
	b = binary.AppendUvarint(b, uint64(f.token))
	return binary.AppendUvarint(b, uint64(f.floor))
}
