package replica

import (
	"context"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/headlease/headlease/internal/wake"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// snapshotPatience is how many looks a due snapshot waits for its turn. It then
	// goes ahead: turns keep two servers from being slow at once, nothing more.
	snapshotPatience = 30
	// backlogUrgent times the threshold is a backlog that waits for no turn.
	backlogUrgent = 4
	// trailingBytes bounds what stays behind a snapshot when nobody lags.
	trailingBytes = 32 << 20
)

// ProgressAsker asks another server of the region how far it is. What request
// and answer carry are hints.
type ProgressAsker interface {
	AskProgress(ctx context.Context, server string, req *pb.CurrentTermRequest) (*pb.CurrentTermResponse, error)
}

// compactor keeps the log short: it writes snapshots when the log behind the
// last one is long, one server of the group at a time as far as that can be
// arranged, and removes entries that nobody needs any more [F37].
//
// The leader asks every other server once each SnapshotInterval how far it is,
// tells it whose turn it is and from where on the group needs the log, so that
// whoever leads next has it too. All of that may fail: a server that gets no turn
// in time takes it, and retention ends with time and bytes.
type compactor struct {
	r    *Replica
	wake chan struct{} // this server's turn has come

	mu sync.Mutex
	// From the leader, while this server follows.
	heard      time.Time
	turn       bool
	retainFrom uint64
	retainAt   time.Time // when retainFrom was heard
	// As leader of term.
	term      uint64
	followers map[raft.ServerID]*follower
	turns     turns
	// running: a snapshot or a removal goes on.
	snapshotting bool
	dueFor       int // looks
}

// follower is what a leader knows of another server.
type follower struct {
	server raft.Server
	resp   *pb.CurrentTermResponse
	at     time.Time // of the answer
}

func newCompactor(r *Replica) *compactor {
	return &compactor{r: r, wake: make(chan struct{}, 1), followers: make(map[raft.ServerID]*follower)}
}

// backlog is the log behind the newest snapshot.
func (c *compactor) backlog() (entries, bytes uint64) {
	snap := c.r.stores.snaps.newest.Load()
	if applied := c.r.fsm.applied.Load(); applied > snap {
		return applied - snap, c.r.stores.logs.bytesFrom(snap + 1)
	}
	return 0, 0
}

func (c *compactor) due(times uint64) bool {
	entries, bytes := c.backlog()
	return entries >= times*c.r.cfg.SnapshotThreshold || bytes >= times*c.r.cfg.SnapshotBytes
}

// run looks each SnapshotInterval until ctx ends. It ends with its last work.
func (c *compactor) run(ctx context.Context, rf *raft.Raft) {
	t := time.NewTicker(c.r.cfg.SnapshotInterval)
	defer t.Stop()
	work := make(chan bool) // whether a snapshot is to be written
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(work)
	wg.Go(func() {
		for snapshot := range work {
			c.work(ctx, rf, snapshot)
		}
	})
	replace := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.r.stores.snaps.wanted:
			replace = true
		case <-c.wake:
		case <-t.C:
		}
		c.look(ctx, rf)
		snapshot := c.begins() || replace
		if !snapshot && !c.trimDue() {
			continue
		}
		select {
		case work <- snapshot:
			replace = false
		default: // at work
		}
	}
}

// begins decides whether to write a snapshot now.
func (c *compactor) begins() bool {
	if !c.due(1) {
		c.mu.Lock()
		c.dueFor = 0
		c.mu.Unlock()
		return false
	}
	urgent := c.due(backlogUrgent)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.snapshotting {
		return false
	}
	c.dueFor++
	return c.turn || urgent || c.dueFor > snapshotPatience || c.r.cfg.Progress == nil
}

func (c *compactor) work(ctx context.Context, rf *raft.Raft, snapshot bool) {
	if snapshot {
		c.setSnapshotting(true)
		c.snapshot(rf)
		c.setSnapshotting(false)
	}
	if ctx.Err() != nil {
		return
	}
	to := c.keepFrom()
	if removed, err := c.r.stores.logs.trim(ctx, to); err != nil {
		c.r.log.Error("the log is not shortened", "error", err)
	} else if removed > 0 {
		c.r.log.Debug("log shortened", "entries", removed, "from", to)
	}
}

func (c *compactor) setSnapshotting(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.snapshotting = on
	if !on {
		c.dueFor = 0
		c.turn = false
	}
}

func (c *compactor) snapshot(rf *raft.Raft) {
	began := time.Now()
	if rf.State() == raft.Leader {
		// Right after a change of members there is nothing yet that a snapshot
		// could end at.
		if err := rf.Barrier(c.r.cfg.StopTimeout).Error(); err != nil {
			return
		}
	}
	err := rf.Snapshot().Error()
	took := time.Since(began)
	c.r.metric.snapshotted(took, err)
	if err != nil {
		if !c.r.stopping.Load() {
			c.r.log.Error("no snapshot was written; the log grows until one is", "error", err)
		}
		return
	}
	c.r.log.Info("snapshot written", "index", c.r.stores.snaps.newest.Load(), "took", took.Round(time.Millisecond))
}

// keepFrom is the lowest index that the log is to keep.
func (c *compactor) keepFrom() uint64 {
	logs := c.r.stores.logs
	snap := min(c.r.stores.snaps.newest.Load(), c.r.fsm.applied.Load())
	last, err := logs.LastIndex()
	if err != nil || snap == 0 {
		return 0
	}
	trailing := uint64(0)
	if last > c.r.cfg.TrailingLogs {
		trailing = last - c.r.cfg.TrailingLogs + 1
	}
	c.mu.Lock()
	needed := c.neededFrom(time.Now())
	c.mu.Unlock()
	return keepFrom(keep{
		after: snap + 1, trailing: trailing, trailingBytes: logs.newestWithin(trailingBytes),
		needed: needed, neededBytes: logs.newestWithin(c.r.cfg.RetainBytes),
	})
}

// keep are the bounds of what the log keeps, as indexes from which on it is kept.
type keep struct {
	after                   uint64 // the first entry behind the newest snapshot
	trailing, trailingBytes uint64 // so many entries, and no more than so many bytes
	needed, neededBytes     uint64 // of a server that lags (0: none), and no more than so many bytes
}

func keepFrom(k keep) uint64 {
	from := min(k.after, max(k.trailing, k.trailingBytes))
	if k.needed != 0 {
		from = min(from, max(k.needed, k.neededBytes))
	}
	return from
}

// trimDue reports whether so much can be removed that it is worth the two
// fsyncs.
func (c *compactor) trimDue() bool {
	to := c.keepFrom()
	first, err := c.r.stores.logs.FirstIndex()
	if err != nil || first >= to {
		return false
	}
	logs := c.r.stores.logs
	return to-first >= min(trimPiece, c.r.cfg.SnapshotThreshold/2) ||
		logs.bytesFrom(first)-logs.bytesFrom(to) >= uint64(c.r.cfg.segmentSize)
}

// neededFrom is the lowest index that another server needs, 0 for none known.
// Under mu.
func (c *compactor) neededFrom(now time.Time) uint64 {
	low := uint64(0)
	take := func(index uint64, at time.Time) {
		if index != 0 && now.Sub(at) <= c.r.cfg.RetainTime && (low == 0 || index < low) {
			low = index
		}
	}
	if c.term == 0 {
		take(c.retainFrom, c.retainAt)
		return low
	}
	silent := false
	for _, f := range c.followers {
		if f.resp == nil {
			silent = true
			continue
		}
		take(f.resp.GetLastIndex()+1, f.at)
	}
	if silent { // since this server leads: what the leader before knew of it
		take(c.retainFrom, c.retainAt)
	}
	return low
}

// look is the leader's part: ask, and give out the turn.
func (c *compactor) look(ctx context.Context, rf *raft.Raft) {
	term, leading := leads(rf)
	if !leading {
		c.mu.Lock()
		c.term = 0
		if time.Since(c.heard) > 3*c.r.cfg.SnapshotInterval {
			c.turn = false
		}
		c.mu.Unlock()
		return
	}
	conf := rf.GetConfiguration()
	if conf.Error() != nil {
		return
	}
	c.mu.Lock()
	if c.term != term {
		c.term, c.followers, c.turns = term, make(map[raft.ServerID]*follower), turns{}
	}
	req := &pb.CurrentTermRequest{LeaderTerm: term, RetainFrom: c.neededFrom(time.Now()), SnapshotTurn: string(c.turns.holder)}
	asked := c.members(conf.Configuration())
	c.mu.Unlock()

	if c.r.cfg.Progress != nil && len(asked) > 0 {
		c.ask(ctx, term, req, asked)
	}
	entries, _ := c.backlog()
	due := c.due(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.term != term {
		return
	}
	states := []turnState{{id: c.r.id, leader: true, due: due, running: c.snapshotting, backlog: entries}}
	for id, f := range c.followers {
		if f.resp != nil && time.Since(f.at) <= 3*c.r.cfg.SnapshotInterval {
			states = append(states, turnState{
				id: id, due: f.resp.GetSnapshotDue(), running: f.resp.GetSnapshotRunning(),
				backlog: f.resp.GetAppliedIndex() - min(f.resp.GetAppliedIndex(), f.resp.GetSnapshotIndex()),
			})
		}
	}
	c.turns.next(states)
	c.turn = c.turns.holder == c.r.id
}

// members brings followers up to date with the configuration and returns the
// other servers. Under mu.
func (c *compactor) members(conf raft.Configuration) []raft.Server {
	var out []raft.Server
	now := make(map[raft.ServerID]*follower, len(conf.Servers))
	for _, s := range conf.Servers {
		if s.ID == c.r.id {
			continue
		}
		f := c.followers[s.ID]
		if f == nil {
			f = &follower{}
		}
		f.server = s
		now[s.ID] = f
		out = append(out, s)
	}
	c.followers = now
	return out
}

func (c *compactor) ask(ctx context.Context, term uint64, req *pb.CurrentTermRequest, servers []raft.Server) {
	ctx, cancel := context.WithTimeout(ctx, min(c.r.cfg.SnapshotInterval, c.r.cfg.TransportTimeout))
	defer cancel()
	var wg sync.WaitGroup
	for _, s := range servers {
		wg.Go(func() {
			resp, err := c.r.cfg.Progress.AskProgress(ctx, string(s.Address), req)
			if err != nil || resp.GetRaftId() != string(s.ID) {
				return
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			if f := c.followers[s.ID]; c.term == term && f != nil {
				f.resp, f.at = resp, time.Now()
			}
		})
	}
	wg.Wait()
}

// hear takes the leader's hints.
func (c *compactor) hear(req *pb.CurrentTermRequest) {
	// A turn is used at once or not at all: it may be on its way to the next one.
	turn := req.GetSnapshotTurn() == string(c.r.id) && c.due(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heard = time.Now()
	if turn && !c.turn {
		wake.Up(c.wake)
	}
	c.turn = turn
	if req.GetRetainFrom() != 0 {
		c.retainFrom, c.retainAt = req.GetRetainFrom(), c.heard
	}
}

// answer fills what a server says of itself.
func (c *compactor) answer(resp *pb.CurrentTermResponse) {
	resp.SnapshotDue = c.due(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	resp.SnapshotRunning = c.snapshotting
}

// Follower is what a leader last heard of another server of its group.
type Follower struct {
	Server
	// LastIndex is the newest entry in its log, AppliedIndex the newest applied,
	// SnapshotIndex where its newest snapshot ends.
	LastIndex, AppliedIndex, SnapshotIndex uint64
	// FeatureLevel is the highest that its program knows.
	FeatureLevel uint32
	// Heard is how long ago it said so; negative if it never did.
	Heard time.Duration
}

// Followers returns the other servers of the group as this leader knows them,
// asked once each SnapshotInterval: hints. Nil if this server does not lead.
func (r *Replica) Followers() []Follower {
	rf := r.raft.Load()
	if rf == nil {
		return nil
	}
	term, ok := leads(rf)
	c := r.compact
	c.mu.Lock()
	defer c.mu.Unlock()
	if !ok || c.term != term {
		return nil
	}
	out := make([]Follower, 0, len(c.followers))
	for id, f := range c.followers {
		g := Follower{
			Server:    Server{Name: string(f.server.Address), RaftID: string(id), Voter: f.server.Suffrage == raft.Voter},
			LastIndex: f.resp.GetLastIndex(), AppliedIndex: f.resp.GetAppliedIndex(), SnapshotIndex: f.resp.GetSnapshotIndex(),
			FeatureLevel: f.resp.GetFeatureLevel(), Heard: -1,
		}
		if f.resp != nil {
			g.Heard = time.Since(f.at)
		}
		out = append(out, g)
	}
	return out
}
