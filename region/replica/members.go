package replica

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"
)

// changeTimeout bounds how long a change of the group waits to be taken up.
const changeTimeout = 2 * time.Second

// Join lets Run start Raft on a directory that belongs to no group, to wait for
// a leader to add this server; without effect on one that does. Raft knows no
// configuration then: it does not campaign, and streams meant for another
// directory's Raft id are refused, so that it votes for nobody and stores
// nothing before it is added [F3]. Call it before Run.
func (r *Replica) Join() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.released:
		return ErrClosed
	case r.isReady || r.joining:
		return nil
	}
	r.joining = true
	close(r.ready)
	return nil
}

// Joining reports whether this server waits to be added to its group.
func (r *Replica) Joining() bool {
	if r.Initialised() {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.joining
}

// joined notices that a leader has added this server. Under mu.
func (r *Replica) joined() bool {
	if r.joining && !r.isReady && len(r.Servers()) > 0 {
		r.isReady = true
	}
	return r.isReady
}

// AddNonvoter adds a server to the group of which this one is leader, as a
// non-voter: it gets the log and counts for nothing. The error is ErrUnknown when
// leadership was lost meanwhile, a NotLeaderError when nothing was done.
func (r *Replica) AddNonvoter(ctx context.Context, name, raftID string) error {
	return r.change(ctx, func(rf *raft.Raft) raft.Future {
		return rf.AddNonvoter(raft.ServerID(raftID), raft.ServerAddress(name), 0, changeTimeout)
	})
}

// AddVoter makes a member a voter, at once: it must have caught up before
// (hashicorp/raft stages nothing).
func (r *Replica) AddVoter(ctx context.Context, name, raftID string) error {
	return r.change(ctx, func(rf *raft.Raft) raft.Future {
		return rf.AddVoter(raft.ServerID(raftID), raft.ServerAddress(name), 0, changeTimeout)
	})
}

// RemoveServer takes a member, which must not be this server, out of the group.
func (r *Replica) RemoveServer(ctx context.Context, raftID string) error {
	if raftID == r.RaftID() {
		return errors.New("remove server: this server leads the group; transfer leadership first")
	}
	return r.change(ctx, func(rf *raft.Raft) raft.Future {
		return rf.RemoveServer(raft.ServerID(raftID), 0, changeTimeout)
	})
}

// TransferLeadership hands leadership to another voter, once that has what is
// committed here: until then nothing waits for it. hashicorp/raft takes a
// non-voter too, and then the group has no leader: refused here.
func (r *Replica) TransferLeadership(ctx context.Context, raftID string) error {
	s, ok := r.voter(raftID)
	if !ok || raftID == r.RaftID() {
		return fmt.Errorf("transfer leadership: %s is not another voter of the group", raftID)
	}
	if _, err := r.successor(ctx, s); err != nil {
		return fmt.Errorf("transfer leadership: %w", err)
	}
	return r.change(ctx, func(rf *raft.Raft) raft.Future { return transfer(rf, s) })
}

// voter is the one of the group with that id, if there is one.
func (r *Replica) voter(raftID string) (Server, bool) {
	for _, s := range r.Servers() {
		if s.RaftID == raftID && s.Voter {
			return s, true
		}
	}
	return Server{}, false
}

func transfer(rf *raft.Raft, s Server) raft.Future {
	return rf.LeadershipTransferToServer(raft.ServerID(s.RaftID), raft.ServerAddress(s.Name))
}

// successor waits for one of the servers to be in this server's term with all
// that was committed here at the beginning, for at most an election timeout.
// hashicorp/raft waits so as well, but takes no proposals meanwhile; and two
// transfers to a server whose disk hangs leave goroutines of it waiting for ever
// (raft v1.8.0, leadershipTransfer: its send to the server's replication).
func (r *Replica) successor(ctx context.Context, among ...Server) (Server, error) {
	rf := r.raft.Load()
	if rf == nil {
		return Server{}, ErrClosed
	}
	term, ok := leads(rf)
	if !ok {
		return Server{}, r.notLeader()
	}
	commit := rf.CommitIndex()
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timing.Election)
	defer cancel()
	type answer struct {
		Server
		err error
	}
	answers := make(chan answer, len(among))
	for _, s := range among {
		r.asking.run(func() { answers <- answer{s, r.caughtUp(ctx, s, term, commit)} })
	}
	var last error
	for range among {
		select {
		case a := <-answers:
			if a.err == nil {
				return a.Server, nil
			}
			last = a.err
		case <-ctx.Done():
			return Server{}, fmt.Errorf("no voter has entry %d of term %d yet: %w", commit, term, errors.Join(last, ctx.Err()))
		}
	}
	return Server{}, last
}

// caughtUp waits until a server is in the term and has an entry.
func (r *Replica) caughtUp(ctx context.Context, s Server, term, index uint64) error {
	for {
		resp, err := r.cfg.Terms.AskTerm(ctx, s.Name)
		switch {
		case err != nil:
			return fmt.Errorf("%s does not answer: %w", s.Name, err)
		case resp.GetRaftId() != s.RaftID:
			return fmt.Errorf("%s answers as %s, not as %s: another data directory", s.Name, resp.GetRaftId(), s.RaftID)
		case resp.GetTerm() > term:
			return fmt.Errorf("%s is in term %d, after %d", s.Name, resp.GetTerm(), term)
		case resp.GetTerm() == term && resp.GetLastIndex() >= index:
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s has the log up to %d, not yet %d: %w", s.Name, resp.GetLastIndex(), index, ctx.Err())
		case <-time.After(r.cfg.Timing.Commit):
		}
	}
}

// change makes one change of the group and waits for its commit, or ctx's end.
func (r *Replica) change(ctx context.Context, do func(*raft.Raft) raft.Future) error {
	if _, ok := r.Leading(); !ok {
		return r.notLeader()
	}
	rf := r.raft.Load()
	done := make(chan error, 1)
	r.futures.run(func() { done <- do(rf).Error() })
	select {
	case err := <-done:
		if err == nil {
			return nil
		}
		return r.outcome(err)
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrUnknown, ctx.Err())
	case <-r.stopped:
		return ErrClosed
	}
}
