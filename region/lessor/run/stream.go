package run

import (
	"errors"

	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor"
)

// Why a stream has ended, besides ErrNotLeading.
var (
	ErrSlow     = errors.New("the client reads too slowly; attach again")
	ErrDetached = errors.New("the session attached elsewhere or the leader's clock had a gap; attach again")
)

// Sink takes a stream's messages, in the order in which the lessor decided
// them. It is called under the shell's lock: it must neither wait nor call the
// shell.
type Sink interface {
	// Push takes the next message, which is shared and must not be changed. false
	// ends the stream: there is no room.
	Push(m *pb.AttachResponse) bool
	// End is the last call, unless the stream was closed by its owner.
	End(err error)
}

// Stream is one client connection's attachment to this leader.
type Stream struct {
	shell *Shell
	id    lessor.StreamID
	term  uint64
	sink  Sink
}

// Term that the stream belongs to; it ends with it.
func (st *Stream) Term() uint64 { return st.term }

// Attach opens a stream; the caller closes it.
func (s *Shell) Attach(sink Sink) (*Stream, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lessor == nil {
		return nil, ErrNotLeading
	}
	s.last++
	st := &Stream{shell: s, id: s.last, term: s.term, sink: sink}
	s.streams[st.id] = st
	s.lessor.StreamOpened(s.now(), st.id)
	s.flush()
	return st, nil
}

// Input is what a client says on a stream: a keepalive, whose secret the caller
// has checked, or the session to take off the stream.
type Input struct {
	Stream    *Stream
	Keepalive *pb.Keepalive
	Detach    string
}

// Take takes what clients say, in order, under one lock: thousands of
// keepalives cost little more than what they change.
func (s *Shell) Take(inputs []Input) {
	s.with(func(l *lessor.Lessor, now instant.Instant) {
		for _, in := range inputs {
			if in.Keepalive != nil {
				l.Keepalive(now, in.Stream.id, in.Keepalive)
			} else {
				l.Detach(now, in.Stream.id, in.Detach)
			}
		}
	})
}

// Keepalive takes a session's keepalive; the caller has checked the secret.
func (st *Stream) Keepalive(ka *pb.Keepalive) { st.shell.Take([]Input{{Stream: st, Keepalive: ka}}) }

// Detach takes a session off the stream.
func (st *Stream) Detach(session string) { st.shell.Take([]Input{{Stream: st, Detach: session}}) }

// Close ends the stream; its Sink is called no more.
func (st *Stream) Close() {
	s := st.shell
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.streams[st.id]; !ok {
		return
	}
	delete(s.streams, st.id)
	if s.lessor != nil {
		s.lessor.StreamClosed(s.now(), st.id)
		s.flush()
	}
}
