package drill

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/headlease/headlease/drill/worker"
	"github.com/headlease/headlease/internal/devcluster"
)

// sessionTTL of the worker processes; it has no part in a failover between
// regions.
const sessionTTL = 5 * time.Second

// workerSpec is what a worker process is started with.
type workerSpec struct {
	// name is the actor's and the writer's in the journal.
	name string
	// home is the region that it asks first.
	home     string
	lock     string
	resource string
}

// workerProcess is a running worker and what it has reported so far. Safe for
// concurrent use.
type workerProcess struct {
	*devcluster.Child
	spec workerSpec

	mu      sync.Mutex
	events  []worker.Event
	changed chan struct{} // closed at the next event
}

// workerArgs is how `headlease` is started as a worker.
func (r *rig) workerArgs(s workerSpec, ttl time.Duration) []string {
	return []string{
		"drill", "worker", "--config", r.config, "--certs", r.certs, "--as", r.client, "--name", s.name, "--home", s.home,
		"--lock", s.lock, "--resource", s.resource, "--ttl", ttl.String(),
	}
}

func (r *rig) startWorker(s workerSpec) (*workerProcess, error) {
	w := &workerProcess{spec: s, changed: make(chan struct{})}
	out := devcluster.NewLines(func(line []byte) {
		var e worker.Event
		if json.Unmarshal(line, &e) == nil && e.Kind != "" {
			w.take(e)
		}
	})
	log := strings.NewReplacer(" ", "-", "/", "-").Replace(s.name+"-"+s.lock) + ".log"
	child, err := r.group.Start(devcluster.Spec{
		Name: s.name, Binary: r.binary(), Args: r.workerArgs(s, sessionTTL), Log: filepath.Join(r.dir, log), Stdout: out,
	})
	if err != nil {
		return nil, err
	}
	w.Child = child
	return w, nil
}

func (w *workerProcess) take(e worker.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, e)
	close(w.changed)
	w.changed = make(chan struct{})
}

// all returns what it has reported so far.
func (w *workerProcess) all() []worker.Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.events)
}

// await waits for the first event of one of these kinds.
func (w *workerProcess) await(ctx context.Context, limit time.Duration, kinds ...worker.Kind) (worker.Event, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not within %v", limit))
	defer cancel()
	ended := false
	for {
		w.mu.Lock()
		i := slices.IndexFunc(w.events, func(e worker.Event) bool { return slices.Contains(kinds, e.Kind) })
		changed := w.changed
		if i >= 0 {
			defer w.mu.Unlock()
			return w.events[i], nil
		}
		w.mu.Unlock()
		if ended {
			return worker.Event{}, fmt.Errorf("%s ended (%s) and reported no %q; the end of its log:\n  %s", w.spec.name, w.Exit(), kinds, w.LogTail())
		}
		select {
		case <-ctx.Done():
			return worker.Event{}, fmt.Errorf("wait for %s to report %q: %w; it said %s", w.spec.name, kinds, context.Cause(ctx), w.last())
		case <-w.Done():
			ended = true // what it reported before is all there
		case <-changed:
		}
	}
}

func (w *workerProcess) last() string {
	events := w.all()
	if len(events) == 0 {
		return "nothing; the end of its log:\n  " + w.LogTail()
	}
	e := events[len(events)-1]
	return fmt.Sprintf("last %q %s", e.Kind, e.Reason)
}
