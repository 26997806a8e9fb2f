package replica

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// Run runs this server's part until ctx ends (it then returns nil after an
// orderly stop) or something fails (it returns that). It may be called once. It
// gives the data directory back and closes the stream layer, unless Raft could
// not be stopped because its disk hangs; then only the end of the process does.
func (r *Replica) Run(ctx context.Context) error {
	r.mu.Lock()
	if r.running || r.released {
		r.mu.Unlock()
		return ErrClosed
	}
	r.running = true
	r.mu.Unlock()

	// Parts that must see Raft's end run under a context of their own.
	parts, stopParts := context.WithCancel(context.WithoutCancel(ctx))
	defer stopParts()
	var wg sync.WaitGroup
	wg.Go(func() { r.stores.guard.watch(parts, r.cfg.StoreLimit, r.cfg.Exit) })

	err := r.waitReady(ctx)
	if err == nil && ctx.Err() == nil {
		err = r.runRaft(ctx, parts, &wg)
	}
	if err == nil || !errors.Is(err, errHung) {
		err = errors.Join(err, r.release())
	}
	stopParts()
	wg.Wait()
	return err
}

// Close gives back what Open took if Run was not called; while Run runs, or
// after it, it does nothing: end Run's context instead.
func (r *Replica) Close() error {
	r.mu.Lock()
	running := r.running
	r.running = true
	r.mu.Unlock()
	if running {
		return nil
	}
	return r.release()
}

func (r *Replica) release() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.released {
		return nil
	}
	r.released = true
	if r.raft.Load() == nil { // else done after Raft's end, before the others
		close(r.stopped)
		r.prop.close()
	}
	return errors.Join(r.stores.close(), r.layer.Close(), r.dir.close())
}

func (r *Replica) waitReady(ctx context.Context) error {
	select {
	case <-r.ready:
		return nil
	default:
		r.log.Info("uninitialised: waiting for init", "raft-id", string(r.id))
	}
	select {
	case <-r.ready:
		return nil
	case <-ctx.Done():
		return nil
	case err := <-r.failure:
		return err
	}
}

func (r *Replica) raftConfig() *raft.Config {
	c := raft.DefaultConfig()
	c.LocalID = r.id
	t := r.cfg.Timing
	// Raft is not to look at a silence before its time: see patience.
	c.HeartbeatTimeout = patienceAlone(t.Heartbeat)
	c.ElectionTimeout = max(t.Election, c.HeartbeatTimeout)
	c.LeaderLeaseTimeout, c.CommitTimeout = t.LeaderLease, t.Commit
	// 64 entries per message, the default, and one message per trigger would stall
	// bursts; without the buffer a single submitter gets no group commit.
	c.MaxAppendEntries = maxAppendEntries
	c.BatchApplyCh = true
	// Snapshots and the removal of what they cover are ours (compactor). An
	// installed snapshot empties the log all the same: the write-ahead log takes no
	// gaps.
	c.SnapshotInterval, c.SnapshotThreshold, c.TrailingLogs = never, math.MaxUint64, math.MaxUint64
	c.NoLegacyTelemetry = true // else one metric name per peer
	c.Logger = r.hlog
	// A removed server must stop its Raft: it would campaign for ever.
	c.ShutdownOnRemove = true
	return c
}

const never = 10 * 365 * 24 * time.Hour

// installScale is how much of a snapshot each TransportTimeout allows for. The
// default of hashicorp/raft, 256 KiB, lets a receiver that died hold the sender
// for minutes.
const installScale = 1 << 20

// errHung: Raft did not stop; its stores are in use and cannot be closed.
var errHung = errors.New("raft did not stop in time: a store call hangs")

// runRaft starts Raft and its parts, waits for the end, and stops them in
// order.
func (r *Replica) runRaft(ctx, parts context.Context, wg *sync.WaitGroup) error {
	if err := r.stores.reconcile(); err != nil {
		return fmt.Errorf("data directory %s: %w", r.cfg.DataDir, err)
	}
	trans := transport{NetworkTransport: raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		ServerAddressProvider: byID{},
		Logger:                r.hlog.Named("transport"),
		Stream:                r.layer,
		MaxPool:               maxPool,
		Timeout:               r.cfg.TransportTimeout,
	}), onDisk: r.stores.logs.late.onDisk, stopped: r.stopped}
	trans.TimeoutScale = installScale
	rf, err := raft.NewRaft(r.raftConfig(), r.fsm, r.stores.logs, lastTerm{r.stores.stable, r.cfg.Exit}, r.stores.snaps, trans)
	if err != nil {
		trans.CloseStreams()
		if r.fsm.restoreErr != nil {
			err = fmt.Errorf("%w: snapshot in %s: %w; %s", err, r.stores.snaps.dir, r.fsm.restoreErr, lostData)
		}
		return errors.Join(fmt.Errorf("start raft: %w", err), trans.Close())
	}
	r.stores.snaps.trust("")
	r.raft.Store(rf)
	r.log.Info("raft started", "raft-id", string(r.id), "term", rf.CurrentTerm(), "last", rf.LastIndex())

	work, stopWork := context.WithCancel(parts)
	defer stopWork()
	var busy sync.WaitGroup
	busy.Go(func() { r.prop.run(work, rf) })
	busy.Go(func() { r.check.run(work, rf) })
	busy.Go(func() { r.runPulse(work) })
	busy.Go(func() { r.watchSilence(work, rf, trans) })
	busy.Go(func() { r.compact.run(work, rf) })
	wg.Go(func() { r.watchLeadership(parts, rf) })

	var cause error
	select {
	case <-ctx.Done():
	case cause = <-r.failure:
	}

	r.stopping.Store(true)
	r.prop.close()
	if cause == nil {
		r.handOver(rf)
	}
	// Futures still open when Raft stops are never answered; a running Raft
	// answers all of them, at the latest when the leader's lease ends.
	r.futures.wait(r.cfg.Timing.LeaderLease + min(time.Second, r.cfg.StopTimeout))

	r.stores.snaps.halt() // neither a snapshot nor an install is waited for
	down := make(chan error, 1)
	go func() { down <- rf.Shutdown().Error() }()
	select {
	case err = <-down:
	case <-time.After(r.cfg.StopTimeout):
		err = errHung
	}
	if !errors.Is(err, errHung) && !r.stores.logs.late.settle(r.cfg.StopTimeout) {
		err = errHung
	}
	close(r.stopped)
	stopWork()
	trans.CloseStreams()
	// Shutdown has closed the transport, and with it the layer, unless it hung.
	err = errors.Join(err, trans.Close())
	busy.Wait()
	r.asking.wait(r.cfg.StopTimeout)
	r.log.Info("raft stopped", "raft-id", string(r.id))
	return errors.Join(cause, err)
}

// handOver transfers leadership to another voter, if this server leads and
// there is one: a planned stop then costs milliseconds, not an election timeout.
func (r *Replica) handOver(rf *raft.Raft) {
	if rf.State() != raft.Leader {
		return
	}
	var others []Server
	for _, s := range r.Servers() {
		if s.Voter && s.RaftID != string(r.id) {
			others = append(others, s)
		}
	}
	if len(others) == 0 {
		return
	}
	next, err := r.successor(context.Background(), others...)
	if err != nil {
		r.log.Warn("leadership was not handed over", "error", err)
		return
	}
	done := make(chan error, 1)
	// hashicorp/raft gives up after an election timeout.
	go func() { done <- transfer(rf, next).Error() }()
	select {
	case err := <-done:
		if err != nil {
			r.log.Warn("leadership was not handed over", "error", err)
		}
	case <-time.After(r.cfg.Timing.Election + r.cfg.StopTimeout):
		r.log.Warn("leadership was not handed over", "error", errHung)
	}
}
