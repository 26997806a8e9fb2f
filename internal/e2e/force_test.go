package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/devcluster"
)

// headlease runs a command and returns what it printed to each stream.
func headlease(t *testing.T, args ...string) (out, errs string, err error) {
	t.Helper()
	cmd := exec.CommandContext(within(t, stepTimeout), binary, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	return stdout.String(), stderr.String(), err
}

// once takes a lock, writes what it stands for and releases it, and returns the
// token.
func once(t *testing.T, c *client.Client, r *resource.Client, lock string, d time.Duration) fence.Token {
	t.Helper()
	ctx := within(t, d)
	lease, err := c.Acquire(ctx, lock, client.Wait())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Claim(ctx, lock, lease.Token()); err != nil {
		t.Fatal(err)
	}
	if e, err := r.Write(ctx, lock, lease.Token(), "x"); err != nil || e.Outcome != resource.Accepted {
		t.Fatal(e, err)
	}
	if err := lease.Release(ctx); err != nil {
		t.Error(err)
	}
	return lease.Token()
}

// byRole are the cluster's region servers and witnesses, in their order.
func (c *cluster) byRole() (servers, witnesses []devcluster.Process) {
	for _, p := range c.State().Processes {
		if p.Role == "witness" {
			witnesses = append(witnesses, p)
		} else {
			servers = append(servers, p)
		}
	}
	return servers, witnesses
}

// inspected writes the facts of stopped processes into files of a directory, as
// 'force-quorum inspect' prints them, and returns their paths.
func inspected(t *testing.T, dir string, of []devcluster.Process) (facts []string) {
	t.Helper()
	for _, p := range of {
		out, errs, err := headlease(t, "force-quorum", "inspect", p.DataDir)
		if err != nil {
			t.Fatal(err, errs)
		}
		path := filepath.Join(dir, p.Name+".json")
		if err := os.WriteFile(path, []byte(out), 0o600); err != nil {
			t.Fatal(err)
		}
		facts = append(facts, path)
	}
	return facts
}

// TestF16ForceQuorum: four of six voters are destroyed, the owner among them.
// The survivors decide again in a new era, after D, with tokens above; the
// command may be killed at any point; what comes back from old data is refused
// and stops; the lost voters are replaced by the ordinary commands.
func TestF16ForceQuorum(t *testing.T) {
	const lock, d = "lock/file-0", 2 * time.Second
	c := start(t, devcluster.Options{Regions: 3, Servers: 1, Witnesses: 3, D: d})
	servers, witnesses := c.byRole()
	j := startJournal(t)
	guard := resource.NewClient(j.address, "writer")
	before := once(t, c.client(servers[0].Region, 10*time.Second), guard, lock, stepTimeout)
	region, survivor := servers[0], servers[1] // of the lock's owner may be any: the highest token counts
	lost := []devcluster.Process{region, servers[2], witnesses[1], witnesses[2]}
	kept := []devcluster.Process{survivor, witnesses[0]}

	if _, errs, err := headlease(t, "force-quorum", "inspect", survivor.DataDir); err == nil || !strings.Contains(errs, "in use by another process") {
		t.Errorf("inspect of a running server: %v, %s", err, errs)
	}
	var names []string
	for _, p := range c.State().Processes {
		names = append(names, p.Name)
	}
	if err := c.Kill(within(t, stepTimeout), names...); err != nil {
		t.Fatal(err)
	}
	old := filepath.Join(t.TempDir(), "old") // what comes back later
	for _, p := range lost {
		if err := os.Rename(p.DataDir, old+p.Name); err != nil {
			t.Fatal(err)
		}
	}
	// From here on as docs/operations.md says.
	dir := t.TempDir()
	facts := inspected(t, dir, kept)
	plan := filepath.Join(dir, "era.json")
	var destroyed []string
	for _, p := range lost {
		id := "witness/" + p.Name
		if p.Region != "" {
			id = "region/" + p.Region
		}
		destroyed = append(destroyed, id)
	}
	planning := append([]string{"force-quorum", "plan", "-o", plan}, facts...)
	if _, errs, err := headlease(t, append(planning, "--they-never-vote-again")...); err == nil || !strings.Contains(errs, "neither named as destroyed nor are its facts given") {
		t.Errorf("a plan without names: %v, %s", err, errs)
	}
	planning = append(planning, "--destroyed", strings.Join(destroyed, ","))
	if _, errs, err := headlease(t, planning...); err == nil || !strings.Contains(errs, "not planned") {
		t.Errorf("a plan that nobody confirms: %v, %s", err, errs)
	}
	if _, errs, err := headlease(t, append(planning, "--they-never-vote-again")...); err != nil {
		t.Fatal(err, errs)
	}
	apply := []string{"force-quorum", "apply", plan}
	for _, p := range kept {
		apply = append(apply, "--data", p.DataDir)
	}
	for _, after := range []time.Duration{0, 30 * time.Millisecond, 100 * time.Millisecond, 300 * time.Millisecond} {
		cmd := exec.Command(binary, apply...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		select { // wherever that is, it is somewhere
		case <-time.After(after):
		case <-t.Context().Done():
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	if out, errs, err := headlease(t, apply...); err != nil {
		t.Fatal(err, out, errs)
	}
	began := time.Now()
	for _, p := range kept {
		if err := c.StartProcess(p.Name); err != nil {
			t.Fatal(err)
		}
	}
	worker := c.client(survivor.Region, 10*time.Second)
	after := once(t, worker, guard, lock, 2*stepTimeout)
	if waited := time.Since(began); waited < d*98/100 { // clocks are 1 % off at most
		t.Errorf("granted %v after the start, before D had passed", waited)
	}
	if after <= before || after.Epoch() <= 1024 {
		t.Errorf("token %v after %v", after, before)
	}
	if e, err := guard.Write(within(t, stepTimeout), lock, before, "late"); err == nil && e.Outcome == resource.Accepted {
		t.Error("a write with a token of before is accepted")
	}
	j.highest()

	// The old owner and a witness come back as they were.
	back := []devcluster.Process{region, witnesses[1]}
	for _, p := range back {
		if err := os.Rename(old+p.Name, p.DataDir); err != nil {
			t.Fatal(err)
		}
		if err := c.StartProcess(p.Name); err != nil {
			t.Fatal(err)
		}
	}
	ctx := within(t, 2*stepTimeout)
	for _, p := range back {
		for {
			process, _ := c.File().Process(p.Name)
			v, err := c.admin.DescribeVoter(ctx, process)
			if err == nil && v.GetEraStop().GetEra().GetCounter() == 1 {
				break
			}
			select {
			case <-ctx.Done():
				t.Fatalf("%s has not stopped: %v, %v", p.Name, v.GetEraStop(), err)
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
	status, errs, _ := headlease(t, "status", "-f", filepath.Join(c.Dir(), "cluster.yaml"), "--certs", filepath.Join(c.Dir(), "certs"))
	if strings.Count(status, "votes no more") != len(back) || !strings.Contains(status, "era 1-") {
		t.Errorf("status: %s%s", status, errs)
	}
	if again := once(t, worker, guard, lock, stepTimeout); again <= after {
		t.Errorf("token %v after %v", again, after)
	}

	// A lost voter is replaced as any other.
	if err := c.Kill(within(t, stepTimeout), witnesses[1].Name); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(witnesses[1].DataDir); err != nil {
		t.Fatal(err)
	}
	if err := c.StartProcess(witnesses[1].Name); err != nil {
		t.Fatal(err)
	}
	conf, err := c.admin.ReplaceWitness(within(t, 2*stepTimeout), witnesses[1].Name, witnesses[1].Name, func(string) {})
	if err != nil || len(conf.GetVoters()) != 3 || len(conf.GetDestroyedVoters()) != 3 {
		t.Errorf("%v, %v", conf, err)
	}
	// And who was declared destroyed is in the audit.
	records, _, err := headlease(t, "audit", "export", "--region", survivor.Region, "-f", filepath.Join(c.Dir(), "cluster.yaml"), "--certs", filepath.Join(c.Dir(), "certs"))
	if err != nil || !strings.Contains(records, "era begun by force-quorum") || !strings.Contains(records, "declared destroyed: "+destroyed[0]) {
		t.Errorf("audit: %v, %s", err, records)
	}
}
