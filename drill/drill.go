package drill

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/drill/report"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/devcluster"
)

// DefaultD is the head leases' length in a drill: short, so that it is soon over,
// and long enough for twelve processes on two busy cores.
const DefaultD = 2 * time.Second

// Options of a drill.
type Options struct {
	// Dir must be new or empty, and is kept. Empty: a temporary directory,
	// removed unless Keep is set or the drill did not pass.
	Dir  string
	Keep bool
	// D is the length of head leases; default DefaultD.
	D   time.Duration
	RTT devcluster.Matrix
	// Seed chooses the locks, the order of the kills and the moment; 0: any.
	Seed uint64
	// Binary is the headlease executable; default the running one.
	Binary string
	// Ready and Admin as `headlease dev` has them.
	Ready func(ctx context.Context, c *devcluster.Cluster) error
	Admin func(f clusterfile.File, dir string) (*admin.Cluster, func() error, error)
	// Progress gets lines for people while the drill runs, and the timelines;
	// nil: nobody reads.
	Progress io.Writer
}

func (o Options) withDefaults() Options {
	if o.D == 0 {
		o.D = DefaultD
	}
	for o.Seed == 0 {
		o.Seed = uint64(rand.Uint32())
	}
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	return o
}

// Validate reports all faults at once.
func (o Options) Validate() error {
	var errs []error
	if o.D != 0 && (o.D < clusterfile.MinD || o.D > clusterfile.MaxD) {
		errs = append(errs, fmt.Errorf("d: %v; use %v to %v", o.D, clusterfile.MinD, clusterfile.MaxD))
	}
	if o.Ready == nil || o.Admin == nil {
		errs = append(errs, errors.New("ready, admin: missing; a drill must set its cluster up"))
	}
	return errors.Join(errs...)
}

// progress tells people what happens.
func (o Options) progress(format string, args ...any) {
	_, _ = fmt.Fprintf(o.Progress, "  "+format+"\n", args...)
}

// Result is what a scenario found; as JSON it is what `--json` prints.
type Result interface {
	Render(w io.Writer) error
}

// Outcome of a drill.
type Outcome struct {
	Result Result
	OK     bool
	// Inconclusive says why nothing was shown: what was to be broken did not
	// break. Empty: something was.
	Inconclusive string
	// Dir is where logs and data are; empty if they were removed.
	Dir string
}

// Scenario is a drill by its name.
type Scenario struct {
	Name, Summary string
	run           func(ctx context.Context, r *rig) (Outcome, error)
}

// Scenarios are all there are.
func Scenarios() []Scenario {
	return []Scenario{
		{"region-loss", "a region dies, the next one is promoted, and the late write of a frozen worker is refused", regionLoss},
		{"cable-cut", "two regions cannot see each other but both see the witnesses: nothing changes", cableCut},
	}
}

func find(name string) (Scenario, error) {
	var known []string
	for _, s := range Scenarios() {
		if s.Name == name {
			return s, nil
		}
		known = append(known, s.Name)
	}
	return Scenario{}, fmt.Errorf("scenario %q: there is none; use %s", name, strings.Join(known, " or "))
}

// Run plays a scenario on a cluster of its own and stops everything that it
// started, also when ctx ends. The error says why the drill could not be
// played; violations are in the outcome.
func Run(ctx context.Context, scenario string, o Options) (out Outcome, err error) {
	o = o.withDefaults()
	if err := o.Validate(); err != nil {
		return out, fmt.Errorf("drill: %w", err)
	}
	s, err := find(scenario)
	if err != nil {
		return out, err
	}
	dir, err := makeDir(o.Dir)
	if err != nil {
		return out, err
	}
	// Here and in progress: a write that fails (a closed terminal) does not end a drill.
	_, _ = fmt.Fprintf(o.Progress, "%s: %s\n", s.Name, s.Summary)
	o.progress("D %v, seed %d, in %s", o.D, o.Seed, dir)
	defer func() {
		interrupted := ctx.Err() != nil
		if o.Dir == "" && !o.Keep && (err == nil && out.OK || interrupted) {
			err = errors.Join(err, os.RemoveAll(dir))
			return
		}
		out.Dir = dir
		if err != nil {
			err = fmt.Errorf("%w; logs and data are in %s", err, dir)
		}
	}()
	r, err := openRig(ctx, dir, o)
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	if err != nil {
		return out, err
	}
	return s.run(ctx, r)
}

// show prints a timeline between the progress lines.
func (o Options) show(t report.Timeline) error {
	if _, err := fmt.Fprintln(o.Progress); err != nil {
		return err
	}
	return t.Render(o.Progress)
}
