package drill

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/pause"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// statusEvery is the pause between two questions to one server about its
	// region; a region is asked that often by each of its servers.
	statusEvery = 75 * time.Millisecond
	// aliveEvery is the pause between two questions whether a process answers.
	aliveEvery = 400 * time.Millisecond
	// watchLost is the pause after a process did not answer.
	watchLost = 250 * time.Millisecond
	// sampleEvery is the pause between two samples of one observer's detector.
	sampleEvery = 250 * time.Millisecond
	// maxKept bounds what one drill collects of a kind.
	maxKept = 2_000_000
)

// sample is what one process says of the regions it listens to.
type sample struct {
	at       instant.Instant
	observer string // a region or a witness
	region   string
	phi      float64
	silent   time.Duration
	verdict  pb.Verdict
}

// roundTrip is what a region measured to a process.
type roundTrip struct {
	at   instant.Instant
	from string // a region
	to   string // a process
	rtt  time.Duration
}

// watch asks every process all the time. Safe for concurrent use; close it.
type watch struct {
	clock  clock.Clock
	admin  *admin.Cluster
	log    *slog.Logger
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu      sync.Mutex
	ledger  check.Ledger
	answers []check.Answer
	heard   map[string][]instant.Instant
	samples []sample
	rtts    []roundTrip
	sampled map[string]instant.Instant
	latest  map[string]*pb.StatusResponse // of the regions that answered last
	said    map[[2]string]string          // what a region did about a partition
	full    bool
	changed chan struct{} // closed at the next answer
}

func newWatch(c clock.Clock, adm *admin.Cluster, log *slog.Logger) *watch {
	ctx, cancel := context.WithCancel(context.Background())
	w := &watch{
		clock: c, admin: adm, log: log, cancel: cancel,
		heard: map[string][]instant.Instant{}, sampled: map[string]instant.Instant{},
		latest: map[string]*pb.StatusResponse{}, said: map[[2]string]string{}, changed: make(chan struct{}),
	}
	for _, p := range adm.File().Processes() {
		if p.Role == clusterfile.RoleRegion {
			w.work.Go(func() { w.askStatus(ctx, p) })
		}
		w.work.Go(func() { w.askAlive(ctx, p) })
	}
	return w
}

func (w *watch) close() {
	w.cancel()
	w.work.Wait()
}

func rest(ctx context.Context, err error, every time.Duration) {
	if err != nil {
		every = max(every, watchLost)
	}
	_ = pause.For(ctx, every) // ends with ctx, as the loops do
}

func (w *watch) askStatus(ctx context.Context, p clusterfile.Process) {
	for ctx.Err() == nil {
		asked := w.clock.Now()
		st, err := w.admin.ServerStatus(ctx, p)
		w.take(p.Region, asked, w.clock.Now(), st, err)
		rest(ctx, err, statusEvery)
	}
}

// askAlive asks a process for what it answers whether or not its region can
// decide.
func (w *watch) askAlive(ctx context.Context, p clusterfile.Process) {
	for ctx.Err() == nil {
		var peers []*pb.PeerReport
		var err error
		if p.Role == clusterfile.RoleRegion {
			_, err = w.admin.DescribeServer(ctx, p)
		} else {
			var d *pb.DescribeVoterResponse
			d, err = w.admin.DescribeVoter(ctx, p)
			peers = d.GetPeers()
		}
		now := w.clock.Now()
		w.mu.Lock()
		if refused := (*admin.Refused)(nil); err == nil || errors.As(err, &refused) {
			w.heard[p.Name] = append(w.heard[p.Name], now)
		}
		if err == nil {
			w.sample(now, p.Name, peers)
		}
		w.mu.Unlock()
		rest(ctx, err, aliveEvery)
	}
}

// sample notes what an observer says of the regions. Called under mu.
func (w *watch) sample(now instant.Instant, observer string, peers []*pb.PeerReport) {
	if now.Sub(w.sampled[observer]) < sampleEvery || len(w.samples) > maxKept {
		return
	}
	w.sampled[observer] = now
	for _, p := range peers {
		w.samples = append(w.samples, sample{now, observer, p.GetRegion(), p.GetPhi(), time.Duration(p.GetSilentNs()), p.GetVerdict()})
	}
}

func (w *watch) take(region string, asked, answered instant.Instant, st *pb.StatusResponse, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		w.latest[region] = st
		w.heard[region] = append(w.heard[region], answered)
		a := check.Answer{Region: region, Asked: asked, Answered: answered, Term: st.GetTerm(), Restarts: st.GetCampaignRestarts()}
		for _, p := range st.GetPartitions() {
			a.Says = append(a.Says, check.Said{
				Partition: p.GetName(), Epoch: uint64(p.GetEpoch()), Left: time.Duration(p.GetHeldNs()),
				Released: p.GetTransfer().GetStage() == pb.TransferStage_TRANSFER_STAGE_RELEASING || p.GetRegister().GetValue().GetOwner() == "",
			})
			w.trace(region, p)
		}
		if w.full = len(w.answers) > maxKept; !w.full {
			w.answers = append(w.answers, a)
			w.ledger.Observe(a)
		}
		if answered.Sub(w.sampled[region]) >= sampleEvery {
			for _, t := range st.GetRoundTrips() {
				w.rtts = append(w.rtts, roundTrip{answered, region, t.GetPeer(), time.Duration(t.GetRttNs())})
			}
		}
		w.sample(answered, region, st.GetPeers())
	}
	close(w.changed)
	w.changed = make(chan struct{})
}

// owner returns the newest claim to a partition.
func (w *watch) owner(partition string) (check.Claim, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c, ok := w.ledger.Owners[partition]
	return c, ok
}

// owners returns all of them.
func (w *watch) owners() map[string]check.Claim {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.ledger.Owners)
}

// leader returns the server that leads a region by its newest status.
func (w *watch) leader(region string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.latest[region].GetLeader()
}

// longestRTT is the longest round trip that any region has measured.
func (w *watch) longestRTT() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	var longest time.Duration
	for _, r := range w.rtts {
		longest = max(longest, r.rtt)
	}
	return longest
}

// silence is the longest that an observer had not heard a region, by what it
// said in a span.
func (w *watch) silence(observer, region string, from, until instant.Instant) (longest time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.samples {
		if s.observer == observer && s.region == region && s.at > from && s.at <= until {
			longest = max(longest, s.silent)
		}
	}
	return longest
}

// rtt is the longest round trip that a region measured to a process in a span;
// 0: none.
func (w *watch) rtt(region string, to []string, from, until instant.Instant) (longest time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.rtts {
		if r.from == region && slices.Contains(to, r.to) && r.at > from && r.at <= until {
			longest = max(longest, r.rtt)
		}
	}
	return longest
}

// beganAnew reports whether a region's leader gave up what it held, or another
// one led, between the last answer before a span and one within it.
func (w *watch) beganAnew(region string, from, until instant.Instant) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	var before check.Answer
	for _, a := range w.answers {
		switch {
		case a.Region != region:
		case a.Answered <= from:
			before = a
		case a.Asked <= until && before.Term != 0 && (a.Term > before.Term || a.Restarts > before.Restarts):
			return true
		}
	}
	return false
}

// heardIn counts the answers of a process in a span.
func (w *watch) heardIn(name string, from, until instant.Instant) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, at := range w.heard[name] {
		if at > from && at <= until {
			n++
		}
	}
	return n
}

// await waits until good is true of what is known; it is called with every
// answer and must not block.
func (w *watch) await(ctx context.Context, limit time.Duration, what string, good func(l *check.Ledger, latest map[string]*pb.StatusResponse) bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not within %v", limit))
	defer cancel()
	for {
		w.mu.Lock()
		ok, changed := good(&w.ledger, w.latest), w.changed
		w.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, errors.Join(errNotSeen, context.Cause(ctx)))
		case <-changed:
		}
	}
}

// errNotSeen: what a drill waits for did not happen in time.
var errNotSeen = errors.New("not seen")

// trace logs what a region that holds a partition not does about it, for whoever
// wonders why a promotion took long. Called under mu.
func (w *watch) trace(region string, p *pb.PartitionStatus) {
	key := [2]string{region, p.GetName()}
	if said := p.GetActivity(); p.GetHeldNs() == 0 && said != w.said[key] {
		w.said[key] = said
		w.log.Debug("activity", "region", region, "partition", p.GetName(), "epoch", p.GetEpoch(), "says", said,
			"promised", p.GetRegister().GetPromised(), "accepted", p.GetRegister().GetAccepted())
	}
}

func alive(v pb.Verdict) bool { return v == pb.Verdict_VERDICT_HEALTHY || v == pb.Verdict_VERDICT_SLOW }

func peer(st *pb.StatusResponse, region string) *pb.PeerReport {
	for _, p := range st.GetPeers() {
		if p.GetRegion() == region {
			return p
		}
	}
	return nil
}
