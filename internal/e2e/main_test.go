package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/internal/clusterclient"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
)

var seed = flag.Uint64("seed", 1, "seed of the random scenarios")

// binary is headlease, built once from this very tree.
var binary string

func TestMain(m *testing.M) {
	if raw := os.Getenv(scaleVar); raw != "" {
		if err := scaleClient(raw); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if raw := os.Getenv(pinVar); raw != "" {
		if err := pinWorker(raw); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "headlease-e2e")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	binary = filepath.Join(dir, "headlease")
	build := exec.Command("go", "build", "-o", binary, "../../cmd/headlease")
	if !strings.Contains(os.Getenv("GOFLAGS"), "-tags") { // make's are what is built already
		build.Env = append(os.Environ(), "GOFLAGS=-tags=hashicorpmetrics")
	}
	build.Stdout, build.Stderr = os.Stderr, os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "build headlease:", err)
		return 1
	}
	return m.Run()
}

// cluster is a running development cluster.
type cluster struct {
	*devcluster.Cluster
	t     testing.TB
	admin *admin.Cluster
	links *link.Links
}

const (
	startTimeout = 90 * time.Second
	stepTimeout  = 30 * time.Second
)

// start runs a cluster in dir until the test ends.
func start(t testing.TB, o devcluster.Options) *cluster {
	t.Helper()
	return startWith(t, o, func(f clusterfile.File) clusterfile.File { return f })
}

// startWith is start with an init that is given another cluster file.
func startWith(t testing.TB, o devcluster.Options, initial func(clusterfile.File) clusterfile.File) *cluster {
	t.Helper()
	c := &cluster{t: t}
	o.Binary, o.Logger = binary, slog.New(slog.DiscardHandler)
	if o.Dir == "" {
		o.Dir = filepath.Join(t.TempDir(), "dev")
	}
	o.Ready = func(ctx context.Context, d *devcluster.Cluster) error {
		id := pki.Identity{Cluster: d.File().Cluster, Role: pki.RoleAdmin}
		creds, err := pki.Load(pki.LoadConfig{Dir: filepath.Join(d.Dir(), "certs"), Want: id})
		if err != nil {
			return err
		}
		if c.links, err = link.New(link.Config{Identity: id, Credentials: creds, Logger: o.Logger}); err != nil {
			return err
		}
		c.admin = admin.New(d.File(), c.links)
		first := admin.New(initial(d.File()), c.links)
		_, err = first.Init(ctx, func(string) {})
		if err := errors.Join(err, first.Close()); err != nil {
			return err
		}
		return c.admin.WaitOwned(ctx)
	}
	d, err := devcluster.New(o)
	if err != nil {
		t.Fatal(err)
	}
	c.Cluster = d
	t.Cleanup(c.stop)
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	if err := d.Start(ctx); err != nil {
		c.dump()
		t.Fatal(err)
	}
	return c
}

// stop ends the processes in order; a second call does nothing.
func (c *cluster) stop() {
	if c.t.Failed() {
		c.dump()
	}
	if c.admin != nil {
		_ = c.admin.Close()
		_ = c.links.Close()
		c.admin = nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
	defer cancel()
	if err := c.Stop(ctx); err != nil {
		c.t.Error("stop:", err)
	}
}

// dump logs the end of every process's log.
func (c *cluster) dump() {
	for _, p := range c.State().Processes {
		raw, err := os.ReadFile(p.Log)
		if err != nil {
			continue
		}
		if len(raw) > 6000 {
			raw = raw[len(raw)-6000:]
		}
		c.t.Logf("---- %s (running %v)\n%s", p.Name, p.Running, raw)
	}
}

// clientLinks are links with a client's certificate, closed when the test ends.
func (c *cluster) clientLinks() *link.Links {
	c.t.Helper()
	id := pki.Identity{Cluster: c.File().Cluster, Role: pki.RoleClient, Name: devcluster.DefaultClient}
	creds, err := pki.Load(pki.LoadConfig{Dir: filepath.Join(c.Dir(), "certs"), Want: id})
	if err != nil {
		c.t.Fatal(err)
	}
	l, err := link.New(link.Config{Identity: id, Credentials: creds, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = l.Close() })
	return l
}

// client returns a client of the cluster, closed when the test ends.
func (c *cluster) client(home string, ttl time.Duration) *client.Client {
	c.t.Helper()
	return c.newClient(client.Config{Home: home, Links: c.clientLinks(), TTL: ttl})
}

// newClient returns a client of the cluster's regions, closed when the test ends.
func (c *cluster) newClient(cfg client.Config) *client.Client {
	c.t.Helper()
	if cfg.Regions == nil {
		cfg.Regions = clusterclient.Regions(c.File())
	}
	cl, err := client.New(cfg)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = cl.Close(ctx) // the cluster may be gone
	})
	return cl
}

// within is a context for one step of a test.
func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), d, fmt.Errorf("the step took longer than %v", d))
	t.Cleanup(cancel)
	return ctx
}

// leader is the name of a region's leader.
func (c *cluster) leader(region string) string {
	c.t.Helper()
	ctx := within(c.t, stepTimeout)
	for {
		if st, err := c.admin.RegionStatus(ctx, region); err == nil && st.GetLeader() != "" {
			return st.GetLeader()
		}
		select {
		case <-ctx.Done():
			c.t.Fatalf("region %s has no leader: %v", region, context.Cause(ctx))
		case <-time.After(50 * time.Millisecond):
		}
	}
}
