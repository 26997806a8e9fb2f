package replica

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/internal/wake"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// maxBatch and maxBatchBytes bound an entry: as many commands, or as many
	// bytes unless one command alone is longer.
	maxBatch      = 256
	maxBatchBytes = 64 << 10
	// maxCommandBytes bounds one command: a vote on every partition fits.
	maxCommandBytes = 4 << 20
	// overlap is how many entries go out without waiting for a full batch: while
	// the followers store one, the leader stores the next. Measured on raft-wal, 64
	// callers: 1.4 times the commands of 1; 3 gains nothing more.
	overlap = 2
	// urgentReserve is how many entries in flight the normal lane must leave free.
	urgentReserve = 2
)

// commandsField is the field number of Entry.commands.
const commandsField protowire.Number = 1

// appendCommand appends an encoded command to an encoded Entry.
func appendCommand(entry, cmd []byte) []byte {
	entry = protowire.AppendTag(entry, commandsField, protowire.BytesType)
	return protowire.AppendBytes(entry, cmd)
}

const (
	queued int32 = iota
	taken
	withdrawn
)

// proposal is one command on its way.
type proposal struct {
	data []byte
	// term in which it was queued; it is never proposed in another.
	term  uint64
	state atomic.Int32
	done  chan proposed
}

type proposed struct {
	result *pb.CommandResult
	err    error
}

// answer is called once, by whoever took the proposal.
func (p *proposal) answer(res *pb.CommandResult, err error) { p.done <- proposed{res, err} }

// proposer gathers commands into entries. An entry goes out at once while fewer
// than overlap are in flight; else commands gather until one is answered, a full
// batch is there, or an urgent command arrives. The bound on entries in flight
// keeps Raft's own queue short, so that an urgent command never waits behind a
// flood.
type proposer struct {
	r     *Replica
	limit int // of the normal lane; the urgent one has a quarter
	slots int

	wake chan struct{}

	mu       sync.Mutex
	lanes    [2]lane // urgent, normal
	inFlight int
	closed   bool
}

type lane struct {
	items []*proposal
	bytes int
}

func (l *lane) push(p *proposal) {
	l.items = append(l.items, p)
	l.bytes += len(p.data)
}

// pop takes the first proposal that its caller has not withdrawn.
func (l *lane) pop(room int) *proposal {
	for len(l.items) > 0 {
		p := l.items[0]
		if p.state.Load() == queued && len(p.data) > room {
			return nil
		}
		l.items[0] = nil
		l.items = l.items[1:]
		l.bytes -= len(p.data)
		if p.state.CompareAndSwap(queued, taken) {
			return p
		}
	}
	l.items = nil
	return nil
}

const (
	urgentLane = 0
	normalLane = 1
)

func newProposer(r *Replica, limit, slots int) *proposer {
	return &proposer{r: r, limit: limit, slots: slots, wake: make(chan struct{}, 1)}
}

// Propose commits a command and returns what Apply answered, here. It needs
// this server to be leading. The command must not be changed while Propose
// runs. A command that rests on the leader's clocks must carry the term.
//
// Errors: NotLeaderError, ErrUninitialised and ErrOverloaded: surely not applied. ErrUnknown
// (also together with ctx's error): nobody knows. ctx's error alone: surely not
// applied.
func (r *Replica) Propose(ctx context.Context, cmd *pb.Command) (*pb.CommandResult, error) {
	return r.propose(ctx, cmd, normalLane)
}

// ProposeUrgent is Propose in a lane of its own, before everything that waits
// in the normal one: pulses, expiries, votes.
func (r *Replica) ProposeUrgent(ctx context.Context, cmd *pb.Command) (*pb.CommandResult, error) {
	return r.propose(ctx, cmd, urgentLane)
}

func (r *Replica) propose(ctx context.Context, cmd *pb.Command, lane int) (*pb.CommandResult, error) {
	p, err := r.enqueue(ctx, cmd, lane)
	if err != nil {
		r.metric.proposed(lane, err)
		return nil, err
	}
	res, err := r.wait(ctx, p)
	r.metric.proposed(lane, err)
	return res, err
}

func (r *Replica) enqueue(ctx context.Context, cmd *pb.Command, lane int) (*proposal, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	term, ok := r.Leading()
	if !ok {
		return nil, r.notLeader()
	}
	data, err := proto.Marshal(cmd)
	if err != nil {
		return nil, fmt.Errorf("encode command: %w", err)
	}
	if len(data) > maxCommandBytes {
		return nil, fmt.Errorf("command of %d bytes is over %d; split it", len(data), maxCommandBytes)
	}
	p := &proposal{data: data, term: term, done: make(chan proposed, 1)}
	if err := r.prop.push(p, lane); err != nil {
		return nil, err
	}
	return p, nil
}

func (r *Replica) wait(ctx context.Context, p *proposal) (*pb.CommandResult, error) {
	select {
	case d := <-p.done:
		return d.result, d.err
	case <-ctx.Done():
		if p.state.CompareAndSwap(queued, withdrawn) {
			return nil, ctx.Err()
		}
		select {
		case d := <-p.done:
			return d.result, d.err
		default:
			return nil, fmt.Errorf("%w: %w", ErrUnknown, ctx.Err())
		}
	case <-r.stopped:
		// Raft leaves futures unanswered when it stops.
		select {
		case d := <-p.done:
			return d.result, d.err
		default:
			return nil, fmt.Errorf("%w: %w", ErrUnknown, ErrClosed)
		}
	}
}

func (q *proposer) push(p *proposal, lane int) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	limit := q.limit
	if lane == urgentLane {
		limit = max(limit/4, 1)
	}
	switch {
	case q.closed:
		return q.r.notLeader()
	case len(q.lanes[lane].items) >= limit:
		return ErrOverloaded
	}
	q.lanes[lane].push(p)
	wake.Up(q.wake)
	return nil
}

// flush answers everything not yet proposed: this server leads no more.
func (q *proposer) flush() {
	q.mu.Lock()
	var all []*proposal
	for i := range q.lanes {
		for p := q.lanes[i].pop(maxCommandBytes); p != nil; p = q.lanes[i].pop(maxCommandBytes) {
			all = append(all, p)
		}
	}
	q.mu.Unlock()
	for _, p := range all {
		p.answer(nil, q.r.notLeader())
	}
}

func (q *proposer) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.flush()
}

// run proposes until ctx ends.
func (q *proposer) run(ctx context.Context, rf *raft.Raft) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-q.wake:
		}
		for {
			batch := q.take()
			if len(batch) == 0 {
				break
			}
			q.submit(rf, batch)
		}
	}
}

// take decides whether an entry goes out now and takes its commands.
func (q *proposer) take() []*proposal {
	q.mu.Lock()
	defer q.mu.Unlock()
	u, n := &q.lanes[urgentLane], &q.lanes[normalLane]
	commands, size := len(u.items)+len(n.items), u.bytes+n.bytes
	full := commands >= maxBatch || size >= maxBatchBytes
	switch {
	case commands == 0, q.inFlight >= q.slots:
		return nil
	case q.inFlight < overlap, len(u.items) > 0:
	case !full, q.inFlight >= max(q.slots-urgentReserve, 1):
		return nil
	}
	var batch []*proposal
	room := maxBatchBytes
	for _, l := range []*lane{u, n} {
		for len(batch) < maxBatch {
			limit := room
			if len(batch) == 0 {
				limit = maxCommandBytes
			}
			p := l.pop(limit)
			if p == nil {
				break
			}
			room -= len(p.data)
			batch = append(batch, p)
		}
	}
	if len(batch) > 0 {
		q.inFlight++
	}
	return batch
}

func (q *proposer) submit(rf *raft.Raft, batch []*proposal) {
	term, leading := q.r.Leading()
	keep, size := batch[:0], 0
	for _, p := range batch {
		if !leading || p.term != term {
			p.answer(nil, q.r.notLeader())
			continue
		}
		keep = append(keep, p)
		size += len(p.data) + 1 + protowire.SizeBytes(0) + 4
	}
	if len(keep) == 0 {
		q.landed()
		return
	}
	// Raft keeps this buffer in its cache and in flight: it is never reused.
	entry := make([]byte, 0, size)
	for _, p := range keep {
		entry = appendCommand(entry, p.data)
	}
	q.r.whenDone(rf.Apply(entry, 0), func(resp any, err error) {
		q.landed()
		q.distribute(keep, resp, err)
	})
}

func (q *proposer) landed() {
	q.mu.Lock()
	q.inFlight--
	q.mu.Unlock()
	wake.Up(q.wake)
}

// distribute gives each caller its own command's result.
func (q *proposer) distribute(batch []*proposal, resp any, err error) {
	var results []*pb.CommandResult
	if err != nil {
		err = q.r.outcome(err)
	} else {
		switch v := resp.(type) {
		case []*pb.CommandResult:
			results = v
		case error:
			err = fmt.Errorf("%w: %w", ErrUnknown, v)
		}
		if err == nil && len(results) != len(batch) {
			err = fmt.Errorf("%w: %d results for %d commands", ErrUnknown, len(results), len(batch))
		}
	}
	for i, p := range batch {
		if err != nil {
			p.answer(nil, err)
		} else {
			p.answer(results[i], nil)
		}
	}
}
