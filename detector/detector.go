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
	"google.golang.org/protobuf/proto"

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

// joinLoop joins missing configured peers: often until the first one answers,
// then at the slow pace for ever [F42].
func (d *Detector) joinLoop(ctx context.Context, list *memberlist.Memberlist) {
	d.mu.Lock()
	every, joined := d.cfg.FirstJoin, len(d.lanes) == 0
	d.mu.Unlock()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if d.joinMissing(ctx, list) > 0 {
			joined = true
		}
		if joined {
			every = d.cfg.Rejoin
		}
		timer.Reset(every)
	}
}

// joinMissing tries every missing peer once, at most 8 at a time: dead ones
// cost their full timeout, and the living ones must not wait behind them.
func (d *Detector) joinMissing(ctx context.Context, list *memberlist.Memberlist) int {
	var missing []Peer
	d.mu.Lock()
	for name, l := range d.lanes {
		if !d.members[name] {
			missing = append(missing, l.peer)
		}
	}
	d.mu.Unlock()
	joined := make([]int, len(missing))
	var g errgroup.Group
	g.SetLimit(8)
	for i, p := range missing {
		g.Go(func() error {
			select {
			case <-ctx.Done():
			default:
				joined[i] = d.join(list, p)
			}
			return nil
		})
	}
	_ = g.Wait()
	total := 0
	for _, n := range joined {
		total += n
	}
	return total
}

func (d *Detector) join(list *memberlist.Memberlist, p Peer) int {
	n, err := list.Join([]string{p.Name + "/" + p.Gossip})
	if err != nil {
		d.cfg.Logger.Debug("gossip peer not reached", "peer", p.Name, "address", p.Gossip, "error", err)
	}
	return n
}

// beatLoop sends heartbeats. Its ticks are late when the process is late, and
// then so are the heartbeats, as they should be.
func (d *Detector) beatLoop(ctx context.Context) {
	tick := time.NewTicker(d.cfg.Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if hb, ok := d.nextBeat(); ok {
			d.send(hb)
		}
	}
}

func (d *Detector) nextBeat() (*pb.Heartbeat, bool) {
	d.mu.Lock()
	beat := d.beat
	d.mu.Unlock()
	if beat == nil || d.cfg.Region == "" {
		return nil, false
	}
	hb, ok := beat()
	if !ok || hb == nil {
		return nil, false
	}
	hb.Region, hb.Server = d.cfg.Region, d.cfg.Name
	d.mu.Lock()
	d.seq++
	hb.Seq = d.seq
	d.mu.Unlock()
	return hb, true
}

func (d *Detector) send(hb *pb.Heartbeat) {
	msg, err := proto.MarshalOptions{}.MarshalAppend([]byte{kindHeartbeat}, hb)
	if err != nil {
		d.cfg.Logger.Error("heartbeat not encoded", "error", err)
		return
	}
	// A leader hears itself: its region is judged here like any other.
	d.take(hb)
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, l := range d.lanes {
		select {
		case l.next <- msg:
		default: // the peer's sender is stuck; the next heartbeat says more
		}
	}
}

// sendLoops gives each lane its sender, until ctx ends and all senders have.
func (d *Detector) sendLoops(ctx context.Context, list *memberlist.Memberlist) error {
	var g errgroup.Group
	for {
		d.mu.Lock()
		for _, l := range d.lanes {
			if !l.sent {
				l.sent = true
				g.Go(func() error { d.sendLoop(ctx, list, l); return nil })
			}
		}
		d.mu.Unlock()
		select {
		case <-ctx.Done():
			return g.Wait()
		case <-d.wake:
		}
	}
}

// sendLoop sends to one peer. Each has its own: the address may be a host name,
// and a name server that hangs must not silence this region for all others.
func (d *Detector) sendLoop(ctx context.Context, list *memberlist.Memberlist, l *lane) {
	p := l.peer
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.gone:
			return
		case msg := <-l.next:
			if err := list.SendToAddress(memberlist.Address{Addr: p.Gossip, Name: p.Name}, msg); err != nil {
				d.cfg.Logger.Debug("heartbeat not sent", "peer", p.Name, "address", p.Gossip, "error", err)
			}
		}
	}
}

// receive takes a gossip message. raw is valid during the call only; nothing
// of it is kept.
func (d *Detector) receive(raw []byte) {
	if len(raw) == 0 || raw[0] != kindHeartbeat {
		d.ignore("unknown kind")
		return
	}
	var hb pb.Heartbeat
	if err := proto.Unmarshal(raw[1:], &hb); err != nil {
		d.ignore("not a heartbeat")
		return
	}
	if p, ok := d.peer(hb.GetServer()); !ok || p.Region == "" || p.Region != hb.GetRegion() {
		d.ignore("server is not configured in that region")
		return
	}
	if own := d.cfg.ClusterID(); own != "" && hb.GetClusterId() != own {
		d.ignore("another cluster's id")
		return
	}
	d.take(&hb)
	d.note(hb.GetServer())
}

func (d *Detector) ignore(why string) {
	d.mu.Lock()
	d.ignored++
	n := d.ignored
	d.mu.Unlock()
	if n&(n-1) == 0 { // 1, 2, 4, 8, …: a flood logs little
		d.cfg.Logger.Warn("gossip message ignored", "reason", why, "ignored", n)
	}
}

func (d *Detector) take(hb *pb.Heartbeat) {
	now := d.cfg.Clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if judge := d.regions[hb.GetRegion()]; judge != nil && judge.Heard(now, hb.GetTerm(), hb.GetSeq()) {
		d.beats[hb.GetRegion()]++
	}
}

// note passes on that a peer lives. It is called under memberlist's lock and
// must not block: when the queue is full the news is dropped, the next
// heartbeat brings it again.
func (d *Detector) note(peer string) {
	now := d.cfg.Clock.Now()
	d.mu.Lock()
	last, seen := d.notable[peer]
	fresh := !seen || now.Sub(last) >= heardEvery
	if fresh {
		d.notable[peer] = now
	}
	d.mu.Unlock()
	if !fresh {
		return
	}
	select {
	case d.heard <- peer:
	default:
	}
}

func (d *Detector) heardLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case peer := <-d.heard:
			d.cfg.Heard(peer)
		}
	}
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
