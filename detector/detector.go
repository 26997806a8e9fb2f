// Package detector hears which regions can decide: their leaders' heartbeats,
// sent as gossip datagrams, judged per region by phi-accrual; and it keeps the
// encrypted memberlist pool of all region servers and witnesses.
//
// What it says is a Suspicion, never authority: it may delay or begin a
// campaign and is one condition of a promise (V3), and leases decide.
//
// Heartbeats go to every configured peer (SetPeers changes them while it runs),
// whatever the pool's membership says, and only while the caller vouches that this process leads and its disk
// moves. Configured peers that are missing are joined again for ever, which
// memberlist does not do by itself [F42].
//
// Goroutines: Run owns memberlist's, the join loop, the heartbeat loop with one
// sender per peer, and the one that calls Heard; all end before Run returns.
package detector

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
	"golang.org/x/sync/errgroup"

	"github.com/headlease/headlease/detector/phi"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// kindHeartbeat begins a gossip message that is a pb.Heartbeat.
	kindHeartbeat = 1
	// heardEvery limits how often Heard is called per peer.
	heardEvery = time.Second
	// joinTimeout bounds one attempt to join one peer.
	joinTimeout = 2 * time.Second
	// leaveTimeout bounds the farewell at shutdown.
	leaveTimeout = 500 * time.Millisecond
	// rttWeight is the weight of a new measurement in a smoothed round trip.
	rttWeight = 0.25
)

// Beat tells whether this process leads its region, with a fresh pulse, and
// what its heartbeat then says; Detector numbers it. It must not block.
type Beat func() (*pb.Heartbeat, bool)

// Detector is safe for concurrent use.
type Detector struct {
	cfg Config

	// mu is a leaf: nothing that may block is called under it, and memberlist
	// never is (its delegates run under memberlist's own lock).
	mu sync.Mutex
	// length is D.
	length time.Duration
	lanes  map[string]*lane // by peer
	// regions are those of the peers and the own one.
	regions map[string]*phi.Detector
	members map[string]bool
	rtts    map[string]time.Duration
	notable map[string]instant.Instant
	beat    Beat
	seq     uint64
	ignored uint64
	// beats counts what was heard and news, by region.
	beats map[string]uint64

	heard chan string
	// wake is poked when there are lanes without a sender.
	wake chan struct{}
}

// lane holds the newest heartbeat on its way to a peer.
type lane struct {
	peer Peer
	next chan []byte
	// gone is closed when the peer is configured no more, or at another address.
	gone chan struct{}
	sent bool // it has its sender; under the Detector's lock
}

// New makes a detector that has heard nobody yet. It judges from now on; Run
// makes it listen.
func New(cfg Config) (*Detector, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	d := &Detector{
		cfg:     cfg,
		length:  cfg.D,
		lanes:   map[string]*lane{},
		regions: map[string]*phi.Detector{},
		members: map[string]bool{},
		rtts:    map[string]time.Duration{},
		notable: map[string]instant.Instant{},
		beats:   map[string]uint64{},
		heard:   make(chan string, 256),
		wake:    make(chan struct{}, 1),
	}
	if err := d.SetPeers(cfg.Peers); err != nil {
		return nil, err
	}
	if cfg.Registerer != nil {
		if err := cfg.Registerer.Register(collector{d}); err != nil {
			return nil, fmt.Errorf("detector: %w", err)
		}
	}
	return d, nil
}

// SetBeat makes the process send heartbeats while beat says so; nil: never.
func (d *Detector) SetBeat(beat Beat) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.beat = beat
}

// SetPeers replaces the configured peers. What is known of peers and regions
// that stay is kept; a region that is new is judged from now on.
func (d *Detector) SetPeers(peers []Peer) error {
	if err := checkPeers(d.cfg.Name, peers); err != nil {
		return fmt.Errorf("detector: %w", err)
	}
	now := d.cfg.Clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	regions := map[string]*phi.Detector{}
	for _, r := range append([]Peer{{Region: d.cfg.Region}}, peers...) {
		if r.Region == "" || regions[r.Region] != nil {
			continue
		}
		judge := d.regions[r.Region]
		if judge == nil {
			var err error
			if judge, err = phi.New(phi.Params{D: d.length, Interval: d.cfg.Interval}, now); err != nil {
				return err
			}
		}
		regions[r.Region] = judge
	}
	d.regions = regions
	lanes := map[string]*lane{}
	for _, p := range peers {
		l := d.lanes[p.Name]
		if l == nil || l.peer != p {
			l = &lane{peer: p, next: make(chan []byte, 1), gone: make(chan struct{})}
		}
		lanes[p.Name] = l
	}
	for name, l := range d.lanes {
		if lanes[name] != l {
			close(l.gone)
		}
		if lanes[name] == nil {
			delete(d.rtts, name)
			delete(d.notable, name)
		}
	}
	d.lanes = lanes
	select {
	case d.wake <- struct{}{}:
	default:
	}
	return nil
}

// peer returns a configured peer.
func (d *Detector) peer(name string) (Peer, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if l := d.lanes[name]; l != nil {
		return l.peer, true
	}
	return Peer{}, false
}

// SetD changes D, the largest among the partitions.
func (d *Detector) SetD(length time.Duration) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.length = length
	for _, judge := range d.regions {
		if err := judge.SetD(length); err != nil {
			return err
		}
	}
	return nil
}

// Resume tells that this process was paused until now (the clock's watch saw a
// gap): nothing measured over the pause counts [F43].
func (d *Detector) Resume(now instant.Instant) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, judge := range d.regions {
		judge.Resume(now)
	}
}

// Suspicion is what this process thinks of a region now. Of a region that is
// not configured it knows nothing.
func (d *Detector) Suspicion(region string) phi.Suspicion {
	now := d.cfg.Clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if judge := d.regions[region]; judge != nil {
		return judge.Judge(now)
	}
	return phi.Suspicion{Silent: -1}
}

// Reports are the suspicions of all configured regions, by name.
func (d *Detector) Reports() []*pb.PeerReport {
	now := d.cfg.Clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make([]*pb.PeerReport, 0, len(d.regions))
	for name, judge := range d.regions {
		s := judge.Judge(now)
		out = append(out, &pb.PeerReport{Region: name, Verdict: s.Verdict.Proto(), Phi: s.Phi, SilentNs: int64(s.Silent)})
	}
	slices.SortFunc(out, func(a, b *pb.PeerReport) int { return strings.Compare(a.GetRegion(), b.GetRegion()) })
	return out
}

// RoundTrips are the smoothed round-trip times to the peers measured so far.
func (d *Detector) RoundTrips() []*pb.RoundTrip {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make([]*pb.RoundTrip, 0, len(d.rtts))
	for name, rtt := range d.rtts {
		out = append(out, &pb.RoundTrip{Peer: name, RttNs: int64(rtt)})
	}
	slices.SortFunc(out, func(a, b *pb.RoundTrip) int { return strings.Compare(a.GetPeer(), b.GetPeer()) })
	return out
}

// RoundTrip is the smoothed round-trip time to a peer, if measured.
func (d *Detector) RoundTrip(peer string) (time.Duration, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	rtt, ok := d.rtts[peer]
	return rtt, ok
}

// Members are the other processes that the pool holds alive, by name: a hint.
func (d *Detector) Members() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make([]string, 0, len(d.members))
	for name := range d.members {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// Run keeps the pool until ctx ends, which is no error. It may be called once.
func (d *Detector) Run(ctx context.Context) error {
	list, err := memberlist.Create(d.poolConfig())
	if err != nil {
		_ = d.cfg.Transport.Shutdown()
		return fmt.Errorf("detector: start gossip: %w", err)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { d.joinLoop(ctx, list); return nil })
	g.Go(func() error { d.beatLoop(ctx); return nil })
	g.Go(func() error { return d.sendLoops(ctx, list) })
	g.Go(func() error { d.heardLoop(ctx); return nil })
	err = g.Wait()
	// Leave first: after Shutdown it would panic, and without it the others
	// take this for a crash.
	if lerr := list.Leave(leaveTimeout); lerr != nil {
		d.cfg.Logger.Debug("gossip farewell not confirmed", "error", lerr)
	}
	if serr := list.Shutdown(); serr != nil && err == nil {
		err = fmt.Errorf("detector: stop gossip: %w", serr)
	}
	return err
}

func (d *Detector) setMember(name string, alive bool) {
	if _, configured := d.peer(name); !configured && name != d.cfg.Name {
		d.cfg.Logger.Warn("a process that is not configured here is in the gossip pool", "peer", name, "alive", alive)
	}
	if name == d.cfg.Name {
		return
	}
	d.mu.Lock()
	if alive {
		d.members[name] = true
	} else {
		delete(d.members, name)
	}
	d.mu.Unlock()
	d.cfg.Logger.Info("gossip member", "peer", name, "alive", alive)
	if alive {
		d.note(name)
	}
}

func (d *Detector) setRoundTrip(name string, rtt time.Duration) {
	rtt = max(0, rtt) // memberlist stamps after the write: it may be negative
	d.mu.Lock()
	if old, ok := d.rtts[name]; ok {
		rtt = old + time.Duration(rttWeight*float64(rtt-old))
	}
	d.rtts[name] = rtt
	d.mu.Unlock()
	d.note(name)
}
