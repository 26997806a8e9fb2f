package explore

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor"
)

// bug breaks a rule by wrapping the shipped parts. The zero value, with its
// defaults, breaks none.
type bug struct {
	// window is how many messages at a stream's head may be taken first.
	window int

	// Wider worlds, where a bug needs them.
	staleKeepalives, staleChecks, keepsStale, keepsCommands, keepsMessages, keepsStreams, agesMessages, muxGoesOn bool

	client func(i int, ttl time.Duration) client
	// sent changes or suppresses what a lessor sends; received what a client
	// is given.
	sent     func(w *world, l, i int, m *pb.AttachResponse) *pb.AttachResponse
	received func(w *world, l, i int, m queued) []validity.Event
	// passed completes a check whose ticket is held.
	passed func(w *world, l int)
	// settle replaces a leader's Tick if it returns true.
	settle    func(w *world, l int) bool
	answer    func(w *world, l, i int) (*pb.Held, error)
	restamp   func(c *pb.Command, term uint64) *pb.Command
	committed func(w *world, c *pb.Command, feed bool)
	revoked   func(w *world)
	elected   func(w *world)
	gapped    func(w *world)
	steps     func(w *world, yield func(string, int, int, *world))
}

func (b bug) withDefaults() bug {
	if b.window == 0 {
		b.window = 1
	}
	if b.client == nil {
		b.client = newShipped
	}
	if b.sent == nil {
		b.sent = func(_ *world, _, _ int, m *pb.AttachResponse) *pb.AttachResponse { return m }
	}
	if b.received == nil {
		b.received = honestReceived
	}
	if b.passed == nil {
		b.passed = passTicket
	}
	if b.answer == nil {
		b.answer = honestAnswer
	}
	if b.restamp == nil {
		b.restamp = func(c *pb.Command, _ uint64) *pb.Command { return c }
	}
	if b.committed == nil {
		b.committed = func(*world, *pb.Command, bool) {}
	}
	if b.revoked == nil {
		b.revoked = func(*world) {}
	}
	if b.elected == nil {
		b.elected = func(*world) {}
	}
	if b.gapped == nil {
		b.gapped = func(*world) {}
	}
	if b.steps == nil {
		b.steps = func(*world, func(string, int, int, *world)) {}
	}
	return b
}

func newShipped(i int, ttl time.Duration) client {
	t := shipped{validity.New(validity.Config{})}
	t.OpenSession(sessionIDs[i], ttl)
	return t
}

func honestReceived(w *world, l, i int, m queued) []validity.Event {
	return w.client(i).Received(w.now, w.slots[l].streams[i], m.m)
}

// seeded is the memory of bugs.
type seeded struct {
	// stored is the validity computed at the grant [F10].
	stored instant.Instant
	token  fence.Token
}

func (x *seeded) append(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(x.stored))
	return binary.AppendUvarint(b, uint64(x.token))
}

// endRevocationNow makes a bug's leader end a revocation in its own time.
func endRevocationNow(w *world) {
	lease, ok := w.st.lease()
	if !ok || !lease.Revoked {
		return
	}
	s := &w.slots[w.cur]
	for _, c := range s.pending {
		if c.Command.GetEndRevocation().GetToken() == uint64(lease.Token) {
			return
		}
	}
	s.pending = append(s.pending[:len(s.pending):len(s.pending)], lessor.Command{ID: math.MaxUint64, Command: &pb.Command{
		Term: w.term, Kind: &pb.Command_EndRevocation{EndRevocation: &pb.EndRevocationCommand{Resource: resource, Token: uint64(lease.Token)}},
	}})
}

// bugs are the seeded ones, by the rule that each breaks.
var bugs = map[string]func() bug{
	// The check that covers an arrival was begun before it.
	"F1": func() bug {
		return bug{keepsStale: true, passed: func(w *world, l int) {
			w.slots[l].ticket = nil
			w.slots[l].arrived = [2]bool{}
			w.lessor(l).CheckPassed(w.clock(l), w.lessor(l).CheckBegun(w.clock(l)))
			w.drain(l)
		}}
	},
	// Expiry and end of revocation do not carry their term: proposed by an old
	// leader, they take effect when the same server leads again.
	"F2": func() bug {
		return bug{keepsCommands: true, restamp: func(c *pb.Command, term uint64) *pb.Command {
			return &pb.Command{Term: term, Kind: c.GetKind()}
		}}
	},
	// A keepalive is accepted while the session's expiry is in flight: the
	// lessor does not know that it has proposed one.
	"F7": func() bug {
		return bug{settle: func(w *world, l int) bool {
			s := &w.slots[l]
			c := s.l.Clone()
			c.Tick(w.clock(l))
			for _, cmd := range c.Take().Commands {
				ids := cmd.Command.GetExpire().GetSessionIds()
				known := len(ids) == 0
				for _, p := range s.pending {
					for _, id := range p.Command.GetExpire().GetSessionIds() {
						known = known || len(ids) == 1 && ids[0] == id
					}
				}
				if !known && l == w.cur {
					cmd.ID = math.MaxUint64
					s.pending = append(s.pending[:len(s.pending):len(s.pending)], cmd)
				}
			}
			w.drain(l)
			return true
		}}
	},
	// A push counts from its receipt.
	"F8": func() bug {
		return bug{keepsMessages: true, agesMessages: true, received: func(w *world, l, i int, m queued) []validity.Event {
			if m.m.GetPush() != nil {
				m.m = cloneMessage(m.m)
				for _, e := range m.m.GetPush().GetPartitions() {
					e.Until += int64(w.now.Sub(m.at))
				}
			}
			return honestReceived(w, l, i, m)
		}}
	},
	// Later validity without the withdrawal.
	"F9": func() bug {
		return bug{sent: func(_ *world, _, _ int, m *pb.AttachResponse) *pb.AttachResponse {
			if m.GetWithdrawal().GetUntil() != 0 {
				return nil
			}
			return m
		}}
	},
	// A new leader does not wait for a revocation that it finds.
	"F9 new leader": func() bug { return bug{elected: endRevocationNow} },
	// Validity is stored with the grant and replayed.
	"F10": func() bug {
		return bug{answer: func(w *world, l, i int) (*pb.Held, error) {
			token, ok := w.slots[l].l.Held(sessionIDs[i], resource)
			if !ok {
				return nil, nil
			}
			if w.x.token != token {
				h, err := honestAnswer(w, l, i)
				if h == nil || err != nil {
					return nil, err
				}
				w.x.token, w.x.stored = token, instant.Instant(instant.Instant(h.GetUntil()).Sub(w.now))
				return h, nil
			}
			return &pb.Held{Resource: resource, Token: uint64(token), Partition: partition, Until: int64(w.now + w.x.stored)}, nil
		}}
	},
	// An ack is paired with a later keepalive than its own.
	"F18": func() bug {
		return bug{keepsMessages: true, agesMessages: true, received: func(w *world, l, i int, m queued) []validity.Event {
			if m.m.GetAck() != nil {
				m.m = cloneMessage(m.m)
				if ka := w.client(i).Keepalive(w.now, sessionIDs[i], w.slots[l].streams[i]); ka != nil {
					m.m.GetAck().Sequence = ka.GetSequence()
				}
			}
			return honestReceived(w, l, i, m)
		}}
	},
	// A lease is valid unless listed as revoked: what a stream named stays
	// named when the stream is lost, and later pushes reach it.
	"L1": func() bug {
		return bug{keepsStreams: true, received: func(w *world, l, i int, m queued) []validity.Event {
			events := honestReceived(w, l, i, m)
			if m.m.GetPush() != nil {
				for id := validity.StreamID(1); id < w.slots[l].streams[i]; id++ {
					events = append(events, w.client(i).Received(w.now, id, m.m)...)
				}
			}
			return events
		}}
	},
	// An ack tells the deadline that arrivals extend.
	"L2": func() bug {
		return bug{keepsStale: true, sent: func(w *world, l, i int, m *pb.AttachResponse) *pb.AttachResponse {
			if m.GetAck() != nil {
				m = cloneMessage(m)
				m.GetAck().SessionUntil = int64(w.slots[l].lastArr[i].Add(w.o.ttl))
			}
			return m
		}}
	},
	// A new leader counts only what it sent itself, which is nothing yet, for a
	// revocation that begins in its term.
	"L3": func() bug {
		return bug{revoked: func(w *world) {
			if w.term > 1 {
				endRevocationNow(w)
			}
		}}
	},
	// A leader that begins anew counts only what it has sent since.
	"L3 anew": func() bug {
		return bug{revoked: func(w *world) {
			if w.gaps > 0 {
				endRevocationNow(w)
			}
		}}
	},
	// And does not wait for a revocation that it finds then.
	"L3 anew found": func() bug { return bug{gapped: endRevocationNow} },
	// What a leader that begins anew says reaches what was named before, mapped by
	// the round trip of before: its streams go on.
	"L3 anew mixed": func() bug {
		return bug{keepsMessages: true, keepsStreams: true, received: func(w *world, l, i int, m queued) []validity.Event {
			events := honestReceived(w, l, i, m)
			if m.m.GetPush() != nil {
				for id := validity.StreamID(1); id < w.slots[l].streams[i]; id++ {
					events = append(events, w.client(i).Received(w.now, id, m.m)...)
				}
			}
			return events
		}}
	},
	// An offer that is not confirmed passes on at once, and validity sent for
	// it does not end at the offer's end.
	"L4": func() bug {
		return bug{
			sent: func(_ *world, _, _ int, m *pb.AttachResponse) *pb.AttachResponse {
				m = cloneMessage(m)
				if h := m.GetGrant().GetHeld(); h != nil {
					h.Until = 0
				}
				for _, h := range m.GetAck().GetHeld() {
					h.Until = 0
				}
				return m
			},
			committed: func(w *world, c *pb.Command, feed bool) {
				if r := c.GetRevoke(); r.GetReason() == lessor.OfferExpired {
					w.apply(&pb.Command{Term: w.term, Kind: &pb.Command_EndRevocation{EndRevocation: &pb.EndRevocationCommand{
						Resource: r.GetResource(), Token: r.GetToken(),
					}}}, feed)
				}
			},
		}
	},
	// Messages of an older term count. The shipped client has two more walls
	// (a table per stream, the memory of dead tokens), so this is a client
	// that has the rule alone; its control is "flat client".
	"L5 old term": func() bug {
		return bug{keepsMessages: true, client: func(int, time.Duration) client { return newFlat(false) }}
	},
	// The mux of a server breaks and the same leader takes its clients' streams up
	// again, without an end to them in between.
	"L5 mux": func() bug { return bug{muxGoesOn: true, keepsMessages: true} },
	// A new leader counts lock delays from zero.
	"I6": func() bug {
		return bug{elected: func(w *world) {
			if d, ok := w.st.view.Delay(resource); ok {
				w.apply(&pb.Command{Term: w.term, Kind: &pb.Command_EndDelay{EndDelay: &pb.EndDelayCommand{
					Resource: d.Resource, Token: uint64(d.Token),
				}}}, true)
			}
		}}
	},
	// A message overtakes another inside a stream.
	"L5 reorder": func() bug { return bug{window: 2, keepsMessages: true} },
	// Partition ends name no epoch, where a Drop is not withdrawn; with the
	// epoch alone ("drop unsaid") nothing happens.
	"L6": func() bug {
		return bug{
			sent: unsaidDrop,
			received: func(w *world, l, i int, m queued) []validity.Event {
				token, ok := w.clients[i].Lease(sessionIDs[i], resource)
				if ok && (m.m.GetPush() != nil || m.m.GetAck() != nil) {
					m.m = cloneMessage(m.m)
					for _, e := range append(m.m.GetPush().GetPartitions(), m.m.GetAck().GetPartitions()...) {
						e.Epoch = uint32(token.Epoch())
					}
				}
				return honestReceived(w, l, i, m)
			},
		}
	},
}

// controls break no rule that is needed; they must pass where a bug beside
// them fails.
var controls = map[string]func() bug{
	"flat client": func() bug {
		return bug{keepsMessages: true, client: func(int, time.Duration) client { return newFlat(true) }}
	},
	"drop unsaid": func() bug { return bug{sent: unsaidDrop} },
}

func unsaidDrop(_ *world, _, _ int, m *pb.AttachResponse) *pb.AttachResponse {
	if m.GetWithdrawal().GetReason() == pb.WithdrawalReason_WITHDRAWAL_REASON_DROPPED {
		return nil
	}
	return m
}
