package telemetry_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/leaktest"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	"github.com/headlease/headlease/internal/telemetry"
	"github.com/headlease/headlease/region"
	"github.com/headlease/headlease/witness"
)

func TestMain(m *testing.M) { leaktest.VerifyTestMain(m) }

// row is what the page must say of a metric.
type row struct{ name, kind, labels string }

func (r row) String() string { return fmt.Sprintf("| `%s` | %s | %s |", r.name, r.kind, r.labels) }

// elsewhere are the families that the page names as a whole: their own
// libraries document them.
var elsewhere = regexp.MustCompile(`^(go|process|promhttp)_`)

// docs/metrics.md and what a running region server and witness show are the
// same, both ways, with types and labels; over HTTP it is what the registry has.
func TestThePageListsWhatIsServed(t *testing.T) {
	documented := page(t)
	c := start(t)
	var missing []string
	deadline := time.After(30 * time.Second)
	for { // a gossip probe is due every second, and some metrics begin with the first
		served, undocumented := c.rows(t), []string{}
		for r := range served {
			if !documented[r] {
				undocumented = append(undocumented, r.String())
			}
		}
		if len(undocumented) > 0 {
			slices.Sort(undocumented)
			t.Errorf("served, and not so in docs/metrics.md:\n%s", strings.Join(undocumented, "\n"))
		}
		missing = missing[:0]
		for r := range documented {
			if !served[r] {
				missing = append(missing, r.String())
			}
		}
		if len(missing) == 0 || t.Failed() {
			break
		}
		select {
		case <-deadline:
			slices.Sort(missing)
			t.Fatalf("in docs/metrics.md, and not so served:\n%s", strings.Join(missing, "\n"))
		case <-time.After(100 * time.Millisecond):
		}
	}
	for _, address := range []string{c.regionAt, c.witnessAt} {
		body := get(t, address, "/metrics", http.StatusOK)
		for _, name := range []string{telemetry.BuildInfo, telemetry.VotesAnswered, telemetry.DetectorPhi, telemetry.StoreWriteTime, "go_goroutines", "process_open_fds"} {
			if !strings.Contains(body, "\n# TYPE "+name+" ") && !strings.HasPrefix(body, "# TYPE "+name+" ") {
				t.Errorf("%s does not serve %s", address, name)
			}
		}
		get(t, address, "/healthz", http.StatusOK)
		get(t, address, "/readyz", http.StatusOK)
	}
}

// Before init the processes live and are not ready, and say what to do.
func TestNotReadyBeforeInit(t *testing.T) {
	c := run(t)
	for _, address := range []string{c.regionAt, c.witnessAt} {
		get(t, address, "/healthz", http.StatusOK)
		if body := get(t, address, "/readyz", http.StatusServiceUnavailable); !strings.Contains(body, "headlease init") {
			t.Errorf("%s: %q does not name the next step", address, body)
		}
	}
}

// Without its witness the region has no majority and its head lease lapses; it
// stays ready all the same.
func TestReadyWithoutQuorum(t *testing.T) {
	c := start(t)
	get(t, c.regionAt, "/readyz", http.StatusOK)
	c.stopWitness()
	deadline := time.After(30 * time.Second)
	for !strings.Contains(get(t, c.regionAt, "/metrics", http.StatusOK), telemetry.HeadLeaseHeld+`{partition="all"} 0`) {
		select {
		case <-deadline:
			t.Fatal("the head lease did not lapse")
		case <-time.After(50 * time.Millisecond):
		}
	}
	get(t, c.regionAt, "/readyz", http.StatusOK)
	if body := get(t, c.regionAt, "/metrics", http.StatusOK); !strings.Contains(body, telemetry.Lapses+`{partition="all"} 1`) {
		t.Error("the lapse was not counted")
	}
}

func page(t *testing.T) map[row]bool {
	t.Helper()
	raw, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[row]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_0-9]+)` \\| (\\w+) \\|([^|]*)\\|").FindAllStringSubmatch(string(raw), -1) {
		rows[row{m[1], m[2], strings.TrimSpace(strings.ReplaceAll(m[3], "`", ""))}] = true
	}
	if len(rows) < 50 {
		t.Fatalf("only %d rows were found on the page", len(rows))
	}
	return rows
}

// processes are a region server and a witness in this process.
type processes struct {
	file                clusterfile.File
	registries          []*prometheus.Registry
	regionAt, witnessAt string
	stopWitness         func()
}

func (c *processes) rows(t *testing.T) map[row]bool {
	t.Helper()
	rows := map[row]bool{}
	for _, reg := range c.registries {
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if elsewhere.MatchString(f.GetName()) {
				continue
			}
			labels := map[string]bool{}
			for _, l := range f.GetMetric()[0].GetLabel() {
				labels[l.GetName()] = true
			}
			if f.GetHelp() == "" {
				t.Errorf("%s has no help", f.GetName())
			}
			rows[row{f.GetName(), strings.ToLower(f.GetType().String()), strings.Join(slices.Sorted(maps.Keys(labels)), ", ")}] = true
		}
	}
	return rows
}

const site = `
cluster: test
d: 1s
timing: calm
regions: [{name: eu, cache: {addresses: ["127.0.0.1:1"]}, servers: [{name: eu-1, api: %s, votes: %s, raft: %s, gossip: %s, metrics: %s}]}]
witnesses: [{name: w1, votes: %s, gossip: %s, metrics: %s}]
partitions: [{name: all, shards: 0-255, prefer: [eu]}]
`

// run starts both, uninitialised, until the test ends.
func run(t *testing.T) *processes {
	t.Helper()
	file, _, err := clusterfile.Parse(fmt.Appendf(nil, site, addresses(t, 8)...), nil)
	if err != nil {
		t.Fatal(err)
	}
	clk, err := clock.NewSystem()
	if err != nil {
		t.Fatal(err)
	}
	quiet := slog.New(slog.DiscardHandler)
	c := &processes{file: file, registries: []*prometheus.Registry{telemetry.NewRegistry("test"), telemetry.NewRegistry("test")}}
	server, err := region.New(t.Context(), region.Config{
		File: file, Name: "eu-1", DataDir: filepath.Join(t.TempDir(), "eu-1"), Insecure: true, Clock: clk, Logger: quiet, Registry: c.registries[0],
	})
	if err != nil {
		t.Fatal(err)
	}
	background(t, server.Run)
	voter := file.Witnesses[0]
	wit, err := witness.New(witness.Config{
		Cluster: file.Cluster, Name: "w1", DataDir: filepath.Join(t.TempDir(), "w1"), Votes: voter.Votes, Gossip: voter.Gossip, Metrics: voter.Metrics,
		Peers: []witness.Peer{{Name: "eu-1", Role: pki.RoleRegion, Region: "eu", Gossip: file.Regions[0].Servers[0].Gossip}},
		D:     file.D, Insecure: true, Clock: clk, Logger: quiet, Registry: c.registries[1],
	})
	if err != nil {
		t.Fatal(err)
	}
	c.stopWitness = background(t, wit.Run)
	c.regionAt, c.witnessAt = file.Regions[0].Servers[0].Metrics, voter.Metrics
	return c
}

// start is run with init.
func start(t *testing.T) *processes {
	t.Helper()
	c := run(t)
	links, err := link.New(link.Config{Identity: link.Identity{Cluster: c.file.Cluster, Role: pki.RoleAdmin}, Insecure: true, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = links.Close() }()
	a := admin.New(c.file, links)
	defer func() { _ = a.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if _, err := a.Init(ctx, func(string) {}); err != nil {
		t.Fatal(err)
	}
	if err := a.WaitOwned(ctx); err != nil {
		t.Fatal(err)
	}
	return c
}

// background runs f until the test ends or stop is called.
func background(t *testing.T, f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	ended := false
	stop = func() {
		cancel()
		if !ended {
			ended = true
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(stop)
	return stop
}

// addresses are free ones.
func addresses(t *testing.T, n int) []any {
	t.Helper()
	var out []any
	for range n {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = ln.Close() }()
		out = append(out, ln.Addr().String())
	}
	return out
}

func get(t *testing.T, address, path string, want int) string {
	t.Helper()
	transport := &http.Transport{DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode != want {
		t.Fatalf("%s%s: status %d, want %d: %s", address, path, res.StatusCode, want, body)
	}
	return string(body)
}
