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

// TransferLeadership hands leadership to another voter. hashicorp/raft takes a
// non-voter too, and then the group has no leader: refused here.
func (r *Replica) TransferLeadership(ctx context.Context, raftID string) error {
	for _, s := range r.Servers() {
		if s.RaftID == raftID && s.Voter && raftID != r.RaftID() {
			return r.change(ctx, func(rf *raft.Raft) raft.Future {
				return rf.LeadershipTransferToServer(raft.ServerID(raftID), raft.ServerAddress(s.Name))
			})
		}
	}
	return fmt.Errorf("transfer leadership: %s is not another voter of the group", raftID)
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
