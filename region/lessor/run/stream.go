package run

import (
	"context"
	"errors"
	"sync"

	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor"
)

// maxQueued bounds the messages that wait for a slow client.
const maxQueued = 4096

// Why a stream has ended, besides ErrNotLeading.
var (
	ErrSlow     = errors.New("the client reads too slowly; attach again")
	ErrDetached = errors.New("the session attached elsewhere or the leader's clock had a gap; attach again")
)

// Stream is one client connection's attachment to this leader. Its messages
// are in the order in which the lessor decided them.
type Stream struct {
	shell *Shell
	id    lessor.StreamID

	mu    sync.Mutex
	queue []*pb.AttachResponse
	err   error
	more  chan struct{}
	done  chan struct{} // closed when err is set
}

// Attach opens a stream; the caller closes it.
func (s *Shell) Attach() (*Stream, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lessor == nil {
		return nil, ErrNotLeading
	}
	s.last++
	st := &Stream{shell: s, id: s.last, more: make(chan struct{}, 1), done: make(chan struct{})}
	s.streams[st.id] = st
	s.lessor.StreamOpened(s.cfg.Clock.Now(), st.id)
	s.flush()
	return st, nil
}

// Keepalive takes a session's keepalive; the caller has checked the secret.
func (st *Stream) Keepalive(ka *pb.Keepalive) {
	st.shell.with(func(l *lessor.Lessor, now instant.Instant) { l.Keepalive(now, st.id, ka) })
}

// Detach takes a session off the stream.
func (st *Stream) Detach(session string) {
	st.shell.with(func(l *lessor.Lessor, now instant.Instant) { l.Detach(now, st.id, session) })
}

// Close ends the stream.
func (st *Stream) Close() {
	s := st.shell
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.streams[st.id]; !ok {
		return
	}
	delete(s.streams, st.id)
	st.finish(ErrDetached)
	if s.lessor != nil {
		s.lessor.StreamClosed(s.cfg.Clock.Now(), st.id)
		s.flush()
	}
}

// Next returns the next messages, waiting for the first; what was queued
// before the stream ended still comes.
func (st *Stream) Next(ctx context.Context) ([]*pb.AttachResponse, error) {
	for {
		st.mu.Lock()
		queue, err := st.queue, st.err
		st.queue = nil
		st.mu.Unlock()
		if len(queue) > 0 {
			return queue, nil
		}
		if err != nil {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-st.more:
		}
	}
}

// Done is closed when the stream has ended.
func (st *Stream) Done() <-chan struct{} { return st.done }

// push queues a message; false if the queue is full.
func (st *Stream) push(m *pb.AttachResponse) bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	if len(st.queue) >= maxQueued {
		return false
	}
	st.queue = append(st.queue, m)
	poke(st.more)
	return true
}

func (st *Stream) finish(err error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.err == nil {
		st.err = err
		close(st.done)
	}
	poke(st.more)
}
