// Package divergence has the leader tell its region the hash of its state, so
// that a server whose state has become another one stops.
//
// Each server records the hash of its state at every 2^14th index as it applies
// it. The leader proposes the newest that it has recorded; where the command is
// applied, a server that had another hash at that index stops before it does
// harm. Nothing rests on how soon: a hash that is lost, or late, is followed by
// the next one.
package divergence

import (
	"context"
	"log/slog"
	"time"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// every is how often the leader looks for a new hash.
const every = time.Second

// level is the feature level from which on the command is known.
const level = 2

// Raft is what is needed of the replica.
type Raft interface {
	Leading() (term uint64, ok bool)
	View() state.View
	Propose(ctx context.Context, cmd *pb.Command) (*pb.CommandResult, error)
}

// Teller proposes the hashes of a leader.
type Teller struct {
	Raft   Raft
	Logger *slog.Logger // may be nil
}

// Run proposes while this server leads, until ctx ends.
func (t *Teller) Run(ctx context.Context) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	told := uint64(0)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		told = t.tell(ctx, told)
	}
}

// tell proposes the newest hash above an index and returns the index told.
func (t *Teller) tell(ctx context.Context, told uint64) uint64 {
	term, leads := t.Raft.Leading()
	view := t.Raft.View()
	point, ok := view.RecordedHash()
	if !leads || !ok || view.Level() < level || point.Index <= told {
		return told
	}
	// In a later term the one that proposed it may be the one that is wrong.
	res, err := t.Raft.Propose(ctx, &pb.Command{Term: term, Kind: &pb.Command_StateHash{StateHash: &pb.StateHashCommand{
		Index: point.Index, Hash: point.Hash,
	}}})
	if err != nil || res.GetError() != nil {
		if t.Logger != nil {
			t.Logger.Debug("state hash not told; it is tried again", "index", point.Index, "error", err, "refused", res.GetError())
		}
		return told
	}
	return point.Index
}
