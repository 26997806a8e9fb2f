package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	cluster "github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/drill/agent"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
)

const (
	defaultDevDir = ".headlease-dev"
	readyTimeout  = time.Minute
	stopTimeout   = 15 * time.Second
)

func newDevCmd(a *app) *cobra.Command {
	var o devOptions
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run a whole cluster on this machine",
		Long: `Dev runs a cluster of child processes on loopback: 3 regions of 3 servers and 3
witnesses, with the delays of a wide area network between them, certificates of
its own, a log file per process, and DIR/dev.json with every pid, address and
certificate, for scripts. It runs until it is interrupted and then stops them all.

A second start on the same directory goes on with the same data.`,
		Example: `  headlease dev --wait-ready
  headlease dev --regions 2 --rtt 80ms --dir /tmp/two
  headlease dev logs eu-frankfurt-1
  headlease status -f .headlease-dev/cluster.yaml --certs .headlease-dev/certs`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runDev(cmd.Context(), a, o) },
	}
	o.flags(cmd)
	cmd.AddCommand(newDevLogsCmd(a))
	return cmd
}

// devOptions are the flags that shape a development cluster.
type devOptions struct {
	dir                         string
	regions, servers, witnesses int
	d                           time.Duration
	rtt                         string
	redis                       bool
	waitReady                   bool
}

func (o *devOptions) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.dir, "dir", defaultDevDir, "directory of the cluster's data, logs and certificates")
	f.IntVar(&o.regions, "regions", 0, fmt.Sprintf("how many regions, 1 to %d (default %d)", devcluster.MaxRegions, devcluster.DefaultRegions))
	f.IntVar(&o.servers, "servers", 0, fmt.Sprintf("how many servers in each region: 1, 3 or 5 (default %d)", devcluster.DefaultServers))
	f.IntVar(&o.witnesses, "witnesses", 0, fmt.Sprintf("how many witnesses, odd, 1 to %d (default %d)", devcluster.MaxWitnesses, devcluster.DefaultWitnesses))
	f.DurationVar(&o.d, "d", 0, "length of head leases, 1s to 60s (default 4s)")
	f.StringVar(&o.rtt, "rtt", "default", `round trips between sites: "default" (a plausible planet), "off", one for all ("80ms"), or pairs ("A/B=30ms,…")`)
	f.BoolVar(&o.redis, "redis", false, "a lease cache for each region, on a redis-server of its own (found in PATH)")
	f.BoolVar(&o.waitReady, "wait-ready", false, "print how long it took until every partition had an owner")
}

func (o *devOptions) options(a *app) (devcluster.Options, error) {
	log, err := a.logger()
	if err != nil {
		return devcluster.Options{}, err
	}
	matrix, err := devcluster.ParseMatrix(o.rtt)
	if err != nil {
		return devcluster.Options{}, fmt.Errorf("--rtt: %w", err)
	}
	return devcluster.Options{
		Dir: o.dir, Regions: o.regions, Servers: o.servers, Witnesses: o.witnesses, D: o.d, RTT: matrix, Redis: o.redis,
		Logger: log, Ready: initAndWait,
	}, nil
}

// initAndWait sets a development cluster up, which on an old one changes
// nothing, and waits until every partition has an owner.
func initAndWait(ctx context.Context, c *devcluster.Cluster) (err error) {
	adm, closeAdmin, err := devAdmin(c.File(), c.Dir())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAdmin()) }()
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not ready after %v", readyTimeout))
	defer cancel()
	if _, err := adm.Init(ctx, func(string) {}); err != nil {
		return err
	}
	return adm.WaitOwned(ctx)
}

// devAdmin is a development cluster as its admin reaches it.
func devAdmin(f clusterfile.File, dir string) (*cluster.Cluster, func() error, error) {
	l, err := devLinks(f.Cluster, dir, admin())
	if err != nil {
		return nil, nil, err
	}
	c := cluster.New(f, l)
	return c, func() error { return errors.Join(c.Close(), l.Close()) }, nil
}

func devLinks(name, dir string, id pki.Identity) (*link.Links, error) {
	id.Cluster = name
	creds, err := pki.Load(pki.LoadConfig{Dir: filepath.Join(dir, "certs"), Want: id})
	if err != nil {
		return nil, err
	}
	return link.New(link.Config{Identity: id, Credentials: creds})
}

func runDev(ctx context.Context, a *app, o devOptions) (err error) {
	options, err := o.options(a)
	if err != nil {
		return err
	}
	c, err := devcluster.New(options)
	if err != nil {
		return err
	}
	defer func() {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		err = errors.Join(err, c.Stop(stop))
	}()
	began := time.Now()
	if err := c.Start(ctx); err != nil {
		if ctx.Err() != nil {
			return nil // interrupted while it started
		}
		return err
	}
	if o.waitReady {
		if err := a.printf("ready after %.1f s\n", time.Since(began).Seconds()); err != nil {
			return err
		}
	}
	if err := a.printf(`cluster %s runs: %d processes, see %s
  headlease status -f %[4]s/cluster.yaml --certs %[4]s/certs
  headlease acquire -f %[4]s/cluster.yaml --certs %[4]s/certs lock/hello --hold
  headlease drill run cable-cut -f %[4]s/cluster.yaml --certs %[4]s/certs --i-am-allowed-to-break %[1]s
Ctrl-C stops it.
`, c.File().Cluster, len(c.State().Processes), filepath.Join(o.dir, "dev.json"), o.dir); err != nil {
		return err
	}
	return serveDevAgent(ctx, a, c)
}

// serveDevAgent lets drills of this machine's admin signal and start the
// cluster's processes, until ctx ends.
func serveDevAgent(ctx context.Context, a *app, c *devcluster.Cluster) (err error) {
	log, err := a.logger()
	if err != nil {
		return err
	}
	// With the certificate of one of its processes: it is a server of the cluster.
	p := c.File().Processes()[0]
	l, err := devLinks(c.File().Cluster, c.Dir(), pki.Identity{Role: pki.Role(p.Role), Region: p.Region, Name: p.Name})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	return agent.Serve(ctx, l, "127.0.0.1:0", agent.DevHost{Cluster: c}, log, func(address string) {
		if err := c.SetAgent(&devcluster.Agent{Name: p.Name, Address: address}); err != nil {
			log.Error("drills cannot find the agent", "error", err)
		}
	})
}

func newDevLogsCmd(a *app) *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:     "logs NAME",
		Short:   "Print the log of one process of a development cluster",
		Example: `  headlease dev logs w-london`,
		Args:    usage(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error {
			st, err := devcluster.ReadState(dir)
			if err != nil {
				return err
			}
			p, ok := st.Process(args[0])
			if !ok {
				var names []string
				for _, p := range st.Processes {
					names = append(names, p.Name)
				}
				return fmt.Errorf("process %q is not in this cluster; it has %s", args[0], strings.Join(names, ", "))
			}
			file, err := os.Open(p.Log)
			if err != nil {
				return err
			}
			_, err = io.Copy(a.stdout, file)
			return errors.Join(err, file.Close())
		},
	}
	cmd.Flags().StringVar(&dir, "dir", defaultDevDir, "directory of the cluster")
	return cmd
}
