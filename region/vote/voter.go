package vote

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/telemetry"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// Raft is what the voter needs of its region's replica.
type Raft interface {
	// ProposeUrgent commits one command and returns Apply's result.
	ProposeUrgent(ctx context.Context, cmd *pb.Command) (*pb.CommandResult, error)
	// Check is a leadership check begun after the call; it returns the term in
	// which it passed.
	Check(ctx context.Context) (term uint64, err error)
	// PulseFresh reports whether the disk of a quorum moves.
	PulseFresh(now instant.Instant) bool
	View() state.View
}

// Detector is the voter's own failure detector: a hint for V3.
type Detector interface {
	Verdict(region string) register.Verdict
}

// Config of a Voter. All fields but Logger are needed.
type Config struct {
	Region   string
	Raft     Raft
	Detector Detector
	Clock    clock.Clock
	// Registerer of the voter's metrics; may be nil.
	Registerer prometheus.Registerer
	Logger     *slog.Logger
	// NeverApplied reports whether a proposal's error means that the command
	// surely did not and will not take effect.
	NeverApplied func(error) bool
}

// Voter answers votes for a region while its server leads. It is safe for
// concurrent use.
type Voter struct {
	cfg     Config
	metrics *telemetry.Votes

	mu   sync.Mutex
	term uint64 // of the tables; 0: not leading
	conf *pb.ClusterConfiguration
	// stop, if set: the region met another era, and answers nothing [F16].
	stop *pb.EraStop
	regs map[string]register.Register
	// cleared is closed, and made anew, when promises' fates become known.
	cleared chan struct{}
}

// New returns a voter that does not lead yet.
func New(cfg Config) *Voter {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Voter{cfg: cfg, metrics: telemetry.NewVotes(cfg.Registerer), cleared: make(chan struct{})}
}

// Begin builds the tables of a term from the view at its first own entry. It
// is called from the FSM goroutine, before any Applied of that term.
func (v *Voter) Begin(term uint64, view state.View) {
	now := v.cfg.Clock.Now()
	regs := make(map[string]register.Register)
	for p := range view.Partitions() {
		regs[p.Name] = register.Restart(p.Register, now)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.term, v.conf, v.stop, v.regs = term, view.Configuration(), view.EraStop(), regs
}

// Deposed ends the tables of a term.
func (v *Voter) Deposed(term uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.term <= term {
		v.term, v.conf, v.stop, v.regs = 0, nil, nil, nil
	}
}

// Applied feeds the events of an applied entry, in order, from the FSM
// goroutine: a register's clock starts in the same step in which its new
// record becomes visible here.
func (v *Voter) Applied(events []state.Event) {
	now := v.cfg.Clock.Now()
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.term == 0 {
		return
	}
	for _, e := range events {
		switch e := e.(type) {
		case state.RegisterChanged:
			v.regs[e.Partition] = v.regs[e.Partition].Written(now, e.Record)
		case state.EraStopped:
			v.stop = e.Stop
		case state.EraBegun:
			v.stop = nil
		case state.Configured:
			v.conf = e.Configuration
			for _, p := range e.Configuration.GetPartitions() {
				if _, ok := v.regs[p.GetName()]; !ok {
					v.regs[p.GetName()] = register.Register{}
				}
			}
		}
	}
}

// ClockGap restarts the clocks of all registers at full D, as after a restart
// [F19].
func (v *Voter) ClockGap() {
	now := v.cfg.Clock.Now()
	v.mu.Lock()
	defer v.mu.Unlock()
	for name, r := range v.regs {
		r.Since = now
		v.regs[name] = r
	}
}

// ErrNotLeading is returned while this server does not lead its region or has
// not applied its first entry of the term.
var ErrNotLeading = errors.New("this server does not lead its region now; ask another one")

// errDeposed: the term ended while a message was being judged.
var errDeposed = errors.New("leadership was lost while voting; ask again")

// stamp is the version that goes into commands. At feature level 1, where there
// is only the first, servers may not know the field. v.mu is held.
func (v *Voter) stamp() uint64 {
	if version := v.conf.GetVersion(); version > 1 {
		return version
	}
	return 0
}

// enter returns the term, or why nothing is answered. v.mu is held.
func (v *Voter) enter(check func(*pb.ClusterConfiguration) error) (term uint64, err error) {
	if v.term == 0 {
		return 0, ErrNotLeading
	}
	if v.stop != nil {
		return 0, &config.StoppedError{Own: config.EraOf(v.conf), Stop: v.stop}
	}
	return v.term, check(v.conf)
}

// underVersion checks a message that has no header.
func underVersion(m interface {
	GetClusterId() string
	GetEra() *pb.Era
	GetVersion() uint64
}) func(*pb.ClusterConfiguration) error {
	return func(conf *pb.ClusterConfiguration) error {
		return config.CheckVersion(conf, m.GetClusterId(), register.EraOf(m.GetEra()), m.GetVersion())
	}
}

// Registers returns the leader's registers, or ErrNotLeading.
func (v *Voter) Registers() (map[string]register.Register, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.term == 0 {
		return nil, ErrNotLeading
	}
	out := make(map[string]register.Register, len(v.regs))
	for name, r := range v.regs {
		out[name] = r
	}
	return out, nil
}

// seen is the register with the record that a commit answered and the clock
// as it is here.
func (v *Voter) seen(name string, rec register.Record) register.Register {
	v.mu.Lock()
	defer v.mu.Unlock()
	r := v.regs[name]
	r.Record = rec
	return r
}

// State names this voter on an answer.
func (v *Voter) State(h *pb.VoteHeader) *pb.VoterState {
	view := v.cfg.Raft.View()
	return &pb.VoterState{
		Voter:  &pb.Voter{Id: "region/" + v.cfg.Region, Incarnation: uint64(view.Incarnation())},
		Round:  h.GetRound(),
		Writes: view.AppliedIndex(),
	}
}

// batch gathers the items of one message that need a commit.
type batch struct {
	index    []int
	names    []string
	promises []*pb.PromiseItem
	accepts  []*pb.AcceptedItem
	// version is the configuration's that the message was judged under.
	version uint64
}

func (b *batch) add(i int, name string) {
	b.index, b.names = append(b.index, i), append(b.names, name)
}

func itemsOf(res *pb.CommandResult, err error, n int) ([]*pb.ItemResult, error) {
	if err != nil {
		return nil, err
	}
	if res.GetError() != nil {
		return nil, errDeposed // the commands are well-formed, so only their term can be wrong
	}
	if got := len(res.GetItems().GetItems()); got != n {
		return nil, errors.New("internal: a command's result has another number of items")
	}
	return res.GetItems().GetItems(), nil
}
