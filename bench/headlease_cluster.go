package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
)

const (
	headleaseClient  = "bench"
	headleaseServers = 3
	// portsPerServer: API, votes, Raft, gossip.
	portsPerServer = 4
)

// headleaseCluster is what one region and three have in common: a cluster file,
// its certificates, server processes and an admin.
type headleaseCluster struct {
	root  string
	file  clusterfile.File
	links *link.Links // the admin's
	admin *admin.Cluster
	procs []*Proc
}

func (c *headleaseCluster) config() string { return filepath.Join(c.root, "cluster.yaml") }
func (c *headleaseCluster) certs() string  { return filepath.Join(c.root, "certs") }

// prepare writes the cluster file and its certificates into an empty directory.
func (c *headleaseCluster) prepare(ctx context.Context, env *Env, text string) error {
	c.root = filepath.Join(env.Root, "headlease"+env.Tag)
	if err := errors.Join(os.RemoveAll(c.root), os.MkdirAll(c.root, 0o755)); err != nil {
		return err
	}
	if err := os.WriteFile(c.config(), []byte(text), 0o644); err != nil {
		return err
	}
	var err error
	if c.file, _, err = clusterfile.Parse([]byte(text), nil); err != nil {
		return err
	}
	return run(ctx, *flagHeadlease, "certs", "-f", c.config(), "--out", c.certs(), "--client", headleaseClient)
}

// startServer starts a server in a network namespace, if one is named.
func (c *headleaseCluster) startServer(name, ns string) error {
	p, err := startProc(name, filepath.Join(c.root, name+".log"), ns, *flagHeadlease, "region",
		"-f", c.config(), "--name", name, "--data-dir", filepath.Join(c.root, name), "--certs", c.certs(), "--log-level", "warn")
	if err == nil {
		c.procs = append(c.procs, p)
	}
	return err
}

// initialise makes the started servers a cluster; before is what to run the
// command by.
func (c *headleaseCluster) initialise(ctx context.Context, dial DialCtx, before ...string) error {
	args := append(before, *flagHeadlease, "init", "-f", c.config(), "--certs", c.certs())
	if err := run(ctx, args[0], args[1:]...); err != nil {
		return err
	}
	var err error
	if c.links, err = c.newLinks(pki.Identity{Role: pki.RoleAdmin}, dial); err != nil {
		return err
	}
	c.admin = admin.New(c.file, c.links)
	return nil
}

func run(ctx context.Context, name string, args ...string) error {
	if out, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", filepath.Base(name), strings.Join(args, " "), err, out)
	}
	return nil
}

// newLinks for the owner of a certificate; dial may be nil.
func (c *headleaseCluster) newLinks(id pki.Identity, dial DialCtx) (*link.Links, error) {
	id.Cluster = c.file.Cluster
	creds, err := pki.Load(pki.LoadConfig{Dir: c.certs(), Want: id})
	if err != nil {
		return nil, err
	}
	return link.New(link.Config{Identity: id, Credentials: creds, Dial: dial, Logger: slog.New(slog.DiscardHandler)})
}

func (c *headleaseCluster) Stop() {
	if c.admin != nil {
		_ = c.admin.Close()
		_ = c.links.Close()
		c.admin = nil
	}
	for _, p := range c.procs {
		p.resume()
		p.kill()
	}
	c.procs = nil
}

func (c *headleaseCluster) Procs() []*Proc { return c.procs }

func (c *headleaseCluster) Restart(_ context.Context, i int) error { return c.procs[i].start() }

// headleaseVersion is the program's own word.
func headleaseVersion() string {
	out, _ := exec.Command(*flagHeadlease, "version").Output()
	return strings.TrimSpace(string(out))
}
