package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	cluster "github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/drill"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/drill/report"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/devcluster"
)

// exitInconclusive: a drill could not show what it was to show.
const exitInconclusive = 2

// drillRun is the flags of a drill.
type drillRun struct {
	drill.Options
	asJSON         bool
	rtt            string
	html, junit    string
	results        string
	tolerateStalls bool
	// Of a drill of a running cluster.
	allowed, as string
	agents      []string
}

func newDrillRunCmd(a *app) *cobra.Command {
	var o drillRun
	cmd := &cobra.Command{
		Use:   "run SCENARIO",
		Short: "Play a scenario and check what the cluster promised",
		Long: `Run starts a development cluster in a temporary directory, plays the scenario on
it (one that is shipped, by its name, or a file), stops it, and prints what it
found. The directory is kept when something is wrong, or with --keep.

With --config it breaks a running cluster instead, whose processes were started
with --drills, under the admin's certificate, and only if --i-am-allowed-to-break
names that cluster. What it will break is printed first. Every fault expires by
itself in the process that carries it; an interrupt heals all at once. Steps that
kill, stop or restart processes need 'headlease dev' or a drill agent on each
host (--agent); without, the drill is refused before its first step.

Exit codes: 0 everything held; 1 a violation, an expectation that was broken, or
the drill could not be played; 2 nothing was shown: what was to be broken did not
break, a process or a time was not seen, there was too little work, or the
machine itself stalled.`,
		Example: `  headlease drill run region-loss
  headlease drill run cable-cut --json
  headlease drill run region-isolated --html report.html --junit report.xml
  headlease drill run ./mine.yaml --d 4s --seed 7 --keep
  headlease drill run cable-cut -f cluster.yaml --certs certs --as worker --i-am-allowed-to-break prod
  headlease drill run region-loss -f cluster.yaml --certs certs --as worker --agent eu-1=10.1.0.1:7605 \\
    --agent us-1=10.2.0.1:7605 --i-am-allowed-to-break prod`,
		Args: usage(oneScenario),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("rtt") {
				m, err := devcluster.ParseMatrix(o.rtt)
				if err != nil {
					return &usageError{cmd.CommandPath(), fmt.Errorf("--rtt: %w", err)}
				}
				o.RTT = &m
			}
			s, err := scenario(args[0])
			if err != nil {
				return err
			}
			if cmd.Flags().Changed("config") || o.allowed != "" {
				var closeAgents func() error
				if o.Running, closeAgents, err = a.running(o.allowed, o.as, o.agents); err != nil {
					return err
				}
				return errors.Join(runDrill(cmd.Context(), a, s, o), closeAgents())
			}
			return runDrill(cmd.Context(), a, s, o)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.asJSON, "json", false, "print the report as one line of JSON, and progress to the standard error stream")
	f.StringVar(&o.html, "html", "", "write the report as one HTML file, with the timeline as a picture")
	f.StringVar(&o.junit, "junit", "", "write the report as JUnit XML")
	f.StringVar(&o.results, "results", "", "append a line to a file: time, scenario, seed, verdict, figures")
	f.StringVar(&o.Dir, "dir", "", "directory of the drill's cluster, new or empty; it is kept (default: a temporary one)")
	f.BoolVar(&o.Keep, "keep", false, "keep the temporary directory also when everything held")
	f.DurationVar(&o.D, "d", 0, "length of head leases, 1s to 60s (default: the scenario's)")
	f.StringVar(&o.rtt, "rtt", "default", "round trips between sites, as for 'headlease dev' (default: the scenario's)")
	f.BoolVar(&o.Namespaces, "netns", false, "put each site into a network namespace of its own and cut links by packet filters; root, under 'unshare --net'")
	f.Uint64Var(&o.Seed, "seed", 0, "chooses locks, followers, the order of kills (default: any, and printed)")
	f.StringVar(&o.allowed, "i-am-allowed-to-break", "", "name of the running cluster of --config, which the drill breaks")
	f.StringVar(&o.as, "as", devcluster.DefaultClient, "name in the client certificate of the drill's workers, on a running cluster")
	f.StringArrayVar(&o.agents, "agent", nil, "PROCESS=HOST:PORT of a drill agent of a running cluster; may be repeated")
	f.BoolVar(&o.tolerateStalls, "tolerate-stalls", false, "exit with 0 when nothing was shown for the only reason that this machine stalled")
	return cmd
}

func runDrill(ctx context.Context, a *app, s plan.Scenario, o drillRun) error {
	logRedis(slog.New(slog.DiscardHandler)) // a Redis that a drill takes down is no news
	o.Ready = initAndWait
	o.Connect = func(f clusterfile.File, certs, client string) (*drill.Connections, error) {
		return a.connect(f, certs, client)
	}
	progress := a.stdout
	if o.asJSON {
		progress = a.stderr
	}
	live := newLiveView(progress)
	o.Progress, o.Live = live, live.show
	out, err := drill.Run(ctx, s, o.Options)
	live.close()
	if err != nil {
		if ctx.Err() != nil {
			return errors.New("interrupted; everything that the drill started is stopped, and what it broke is healed")
		}
		return err
	}
	if o.asJSON {
		err = report.WriteJSON(a.stdout, out.Report)
	} else {
		err = out.Report.Render(a.stdout)
	}
	if err == nil && out.Dir != "" {
		_, err = fmt.Fprintf(o.Progress, "  logs and data are in %s\n", out.Dir)
	}
	err = errors.Join(err,
		writeReport(o.html, out.Report.WriteHTML),
		writeReport(o.junit, out.Report.WriteJUnit),
		appendResult(o.results, out.Report))
	r := out.Report
	switch {
	case err != nil:
		return err
	case r.Verdict == "inconclusive" && r.Stalled && o.tolerateStalls:
		_, err := fmt.Fprintf(a.stderr, "headlease: %s: NOTHING WAS SHOWN: the machine stalled; run it on a quieter one\n", s.Name)
		return err
	case r.Verdict == "inconclusive":
		return &exitError{exitInconclusive, fmt.Errorf("inconclusive: %s", r.Inconclusive[0])}
	case !r.OK:
		return &exitError{code: exitFailed}
	}
	return nil
}

// connect makes the connections of a drill: the admin's and a client's.
func (a *app) connect(f clusterfile.File, certs, client string) (*drill.Connections, error) {
	f.Certs = certs
	adm, err := a.links(f, admin())
	if err != nil {
		return nil, err
	}
	work, err := a.links(f, identity(client))
	if err != nil {
		return nil, errors.Join(err, adm.Close())
	}
	c := cluster.New(f, adm)
	return &drill.Connections{Admin: c, Links: work, Close: func() error { return errors.Join(c.Close(), adm.Close(), work.Close()) }}, nil
}

func writeReport(path string, write func(io.Writer) error) error {
	if path == "" {
		return nil
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return errors.Join(write(f), f.Close())
}

// appendResult adds one line about a drill to a file.
func appendResult(path string, r *report.Report) error {
	if path == "" {
		return nil
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("results: %w", err)
	}
	_, err = fmt.Fprintf(f, "%s\t%s\t%d\t%s\t%s\n", r.Began.Format(time.RFC3339), r.Scenario, r.Seed, r.Verdict, r.Figures())
	return errors.Join(err, f.Close())
}

func newDrillReportCmd(a *app) *cobra.Command {
	var html, junit string
	cmd := &cobra.Command{
		Use:   "report FILE",
		Short: "Make other forms of a drill's report from its JSON",
		Long: `Report reads what 'headlease drill run --json' printed ("-": from the standard
input) and writes it as HTML or JUnit XML.`,
		Example: `  headlease drill run cable-cut --json > report.json
  headlease drill report report.json --html report.html`,
		Args: usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if html == "" && junit == "" {
				return &usageError{cmd.CommandPath(), errors.New("say what to write: --html FILE, --junit FILE or both")}
			}
			r, err := readReport(a, args[0])
			if err != nil {
				return err
			}
			return errors.Join(writeReport(html, r.WriteHTML), writeReport(junit, r.WriteJUnit))
		},
	}
	cmd.Flags().StringVar(&html, "html", "", "write one HTML file, with the timeline as a picture")
	cmd.Flags().StringVar(&junit, "junit", "", "write JUnit XML")
	return cmd
}

// maxReport bounds what is read as a report.
const maxReport = 256 << 20

func readReport(a *app, path string) (_ *report.Report, err error) {
	in := a.in
	if in == nil {
		in = os.Stdin
	}
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("report: %w", err)
		}
		defer func() { _ = f.Close() }() // only read
		in = f
	}
	var r report.Report
	if err := json.NewDecoder(io.LimitReader(in, maxReport)).Decode(&r); err != nil {
		return nil, fmt.Errorf("report %s: %w; give the output of 'headlease drill run --json'", path, err)
	}
	if r.Scenario == "" || r.Verdict == "" {
		return nil, fmt.Errorf("report %s: is JSON, and no drill's report", path)
	}
	return &r, nil
}
