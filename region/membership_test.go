package region_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	"github.com/headlease/headlease/region"
)

// group is a region without witnesses in this process, in plain text on
// loopback. Of its servers, all in the cluster file, some run.
type group struct {
	t       *testing.T
	dir     string
	file    clusterfile.File
	admin   *admin.Cluster
	running map[string]*server
}

type server struct {
	cancel context.CancelFunc
	done   chan error
}

const patience = 30 * time.Second

// newGroup has n servers, eu-1 and so on, of which none runs.
func newGroup(t *testing.T, n int) *group {
	t.Helper()
	g := &group{t: t, dir: t.TempDir(), running: map[string]*server{}}
	g.file = clusterfile.File{
		Cluster: "test", D: time.Second, Shards: 4, Timing: "calm", AllowEvenWitnesses: true, Regions: []clusterfile.Region{{Name: "eu"}},
		Partitions: []clusterfile.Partition{{Name: "all", Shards: []clusterfile.ShardRange{{First: 0, Last: 3}}, Prefer: []string{"eu"}}},
	}
	for i := range n {
		var a []string
		for range 4 {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = ln.Close() }()
			a = append(a, ln.Addr().String())
		}
		g.file.Regions[0].Servers = append(g.file.Regions[0].Servers,
			clusterfile.Server{Name: fmt.Sprintf("eu-%d", i+1), API: a[0], Votes: a[1], Raft: a[2], Gossip: a[3]})
	}
	links, err := link.New(link.Config{Identity: pki.Identity{Cluster: "test", Role: pki.RoleAdmin}, Insecure: true})
	if err != nil {
		t.Fatal(err)
	}
	g.admin = admin.New(g.file, links)
	t.Cleanup(func() {
		for name := range g.running {
			if err := g.stop(name); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		_ = g.admin.Close()
		_ = links.Close()
	})
	return g
}

// only is the cluster file with the first n servers.
func (g *group) only(n int) *admin.Cluster {
	f := g.file
	f.Regions = []clusterfile.Region{{Name: "eu", Servers: g.file.Regions[0].Servers[:n]}}
	links, err := link.New(link.Config{Identity: pki.Identity{Cluster: "test", Role: pki.RoleAdmin}, Insecure: true})
	if err != nil {
		g.t.Fatal(err)
	}
	c := admin.New(f, links)
	g.t.Cleanup(func() {
		_ = c.Close()
		_ = links.Close()
	})
	return c
}

func (g *group) start(name string, change ...func(*region.Config)) {
	g.t.Helper()
	cl, err := clock.NewSystem()
	if err != nil {
		g.t.Fatal(err)
	}
	c := region.Config{
		File: g.file, Name: name, DataDir: filepath.Join(g.dir, name), Insecure: true, Clock: cl, Version: "test",
		Logger: slog.New(slog.DiscardHandler),
	}
	for _, f := range change {
		f(&c)
	}
	s, err := region.New(g.t.Context(), c)
	if err != nil {
		g.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &server{cancel, make(chan error, 1)}
	go func() { r.done <- s.Run(ctx) }()
	g.running[name] = r
}

func (g *group) stop(name string) error {
	r := g.running[name]
	delete(g.running, name)
	r.cancel()
	return <-r.done
}

// ends waits until a server has ended by itself.
func (g *group) ends(name string) error {
	g.t.Helper()
	r := g.running[name]
	select {
	case err := <-r.done:
		delete(g.running, name)
		r.cancel()
		return err
	case <-time.After(patience):
		g.t.Fatalf("%s goes on", name)
		return nil
	}
}

func (g *group) within(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(g.t.Context(), d)
	g.t.Cleanup(cancel)
	return ctx
}

// list is the group as its leader tells it, once it has one.
func (g *group) list() admin.RegionServers {
	g.t.Helper()
	ctx := g.within(patience)
	for {
		l := g.admin.ListServers(ctx, "eu")[0]
		if l.Err == nil {
			return l
		}
		if ctx.Err() != nil {
			g.t.Fatal(l.Err)
		}
		<-time.After(50 * time.Millisecond)
	}
}

// TestTheLevelRisesWhenEveryServerKnowsIt: one older program holds it back,
// also while it does not answer; once it has risen, an older program neither
// joins nor goes on, and says why.
func TestTheLevelRisesWhenEveryServerKnowsIt(t *testing.T) {
	older := func(c *region.Config) { c.MaxLevel = 1 }
	g := newGroup(t, 4)
	g.start("eu-1")
	g.start("eu-2")
	g.start("eu-3", older)
	if _, err := g.only(3).Init(g.within(patience), func(string) {}); err != nil {
		t.Fatal(err)
	}
	held := func(what string) {
		t.Helper()
		for until := time.Now().Add(5 * time.Second); time.Now().Before(until); <-time.After(200 * time.Millisecond) {
			if level := g.list().List.GetFeatureLevel(); level != 1 {
				t.Fatalf("%s: the level is %d", what, level)
			}
		}
	}
	held("an older server is in the group")
	if err := g.stop("eu-3"); err != nil {
		t.Fatal(err)
	}
	held("an older server does not answer")
	g.start("eu-3")
	for until := time.Now().Add(patience); g.list().List.GetFeatureLevel() != 3; <-time.After(100 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("all know level 3, and it is not raised: %v", g.list().List)
		}
	}

	g.start("eu-4", older, func(c *region.Config) { c.Join = true })
	const text = "the region uses feature level 3 and this program knows level 1; start a newer program"
	if err := g.ends("eu-4"); err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("an older server joins: %v", err)
	}
	if err := g.stop("eu-3"); err != nil {
		t.Fatal(err)
	}
	g.start("eu-3", older)
	if err := g.ends("eu-3"); err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("an older server goes on: %v", err)
	}
	if n := len(g.list().List.GetMembers()); n != 3 {
		t.Errorf("%d members", n)
	}
	g.start("eu-3")
}

// TestFromOneServerToThreeAndBack: each step is a command of its own, done
// twice; the leader is removed, too.
func TestFromOneServerToThreeAndBack(t *testing.T) {
	g := newGroup(t, 3)
	joining := func(c *region.Config) { c.Join = true }
	g.start("eu-1")
	if _, err := g.only(1).Init(g.within(patience), func(string) {}); err != nil {
		t.Fatal(err)
	}
	ctx := g.within(3 * patience)
	for i, want := range []string{"2 voters, an even number", ""} {
		name := fmt.Sprintf("eu-%d", i+2)
		g.start(name, joining)
		for range 2 {
			warning, err := g.admin.AddServer(ctx, name, func(admin.Progress) {})
			if err != nil || (warning == "") != (want == "") || !strings.Contains(warning, want) {
				t.Fatalf("add %s: %q, %v", name, warning, err)
			}
		}
	}
	l := g.list().List
	if len(l.GetMembers()) != 3 {
		t.Fatalf("%v", l)
	}
	for _, m := range l.GetMembers() {
		if !m.GetVoter() || !m.GetLive() || m.GetFeatureLevel() == 0 {
			t.Errorf("%v", m)
		}
	}
	var leader string
	for _, m := range l.GetMembers() {
		if m.GetLeader() {
			leader = m.GetName()
		}
	}
	if _, _, err := g.admin.RemoveServer(ctx, "eu", leader, "", false, func(string) {}); err == nil || !strings.Contains(err.Error(), "survive no loss") {
		t.Errorf("three become two without force: %v", err)
	}
	handed := false
	already, warning, err := g.admin.RemoveServer(ctx, "eu", leader, "", true, func(string) { handed = true })
	if err != nil || already || !handed || !strings.Contains(warning, "2 voters") {
		t.Errorf("remove the leader: already %v, handed over %v, %q, %v", already, handed, warning, err)
	}
	if already, _, err := g.admin.RemoveServer(ctx, "eu", leader, "", true, func(string) {}); err != nil || !already {
		t.Errorf("again: already %v, %v", already, err)
	}
	// The removed one stays away, though it was started with --join once.
	<-time.After(3 * time.Second)
	if n := len(g.list().List.GetMembers()); n != 2 {
		t.Errorf("%d members", n)
	}
	_, err = g.admin.AddServer(ctx, leader, func(admin.Progress) {})
	if err == nil || !strings.Contains(err.Error(), "no member of") {
		t.Errorf("add it again with its old data: %v", err)
	}
	if _, err := g.admin.ReplaceServer(ctx, "eu-9", "eu-8", false, func(string) {}, func(admin.Progress) {}); err == nil || !strings.Contains(err.Error(), "not a region server of the cluster file") {
		t.Errorf("replace by a stranger: %v", err)
	}
}
