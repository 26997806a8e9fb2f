package client

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Errors of an Election, to test for with errors.Is.
var (
	// ErrNotLeader: this Election does not lead now.
	ErrNotLeader = errors.New("not leader")
	// ErrNoLeader: nobody leads now.
	ErrNoLeader = errors.New("no leader")
)

// Election is leadership as a lease: who holds the resource leads, with a value
// that says for example where it is reached. All candidates of a session are
// one. It is safe for concurrent use.
type Election struct {
	session  *Session
	resource string

	mu    sync.Mutex
	lease *Lease
}

// Leader is who leads an election.
type Leader struct {
	// Token orders leaders; 0: nobody leads.
	Token fence.Token
	// Holder is the identity of the leader's client, Session its session.
	Holder, Session string
	Value           []byte
	Region          string
}

// Election on a resource, for example lock/leader, by the Client's own session.
func (c *Client) Election(resource string) *Election { return c.own.Election(resource) }

// Election on a resource, for example lock/leader.
func (s *Session) Election(resource string) *Election {
	return &Election{session: s, resource: resource}
}

// Resource of the election.
func (e *Election) Resource() string { return e.resource }

// Campaign waits until this candidate leads, with the value; first come, first
// served. The lease is the leadership: stop what a leader does when its context
// ends, and send its token with every write. If it leads already, the value is
// proclaimed.
func (e *Election) Campaign(ctx context.Context, value []byte, options ...Option) (*Lease, error) {
	if l := e.leading(); l != nil {
		_, err := l.SetValue(ctx, value)
		if err == nil {
			return l, nil
		}
		if !errors.Is(err, ErrNotHolder) {
			return nil, err
		}
	}
	l, err := e.session.Acquire(ctx, e.resource, append([]Option{Wait(), WithValue(value)}, options...)...)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lease = l
	return l, nil
}

// leading is the lease of the present leadership; nil: there is none.
func (e *Election) leading() *Lease {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lease != nil && e.lease.Context().Err() != nil {
		e.lease = nil
	}
	return e.lease
}

// Proclaim replaces the leader's value without another election. It fails with
// ErrNotLeader when this Election does not lead.
func (e *Election) Proclaim(ctx context.Context, value []byte) error {
	l := e.leading()
	if l == nil {
		return fmt.Errorf("proclaim %s: %w", e.resource, ErrNotLeader)
	}
	_, err := l.SetValue(ctx, value)
	if errors.Is(err, ErrNotHolder) {
		return fmt.Errorf("proclaim %s: %w: %w", e.resource, ErrNotLeader, err)
	}
	return err
}

// Resign gives the leadership up: the next candidate has it at once. Not to lead
// is no error.
func (e *Election) Resign(ctx context.Context) error {
	e.mu.Lock()
	l := e.lease
	e.lease = nil
	e.mu.Unlock()
	if l == nil {
		return nil
	}
	return l.Release(ctx)
}

// Leader asks the owning region who leads; it fails with ErrNoLeader when nobody
// does. The answer may be over when it is read.
func (e *Election) Leader(ctx context.Context) (Leader, error) {
	l, err := e.session.client.Get(ctx, e.resource)
	switch {
	case err != nil:
		return Leader{}, err
	case l == nil:
		return Leader{}, fmt.Errorf("%s: %w", e.resource, ErrNoLeader)
	}
	return leaderOf(l), nil
}

func leaderOf(l *pb.LeaseInfo) Leader {
	return Leader{
		Token: fence.Token(l.GetToken()), Holder: l.GetHolder(), Session: l.GetSessionId(), Value: l.GetValue(), Region: l.GetRegion(),
	}
}

// Observe tells who leads, and then each change: another leader, another value,
// or that nobody leads (a Token of 0). Changes that follow each other at once may
// be told as one. It ends with ctx, or with an error, as [Client.Watch] does, and
// is a hint as that is.
func (e *Election) Observe(ctx context.Context) iter.Seq2[Leader, error] {
	return func(yield func(Leader, error) bool) {
		var view WatchView
		var last Leader
		begun := false
		for ev, err := range e.session.client.Watch(ctx, e.resource) {
			if err != nil {
				yield(Leader{}, err)
				return
			}
			view.Apply(ev)
			if !view.Complete() {
				continue
			}
			var now Leader
			if l, ok := view.Lease(e.resource); ok {
				now = Leader{Token: l.Token, Holder: l.Holder, Session: l.Session, Value: l.Value, Region: l.Region}
			}
			if begun && now.Token == last.Token && string(now.Value) == string(last.Value) {
				continue
			}
			begun, last = true, now
			if !yield(now, nil) {
				return
			}
		}
	}
}
