package e2e

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/internal/devcluster"
)

// TestARegionIsRemoved by the commands that its refusals name: drained, taken out
// of the lists of preferences, removed. Leases elsewhere are kept, those that were
// its own pass on under the next epoch, and it is no voter any more: without it and
// one more region, the rest has a majority that it had not before.
func TestARegionIsRemoved(t *testing.T) {
	c := start(t, devcluster.Options{Regions: 3, Servers: 1, Witnesses: 1, D: 2 * time.Second})
	const gone, stays, other = "ap-tokyo", "eu-frankfurt", "us-virginia"
	before := c.epochs(t)
	if o := before["ap"]; o.Region != gone {
		// Whoever was first at the start has it; the region is to have something to lose.
		c.mustCLI("partition", "transfer", "ap", "--to", gone, "--drain", "0s")
		before = c.epochs(t)
	}
	refused := func(want string) {
		t.Helper()
		if _, errs, err := c.cli(within(t, stepTimeout), "region", "remove", gone); err == nil || !strings.Contains(errs, want) {
			t.Fatalf("removed, or refused for another reason than %q: %v %s", want, err, errs)
		}
	}
	refused("prefers region")

	text, err := os.ReadFile(filepath.Join(c.Dir(), "cluster.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	without := regexp.MustCompile(`(?m)^( *prefer: .*?)(, `+gone+`|`+gone+`, )(.*)$`).ReplaceAllString(string(text), "$1$3")
	if strings.Count(without, gone+",") > 0 || strings.Count(without, gone+"]") > 0 {
		t.Fatalf("the lists still have %s:\n%s", gone, without)
	}
	file := filepath.Join(t.TempDir(), "cluster.yaml")
	if err := os.WriteFile(file, []byte(without), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Log(c.mustCLI("config", "apply", file, "--yes"))
	refused("region drain")

	cl := c.client("", 10*time.Second)
	kept, err := cl.Acquire(within(t, stepTimeout), c.lockIn("eu"))
	if err != nil {
		t.Fatal(err)
	}
	moving, err := cl.Acquire(within(t, stepTimeout), c.lockIn("ap"))
	if err != nil {
		t.Fatal(err)
	}
	if moving.Region() != gone {
		t.Fatalf("granted by %s", moving.Region())
	}
	passed := make(chan struct{})
	go func() { // a worker that stops in order
		defer close(passed)
		<-moving.Context().Done()
		_ = moving.Release(context.WithoutCancel(t.Context()))
	}()
	t.Log(c.mustCLI("region", "drain", gone, "--drain", "10s"))
	<-passed
	t.Log(c.mustCLI("region", "remove", gone))

	conf, _, err := c.operator(t).Configuration(within(t, stepTimeout))
	if err != nil {
		t.Fatal(err)
	}
	if config.VoterIncarnation(conf, config.RegionVoter(gone)) != 0 || len(conf.GetVoters()) != 3 {
		t.Fatalf("voters: %v", conf.GetVoters())
	}
	after := c.epochs(t)
	if o := after["ap"]; o.Region == gone || o.Epoch != before["ap"].Epoch+1 {
		t.Errorf("partition ap: %+v, before %+v", o, before["ap"])
	}
	for _, name := range []string{"eu", "us"} {
		if after[name] != before[name] {
			t.Errorf("partition %s: %+v, before %+v", name, after[name], before[name])
		}
	}
	next, err := cl.Acquire(within(t, stepTimeout), moving.Resource())
	if err != nil {
		t.Fatal(err)
	}
	if next.Token() <= moving.Token() || next.Region() == gone {
		t.Errorf("token %v by %s after %v by %s", next.Token(), next.Region(), moving.Token(), moving.Region())
	}
	if kept.Context().Err() != nil || !kept.Valid() {
		t.Errorf("the lease on %s was lost: %v", kept.Resource(), context.Cause(kept.Context()))
	}
	// Removed once more: nothing is to do.
	c.mustCLI("region", "remove", gone)

	// Of three voters two are left, which would be no majority of four.
	if err := c.Kill(within(t, stepTimeout), gone+"-1", other+"-1"); err != nil {
		t.Fatal(err)
	}
	ctx := within(t, startTimeout)
	for held := map[string]bool{}; len(held) < 3; {
		clear(held)
		st, err := c.admin.RegionStatus(ctx, stays)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range st.GetPartitions() {
			if p.GetHeldNs() > 0 {
				held[p.GetName()] = true
			}
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s holds %v: %v", stays, held, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
	if kept.Context().Err() != nil || !kept.Valid() {
		t.Errorf("the lease on %s was lost with regions that had no part in it: %v", kept.Resource(), context.Cause(kept.Context()))
	}
}
