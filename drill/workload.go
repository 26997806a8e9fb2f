package drill

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/clusterclient"
	"github.com/headlease/headlease/internal/history"
	"github.com/headlease/headlease/internal/instant"
	lnk "github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pause"
)

const (
	// acquireLimit bounds one try of a worker, so that it looks around again.
	acquireLimit = 30 * time.Second
	writeLimit   = 5 * time.Second
	// afterLoss is the pause of a worker before it asks again.
	afterLoss = 50 * time.Millisecond
	// probeEvery is the pause between two acquires of a probe.
	probeEvery = 250 * time.Millisecond
	// closeLimit bounds the orderly end of the clients; what cannot be closed
	// expires.
	closeLimit = 3 * time.Second
	// herdLimit bounds the time in which all of a herd must have had the lock.
	herdLimit = 3 * time.Minute
)

// actor is one worker on one lock, over all its lives.
type actor struct {
	name, lock, partition string
	// probes: it takes a lock that nobody else wants, again and again, so that
	// there is always an acquire whose time can be told.
	probes bool

	mu     sync.Mutex
	events []check.Event
}

func (a *actor) note(e check.Event) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.events) < maxKept {
		a.events = append(a.events, e)
	}
}

func (a *actor) record() check.Actor {
	a.mu.Lock()
	defer a.mu.Unlock()
	return check.Actor{Name: a.name, Lock: a.lock, Partition: a.partition, Probes: a.probes, Events: append([]check.Event(nil), a.events...)}
}

// counters are what the live view shows.
type counters struct{ grants, writes, refused, lost atomic.Int64 }

// workload is the workers beside a drill's steps: sessions in this process,
// which hold locks, wait in queues and write to the resource. Close it.
type workload struct {
	rig       *rig
	plan      plan.Workload
	resource  string
	recorders map[string]*history.Recorder // by region
	counters  counters
	taken     map[string]bool

	mu      sync.Mutex
	actors  []*actor
	cancel  context.CancelFunc
	work    sync.WaitGroup
	clients []*client.Client
	lives   int
}

// startWorkload starts the workers against a resource.
func (r *rig) startWorkload(w plan.Workload, resourceAddress string, taken map[string]bool) (*workload, error) {
	l := &workload{rig: r, plan: w, resource: resourceAddress, recorders: map[string]*history.Recorder{}, taken: taken}
	began := r.clock.Now()
	for _, region := range r.file().RegionNames() {
		l.recorders[region] = history.NewRecorderOn(func() time.Duration { return r.clock.Now().Sub(began) })
	}
	if err := l.makeActors(); err != nil {
		return nil, err
	}
	return l, l.start()
}

// makeActors spreads the locks over the partitions, with a holder and waiters
// each.
func (l *workload) makeActors() error {
	parts := l.rig.file().Partitions
	for i := range l.plan.Locks {
		p := parts[i%len(parts)].Name
		lock, err := l.rig.lockIn(p, l.taken)
		if err != nil {
			return err
		}
		for n := range 1 + l.plan.Waiters {
			l.actors = append(l.actors, &actor{name: fmt.Sprintf("worker %d.%d", i+1, n+1), lock: lock, partition: p})
		}
	}
	for _, p := range parts {
		lock, err := l.rig.lockIn(p.Name, l.taken)
		if err != nil {
			return err
		}
		l.actors = append(l.actors, &actor{name: "probe of " + p.Name, lock: lock, partition: p.Name, probes: true})
	}
	return nil
}

// recording dials as its links do, and records what passes.
type recording struct {
	client.Links
	recorders map[string]*history.Recorder
	name      string
}

func (r recording) DialGRPC(plane lnk.Plane, peer lnk.Peer, extra ...grpc.DialOption) (*grpc.ClientConn, error) {
	if rec := r.recorders[peer.Region]; rec != nil {
		// First, so that they see each call and each message.
		extra = append([]grpc.DialOption{
			grpc.WithChainUnaryInterceptor(rec.Unary(r.name)), grpc.WithChainStreamInterceptor(rec.Stream(r.name)),
		}, extra...)
	}
	return r.Links.DialGRPC(plane, peer, extra...)
}

func (l *workload) newClient(home, name string, recorded bool) (*client.Client, error) {
	links := l.rig.links
	if recorded {
		links = recording{links, l.recorders, name}
	}
	return client.New(client.Config{
		Cluster: l.rig.file().Cluster, Regions: clusterclient.Regions(l.rig.file()), Home: home, Links: links, TTL: l.plan.TTL, Clock: l.rig.clock,
		Logger: l.rig.log.With("client", name), Labels: map[string]string{"drill": "workload"},
	})
}

// start opens the sessions and lets the actors work.
func (l *workload) start() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lives++
	ctx, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	homes := l.rig.file().RegionNames()
	l.clients = nil
	var sessions []*client.Session
	for i := range min(l.plan.Sessions, len(homes)) {
		c, err := l.newClient(homes[i], fmt.Sprintf("client %d.%d", i+1, l.lives), true)
		if err != nil {
			cancel()
			return err
		}
		l.clients = append(l.clients, c)
	}
	for i := range l.plan.Sessions {
		s, err := l.clients[i%len(l.clients)].NewSession(client.SessionOptions{})
		if err != nil {
			cancel()
			return err
		}
		sessions = append(sessions, s)
	}
	for i, a := range l.actors {
		w := &loadWorker{
			actor: a, session: sessions[i%len(sessions)], clock: l.rig.clock, log: l.rig.log, counters: &l.counters,
			resource: resource.NewClient(l.resource, a.name), hold: l.plan.Hold, every: time.Duration(float64(time.Second) / l.plan.Writes),
		}
		l.work.Go(func() { w.run(ctx) })
	}
	return l.startReaders(ctx)
}

// stop ends the workers in order: they release what they hold.
func (l *workload) stop(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cancel != nil {
		l.cancel()
	}
	l.work.Wait()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
	defer cancel()
	var wg sync.WaitGroup
	for _, c := range l.clients {
		wg.Go(func() {
			if err := c.Close(ctx); err != nil {
				l.rig.log.Info("sessions not closed; they expire", "error", err)
			}
		})
	}
	wg.Wait()
	l.clients, l.cancel = nil, nil
}

// redeploy replaces all workers at once.
func (l *workload) redeploy(ctx context.Context) error {
	l.stop(ctx)
	return l.start()
}

func (l *workload) records() []check.Actor {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]check.Actor, len(l.actors))
	for i, a := range l.actors {
		out[i] = a.record()
	}
	return out
}

// loadWorker is one life of an actor.
type loadWorker struct {
	*actor
	session  *client.Session
	clock    clock.Clock
	log      *slog.Logger
	counters *counters
	resource *resource.Client
	hold     time.Duration
	every    time.Duration
	// once: it holds the lock one time, for one write.
	once bool
}

func (w *loadWorker) run(ctx context.Context) {
	for ctx.Err() == nil {
		lease, waited, asked, err := w.acquire(ctx)
		if err != nil {
			if ctx.Err() == nil {
				w.log.Debug("not acquired", "worker", w.name, "lock", w.lock, "error", err)
			}
			_ = pause.For(ctx, afterLoss) // ends with ctx, as the loop does
			continue
		}
		if !w.probes {
			w.counters.grants.Add(1)
		}
		w.event(lease, check.Event{Kind: check.Acquired, Sent: asked, Region: lease.Region(), Waited: waited})
		next := afterLoss
		if w.probes {
			w.release(ctx, lease)
			next = probeEvery
		} else {
			w.work(ctx, lease)
		}
		if w.once {
			return
		}
		_ = pause.For(ctx, next) // ends with ctx, as the loop does
	}
}

// acquire asks, and takes a place in the queue if another holds the lock.
func (w *loadWorker) acquire(ctx context.Context) (lease *client.Lease, waited bool, asked instant.Instant, err error) {
	limited, cancel := context.WithTimeout(ctx, acquireLimit)
	defer cancel()
	asked = w.clock.Now()
	if !w.once {
		lease, err = w.session.Acquire(limited, w.lock)
		if !errors.Is(err, client.ErrBusy) {
			return lease, false, asked, err
		}
	}
	asked = w.clock.Now()
	lease, err = w.session.Acquire(limited, w.lock, client.Wait())
	return lease, true, asked, err
}

// work claims the resource and writes until it lets the lease go or loses it.
func (w *loadWorker) work(ctx context.Context, lease *client.Lease) {
	var over <-chan time.Time
	if w.hold > 0 {
		over = time.After(w.hold)
	}
	first := true
	for {
		if !w.write(ctx, lease, first) {
			return
		}
		if first = false; w.once {
			w.release(ctx, lease)
			return
		}
		select {
		case <-ctx.Done():
			w.release(ctx, lease)
			return
		case <-over:
			w.release(ctx, lease)
			return
		case <-lease.Context().Done():
			w.lost(lease)
			return
		case <-time.After(w.every):
		}
	}
}

// write writes once under the lease; false: it is over.
func (w *loadWorker) write(ctx context.Context, lease *client.Lease, claim bool) bool {
	if !lease.Valid() {
		<-lease.Context().Done() // it ends no later than Valid does
		w.lost(lease)
		return false
	}
	limited, cancel := context.WithTimeout(ctx, writeLimit)
	defer cancel()
	sent := w.clock.Now()
	var err error
	if claim {
		_, err = w.resource.Claim(limited, w.lock, lease.Token())
	}
	if err == nil {
		_, err = w.resource.Write(limited, w.lock, lease.Token(), w.name)
	}
	var stale *fence.StaleError
	var unclaimed *fence.UnclaimedError
	switch {
	case err == nil:
		w.counters.writes.Add(1)
		w.event(lease, check.Event{Kind: check.Wrote, Sent: sent})
		return true
	case errors.As(err, &stale), errors.As(err, &unclaimed):
		w.counters.refused.Add(1)
		reason := err.Error()
		if stale != nil {
			reason = "it is below " + stale.Seen.String()
		}
		w.event(lease, check.Event{Kind: check.Refused, Sent: sent, Reason: reason})
		w.release(ctx, lease)
		return false
	default:
		if ctx.Err() == nil {
			w.event(lease, check.Event{Kind: check.Failed, Sent: sent, Reason: err.Error()})
		}
		return true // it may have happened; the next one tells
	}
}

func (w *loadWorker) release(ctx context.Context, lease *client.Lease) {
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
	defer cancel()
	if lease.Context().Err() != nil {
		w.lost(lease)
		return
	}
	e := check.Event{Kind: check.Released, Sent: w.clock.Now(), Token: lease.Token()}
	if err := lease.Release(limited); err != nil {
		e.Reason = err.Error() // it is tried again in the background
	}
	e.At = w.clock.Now()
	w.note(e)
}

func (w *loadWorker) lost(lease *client.Lease) {
	w.counters.lost.Add(1)
	now := w.clock.Now()
	cause := context.Cause(lease.Context())
	reason := cause.Error()
	if lost := (*client.LostError)(nil); errors.As(cause, &lost) {
		reason = lost.Reason
	}
	w.note(check.Event{Kind: check.Lost, Sent: now, At: now, Token: lease.Token(), Reason: reason})
}

// event completes an event with what the worker believes at this moment.
func (w *loadWorker) event(lease *client.Lease, e check.Event) {
	e.At = w.clock.Now() // before Remaining, so that At + Remaining is not too late
	e.Token = lease.Token()
	if left := lease.Remaining(); left > 0 && lease.Valid() {
		e.Until = e.At.Add(left)
	}
	w.note(e)
}

// herd lets so many clients queue for one lock of a partition, each for one
// write, and returns when all have had it. They are not in the histories: a
// queue that long is beyond what a search for an order can decide.
func (l *workload) herd(ctx context.Context, clients int, partition string) (served int, err error) {
	lock, err := l.rig.lockIn(partition, l.taken)
	if err != nil {
		return 0, err
	}
	home := l.rig.file().RegionNames()[0]
	if owner, ok := l.rig.watch.owner(partition); ok {
		home = owner.By
	}
	ctx, cancel := context.WithTimeout(ctx, herdLimit)
	defer cancel()
	var cs []*client.Client
	defer func() {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
		defer cancel()
		for _, c := range cs {
			if e := c.Close(limited); e != nil {
				l.rig.log.Info("sessions of the herd not closed; they expire", "error", e)
			}
		}
	}()
	var work sync.WaitGroup
	defer work.Wait()
	var done atomic.Int64
	for i := range clients {
		if i%client.MaxSessions == 0 {
			c, err := l.newClient(home, fmt.Sprintf("herd %d", len(cs)+1), false)
			if err != nil {
				return 0, err
			}
			cs = append(cs, c)
		}
		s, err := cs[len(cs)-1].NewSession(client.SessionOptions{})
		if err != nil {
			return 0, err
		}
		a := &actor{name: fmt.Sprintf("herd %d", i+1), lock: lock, partition: partition}
		l.mu.Lock()
		l.actors = append(l.actors, a)
		l.mu.Unlock()
		w := &loadWorker{
			actor: a, session: s, clock: l.rig.clock, log: l.rig.log, counters: &l.counters,
			resource: resource.NewClient(l.resource, a.name), every: time.Second, once: true,
		}
		work.Go(func() {
			w.run(ctx)
			if ctx.Err() == nil {
				done.Add(1)
			}
		})
	}
	work.Wait()
	return int(done.Load()), nil
}

// working reports whether every lock has had a holder that has written.
func (l *workload) working() bool {
	wrote := map[string]bool{}
	for _, a := range l.records() {
		if a.Probes {
			continue
		}
		wrote[a.Lock] = wrote[a.Lock] || slices.ContainsFunc(a.Events, func(e check.Event) bool { return e.Kind == check.Wrote })
	}
	for _, ok := range wrote {
		if !ok {
			return false
		}
	}
	return true
}
