package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	clusterload "github.com/headlease/headlease/internal/clusterfile/load"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/pki"
)

// cli runs headlease as an operator does.
func (c *cluster) cli(ctx context.Context, args ...string) (stdout, stderr string, err error) {
	cmd := exec.CommandContext(ctx, binary, append([]string{"-f", filepath.Join(c.Dir(), "cluster.yaml"), "--certs", filepath.Join(c.Dir(), "certs")}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// mustCLI is cli that has to succeed; it returns the standard output.
func (c *cluster) mustCLI(args ...string) string {
	c.t.Helper()
	out, errs, err := c.cli(within(c.t, startTimeout), args...)
	if err != nil {
		c.t.Fatalf("headlease %s: %v\n%s%s", strings.Join(args, " "), err, out, errs)
	}
	return out
}

// listed is a server in `server list --json`.
type listed struct {
	Name, Role, Problem string
	RaftID              string `json:"raft_id"`
	Live                bool
	Behind              uint64
	Version             string
}

func (c *cluster) servers() map[string]listed {
	c.t.Helper()
	ctx := within(c.t, stepTimeout)
	for {
		out, errs, err := c.cli(ctx, "server", "list", "--json")
		if err == nil {
			var regions []struct{ Servers []listed }
			if err := json.Unmarshal([]byte(out), &regions); err != nil || len(regions) != 1 {
				c.t.Fatalf("server list: %v\n%s", err, out)
			}
			all := map[string]listed{}
			for _, s := range regions[0].Servers {
				all[s.Name] = s
			}
			return all
		}
		select {
		case <-ctx.Done():
			c.t.Fatalf("server list: %v\n%s", err, errs)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// await waits until the servers are as they should be.
func (c *cluster) await(what string, ok func(map[string]listed) bool) {
	c.t.Helper()
	deadline := time.Now().Add(stepTimeout)
	for {
		s := c.servers()
		if ok(s) {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("not in time: %s; %+v", what, s)
		}
		<-time.After(200 * time.Millisecond)
	}
}

// joiner starts the named processes with --join.
type joiner map[string]bool

func (j joiner) args(p devcluster.Process) []string {
	args := devcluster.DefaultArgs(p)
	if j[p.Name] {
		args = append(args, "--join")
	}
	return args
}

func (c *cluster) wipe(name string) {
	c.t.Helper()
	p, ok := c.Process(name)
	if !ok {
		c.t.Fatalf("no process %s", name)
	}
	if err := os.RemoveAll(p.DataDir); err != nil {
		c.t.Fatal(err)
	}
}

// grants reports whether the region grants a lock within d.
func (c *cluster) grants(cl *client.Client, name string, d time.Duration) bool {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), d)
	defer cancel()
	_, err := cl.Acquire(ctx, "lock/"+name)
	if err != nil {
		c.t.Logf("lock/%s: %v", name, err)
	}
	return err == nil
}

// TestF3AWipedServerIsNobody: a follower whose data is gone comes back under its
// name. It does not vote and is not counted: with one more server down the
// region stands still, although two processes of three run. `server replace`
// brings it back, and then it counts.
func TestF3AWipedServerIsNobody(t *testing.T) {
	o := oneRegion()
	j := joiner{}
	o.Args = j.args
	c := start(t, o)
	cl := c.client("", 30*time.Second)
	leader := c.leader("eu-frankfurt")
	var followers []string
	for _, p := range c.File().RegionProcesses("eu-frankfurt") {
		if p.Name != leader {
			followers = append(followers, p.Name)
		}
	}
	wiped, other := followers[0], followers[1]
	before := c.servers()[wiped].RaftID
	if err := c.Kill(within(t, stepTimeout), wiped); err != nil {
		t.Fatal(err)
	}
	c.wipe(wiped)
	if err := c.StartProcess(wiped); err != nil {
		t.Fatal(err)
	}
	c.await("the wiped server is seen as another", func(s map[string]listed) bool {
		return !s[wiped].Live && s[wiped].RaftID == before && strings.Contains(s[wiped].Problem, "another data directory answers")
	})
	if !c.grants(cl, "two-of-three", stepTimeout) {
		t.Fatal("two servers of three grant nothing")
	}

	// Removing the healthy one would leave a group that cannot decide.
	_, errs, err := c.cli(within(t, stepTimeout), "server", "remove", other, "--force")
	if err == nil || !strings.Contains(errs, "too few to decide") || !strings.Contains(errs, wiped) {
		t.Errorf("remove of the last healthy follower: %v\n%s", err, errs)
	}

	if err := c.Kill(within(t, stepTimeout), other); err != nil {
		t.Fatal(err)
	}
	if c.grants(cl, "no-quorum", 3*c.File().D) {
		t.Error("granted with one server of three and one without its data")
	}
	if err := c.StartProcess(other); err != nil {
		t.Fatal(err)
	}
	if !c.grants(cl, "again", startTimeout) {
		t.Fatal("nothing is granted after the follower's return")
	}

	// With --join it asks, and is told what to do.
	if err := c.Kill(within(t, stepTimeout), wiped); err != nil {
		t.Fatal(err)
	}
	c.wipe(wiped)
	j[wiped] = true
	if err := c.StartProcess(wiped); err != nil {
		t.Fatal(err)
	}
	if _, errs, err := c.cli(within(t, stepTimeout), "server", "add", wiped); err == nil || !strings.Contains(errs, "headlease server replace "+wiped+" "+wiped) {
		t.Errorf("add of a wiped server: %v\n%s", err, errs)
	}
	c.mustCLI("server", "replace", wiped, wiped)
	s := c.servers()[wiped]
	if s.Role == "non-voter" || !s.Live || s.RaftID == before {
		t.Errorf("after the replacement: %+v, before %s", s, before)
	}
	c.mustCLI("server", "add", wiped) // done already
	if err := c.Kill(within(t, stepTimeout), other); err != nil {
		t.Fatal(err)
	}
	if !c.grants(cl, "counts-again", startTimeout) {
		t.Error("the server that was replaced does not count")
	}
}

// TestALeaderIsReplacedUnderLoad: a fourth server is put into the cluster file
// and started; the leader is replaced by it while workers hold and take locks.
// The operator's command is killed again and again and goes on each time.
func TestALeaderIsReplacedUnderLoad(t *testing.T) {
	c := start(t, oneRegion())
	held := hold(t, c.client("", 20*time.Second), 5)
	l := startLoad(t, []*client.Client{c.client("", 20*time.Second), c.client("", 20*time.Second)}, 2, *seed)
	l.progress(10, stepTimeout)
	old := c.leader("eu-frankfurt")
	const added = "eu-frankfurt-4"
	group := devcluster.NewGroup()
	t.Cleanup(func() { group.Stop(context.Background(), stepTimeout) })
	logFile := c.addServer(group, added)
	t.Cleanup(func() {
		if t.Failed() {
			raw, _ := os.ReadFile(logFile)
			t.Logf("---- %s\n%s", added, raw)
		}
	})
	c.await(added+" is a non-voter", func(s map[string]listed) bool { return s[added].Role == "non-voter" && s[added].Live })

	// Whatever was done when the command died is not done twice.
	runs := 0
	for patience := 20 * time.Millisecond; ; patience = patience * 3 / 2 {
		runs++
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		_, errs, err := c.cli(ctx, "server", "replace", old, added)
		killed := ctx.Err() != nil
		cancel()
		if err == nil {
			break
		}
		if !killed || patience > startTimeout {
			t.Fatalf("replace, run %d: %v\n%s", runs, err, errs)
		}
	}
	t.Logf("replaced in %d runs of the command", runs)
	s := c.servers()
	if s[added].Role == "non-voter" || !s[added].Live || s[old].Role == "voter" || s[old].Role == "leader" {
		t.Errorf("after the replacement: %+v", s)
	}
	l.progress(20, stepTimeout)
	stillHeld(t, "after the leader was replaced", held)
	if err := c.Kill(within(t, stepTimeout), old); err != nil {
		t.Fatal(err)
	}
	l.progress(10, stepTimeout)
	// The new server and one of the old ones are a quorum of three.
	for _, p := range c.File().RegionProcesses("eu-frankfurt") {
		if p.Name != old {
			if err := c.Kill(within(t, stepTimeout), p.Name); err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	l.progress(10, startTimeout)
	stillHeld(t, "with the new server in the quorum", held)
	l.stop()
	out, _, err := c.cli(within(t, stepTimeout), "server", "replace", old, added)
	if err != nil || !strings.Contains(out, added+" is in the place of "+old) {
		t.Errorf("replace once more: %v\n%s", err, out)
	}
}

// addServer puts a server into the cluster file, makes its certificate, and
// starts it with --join. It returns its log.
func (c *cluster) addServer(g *devcluster.Group, name string) string {
	c.t.Helper()
	path := filepath.Join(c.Dir(), "cluster.yaml")
	raw, err := os.ReadFile(path)
	if err != nil {
		c.t.Fatal(err)
	}
	ports, err := devcluster.FreePorts(4)
	if err != nil {
		c.t.Fatal(err)
	}
	line := fmt.Sprintf(`- {name: %s, api: "127.0.0.1:%d", votes: "127.0.0.1:%d", raft: "127.0.0.1:%d", gossip: "127.0.0.1:%d", metrics: "off"}`,
		name, ports[0], ports[1], ports[2], ports[3])
	lines := strings.Split(string(raw), "\n")
	at := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(strings.TrimSpace(l), "servers:") })
	indent := lines[at+1][:strings.Index(lines[at+1], "-")]
	text := strings.Join(slices.Insert(lines, at+1, indent+line), "\n")
	if err := os.WriteFile(path+".new", []byte(text), 0o644); err != nil {
		c.t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		c.t.Fatal(err)
	}
	f, _, err := clusterload.File(path)
	if err != nil {
		c.t.Fatal(err)
	}
	certs := filepath.Join(c.Dir(), "certs")
	if _, err := pki.Generate(pki.Config{Dir: certs, Cluster: f.Cluster, Identities: []pki.Identity{{Role: pki.RoleRegion, Region: "eu-frankfurt", Name: name}}}); err != nil {
		c.t.Fatal(err)
	}
	log := filepath.Join(c.t.TempDir(), name+".log")
	_, err = g.Start(devcluster.Spec{
		Name: name, Binary: binary, Log: log,
		Args: []string{"region", "-f", path, "--certs", certs, "--name", name, "--data-dir", filepath.Join(c.t.TempDir(), name), "--join", "--log-level", "debug"},
	})
	if err != nil {
		c.t.Fatal(err)
	}
	return log
}
