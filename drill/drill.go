package drill

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/drill/report"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/devcluster"
)

// Options of a drill.
type Options struct {
	// Dir must be new or empty, and is kept. Empty: a temporary directory,
	// removed unless Keep is set or the drill did not pass.
	Dir  string
	Keep bool
	// D is the length of head leases of a private cluster; 0: the scenario's.
	D time.Duration
	// RTT between the sites of a private cluster; nil: the scenario's.
	RTT *devcluster.Matrix
	// Namespaces puts each site of a private cluster into a network namespace
	// of its own, and cuts links by packet filters between them (internal/netns).
	Namespaces bool
	// Seed chooses locks, followers, the order of kills; 0: any.
	Seed uint64
	// Binary is the headlease executable; default the running one.
	Binary string
	// Running is the cluster to break; nil: a private one.
	Running *Running
	// Ready as `headlease dev` has it, for a private cluster.
	Ready func(ctx context.Context, c *devcluster.Cluster) error
	// Connect makes the connections to a cluster whose certificates are in a
	// directory: the admin's, and those of a client of the name.
	Connect func(f clusterfile.File, certs, client string) (*Connections, error)
	// Progress gets lines for people while the drill runs; nil: nobody reads.
	Progress io.Writer
	// Live gets the state of the drill several times a second; nil: nobody
	// looks. It must not block.
	Live func(Live)
}

// Running is a cluster that runs already, which a drill may break.
type Running struct {
	File clusterfile.File
	// Config is the path of the cluster file, Certs the directory of the
	// certificates, Client the name of the client's.
	Config, Certs, Client string
	// Processes signals and starts them; nil: nobody can.
	Processes Processes
	// OneMachine: all processes share this machine's clocks.
	OneMachine bool
}

// Connections to a cluster.
type Connections struct {
	Admin *admin.Cluster
	Links client.Links
	Close func() error
}

func (o Options) withDefaults() Options {
	for o.Seed == 0 {
		o.Seed = uint64(rand.Uint32())
	}
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	if o.Live == nil {
		o.Live = func(Live) {}
	}
	return o
}

// Validate reports all faults at once.
func (o Options) Validate() error {
	var errs []error
	if o.D != 0 && (o.D < clusterfile.MinD || o.D > clusterfile.MaxD) {
		errs = append(errs, fmt.Errorf("d: %v; use %v to %v", o.D, clusterfile.MinD, clusterfile.MaxD))
	}
	if o.Running != nil && (o.D != 0 || o.RTT != nil) {
		errs = append(errs, errors.New("d, rtt: a running cluster has its own; leave them out"))
	}
	if o.Running != nil && o.Namespaces {
		errs = append(errs, errors.New("netns: a running cluster is where it is; leave it out"))
	}
	if o.Connect == nil || o.Running == nil && o.Ready == nil {
		errs = append(errs, errors.New("ready, connect: missing; a drill must set its cluster up"))
	}
	return errors.Join(errs...)
}

// progress tells people what happens. A write that fails (a closed terminal)
// does not end a drill.
func (o Options) progress(format string, args ...any) {
	_, _ = fmt.Fprintf(o.Progress, "  "+format+"\n", args...)
}

// Outcome of a drill.
type Outcome struct {
	Report *report.Report
	// Dir is where logs and data are; empty if they were removed.
	Dir string
}

// Run plays a scenario and stops everything that it started, also when ctx
// ends; faults that it set are healed then. The error says why the drill could
// not be played; what it found is in the report.
func Run(ctx context.Context, s plan.Scenario, o Options) (out Outcome, err error) {
	o = o.withDefaults()
	if err := o.Validate(); err != nil {
		return out, fmt.Errorf("drill: %w", err)
	}
	if o.D != 0 {
		s.Cluster.D = o.D
	}
	dir, err := makeDir(o.Dir)
	if err != nil {
		return out, err
	}
	_, _ = fmt.Fprintf(o.Progress, "%s: %s\n", s.Name, s.Summary)
	defer func() {
		interrupted := ctx.Err() != nil
		if o.Dir == "" && !o.Keep && (err == nil && out.Report.OK || interrupted) {
			err = errors.Join(err, os.RemoveAll(dir))
			return
		}
		out.Dir = dir
		if err != nil {
			err = fmt.Errorf("%w; logs and data are in %s", err, dir)
		}
	}()
	log, closeLog, err := openLog(dir)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, closeLog()) }()
	r, err := openRig(ctx, dir, s, o, log)
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	if err != nil {
		return out, err
	}
	out.Report, err = r.play(ctx, s)
	return out, err
}

// play plays the scenario, and its control run if it has one.
func (r *rig) play(ctx context.Context, s plan.Scenario) (*report.Report, error) {
	began := time.Now()
	main, err := r.once(ctx, s, false)
	if err != nil {
		return nil, err
	}
	out := main.report(s, began)
	if !s.Control {
		return out, nil
	}
	r.o.progress("once more with the resource's guard off: there the late write must get through")
	control, err := r.once(ctx, s, true)
	if err != nil {
		return nil, err
	}
	out.AddControl(control.report(s, began))
	return out, nil
}

func openLog(dir string) (*slog.Logger, func() error, error) {
	f, err := os.Create(dir + "/" + drillLog)
	if err != nil {
		return nil, nil, err
	}
	return slog.New(slog.NewTextHandler(f, &slog.HandlerOptions{Level: slog.LevelDebug})), f.Close, nil
}
