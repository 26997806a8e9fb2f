package replica

import (
	"context"
	"sync"
	"time"

	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/wake"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	defaultD      = 4 * time.Second
	maxPulseEvery = 500 * time.Millisecond
	maxPulseAge   = 1500 * time.Millisecond
	// pulsesInFlight bounds pulses that wait for a slow disk.
	pulsesInFlight = 4
)

// pulse proves that the disks of a quorum move. A leader whose disk hangs
// stays leader in hashicorp/raft, its heartbeats go on; so everything that says
// "this region can decide" asks for a fresh pulse [F30].
type pulse struct {
	mu       sync.Mutex
	d        time.Duration
	term     uint64
	proposed instant.Instant
	inFlight int
	changed  chan struct{}
}

func newPulse() *pulse { return &pulse{d: defaultD, changed: make(chan struct{}, 1)} }

// SetD tells the smallest D among the region's partitions; it paces the pulse.
func (r *Replica) SetD(d time.Duration) {
	if d <= 0 {
		return
	}
	r.pulse.mu.Lock()
	r.pulse.d = d
	r.pulse.mu.Unlock()
	wake.Up(r.pulse.changed)
}

func (p *pulse) every() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return min(p.d/5, maxPulseEvery)
}

// PulseFresh reports whether, at now, the newest pulse committed in the term
// that this server leads was proposed at most min(D/2, 1.5 s) ago. Without it no
// round counts, no heartbeat is sent and nothing is acknowledged.
func (r *Replica) PulseFresh(now instant.Instant) bool {
	term, proposed, ok := r.LastPulse()
	if !ok {
		return false
	}
	if led, leading := r.Leading(); !leading || led != term {
		return false
	}
	r.pulse.mu.Lock()
	defer r.pulse.mu.Unlock()
	return now.Sub(proposed) <= min(r.pulse.d/2, maxPulseAge)
}

// LastPulse returns when the newest committed own pulse was proposed, and its
// term. A pulse proposed after a round's T0 is the own vote of that round.
func (r *Replica) LastPulse() (term uint64, proposed instant.Instant, ok bool) {
	r.pulse.mu.Lock()
	defer r.pulse.mu.Unlock()
	return r.pulse.term, r.pulse.proposed, r.pulse.term != 0
}

// runPulse proposes a pulse at once when this server begins to lead, and then
// every min(D/5, 0.5 s).
func (r *Replica) runPulse(ctx context.Context) {
	t := time.NewTimer(0)
	defer t.Stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.lead.gained:
		case <-r.pulse.changed:
		case <-t.C:
		}
		r.beat(ctx, &wg)
		t.Reset(r.pulse.every())
	}
}

func (r *Replica) beat(ctx context.Context, wg *sync.WaitGroup) {
	term, leading := r.Leading()
	if !leading {
		return
	}
	p := r.pulse
	p.mu.Lock()
	busy := p.inFlight >= pulsesInFlight
	if !busy {
		p.inFlight++
	}
	p.mu.Unlock()
	if busy {
		return
	}
	at := r.cfg.Clock.Now()
	wg.Go(func() {
		_, err := r.ProposeUrgent(ctx, &pb.Command{Term: term, Kind: &pb.Command_Pulse{Pulse: &pb.PulseCommand{}}})
		p.mu.Lock()
		p.inFlight--
		newer := err == nil && (term > p.term || term == p.term && at.After(p.proposed))
		if newer {
			p.term, p.proposed = term, at
		}
		p.mu.Unlock()
		if newer && r.cfg.Pulsed != nil {
			r.cfg.Pulsed()
		}
	})
}
