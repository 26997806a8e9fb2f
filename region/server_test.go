package region

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/callstream"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/fault"
	"github.com/headlease/headlease/internal/leaktest"
	"github.com/headlease/headlease/internal/pki"
	"github.com/headlease/headlease/region/api"
)

func TestMain(m *testing.M) { leaktest.VerifyTestMain(m) }

// config is that of a region's only server, over TLS on loopback addresses that
// are free now.
func config(t *testing.T) Config {
	t.Helper()
	certs := filepath.Join(t.TempDir(), "certs")
	id := pki.Identity{Cluster: "test", Role: pki.RoleRegion, Region: "eu", Name: "eu-1"}
	if _, err := pki.Generate(pki.Config{Dir: certs, Cluster: "test", Identities: []pki.Identity{id}}); err != nil {
		t.Fatal(err)
	}
	creds, err := pki.Load(pki.LoadConfig{Dir: certs, Want: id, Gossip: true})
	if err != nil {
		t.Fatal(err)
	}
	var a []string
	for range 4 {
		ln := listen(t, "127.0.0.1:0")
		a = append(a, ln.Addr().String())
		defer func() { _ = ln.Close() }()
	}
	cl, err := clock.NewSystem()
	if err != nil {
		t.Fatal(err)
	}
	return Config{
		File: clusterfile.File{
			Cluster: "test", D: time.Second, Shards: 4, Timing: "calm",
			Regions:    []clusterfile.Region{{Name: "eu", Servers: []clusterfile.Server{{Name: "eu-1", API: a[0], Votes: a[1], Raft: a[2], Gossip: a[3]}}}},
			Partitions: []clusterfile.Partition{{Name: "all", Shards: []clusterfile.ShardRange{{First: 0, Last: 3}}, Prefer: []string{"eu"}}},
		},
		Name: "eu-1", DataDir: filepath.Join(t.TempDir(), "data"), Credentials: creds, Clock: cl, Logger: slog.New(slog.DiscardHandler),
	}
}

func listen(t *testing.T, address string) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// hash of a directory: names and contents; "" if it does not exist.
func hash(t *testing.T, dir string) string {
	t.Helper()
	if _, err := os.Stat(dir); os.IsNotExist(err) {
		return ""
	}
	h := sha256.New()
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		_, _ = fmt.Fprintln(h, path)
		if d.IsDir() {
			return nil
		}
		raw, err := os.ReadFile(path)
		_, _ = h.Write(raw)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

// TestARefusedStartChangesNothingOnDisk, neither where there was nothing nor in
// a directory that was used before, and gives every address back.
func TestARefusedStartChangesNothingOnDisk(t *testing.T) {
	base := config(t)
	s := base.File.Regions[0].Servers[0]
	occupy := func(address string) func(*testing.T, *Config) {
		return func(t *testing.T, _ *Config) {
			ln := listen(t, address)
			t.Cleanup(func() { _ = ln.Close() })
		}
	}
	cases := map[string]struct {
		spoil func(*testing.T, *Config)
		want  string
	}{
		"api occupied":    {occupy(s.API), "address already in use"},
		"votes occupied":  {occupy(s.Votes), "address already in use"},
		"raft occupied":   {occupy(s.Raft), "address already in use"},
		"gossip occupied": {occupy(s.Gossip), "address already in use"},
		"another server's certificate": {func(_ *testing.T, c *Config) {
			creds := *c.Credentials
			creds.Identity.Name = "eu-2"
			c.Credentials = &creds
		}, "use the pair made for this process"},
		"no certificate": {func(_ *testing.T, c *Config) { c.Credentials = nil }, "certificates: none given"},
		"unknown name":   {func(_ *testing.T, c *Config) { c.Name = "eu-9" }, `name: "eu-9" is not a region server of the cluster file`},
	}
	for _, used := range []bool{false, true} {
		if used {
			srv, err := New(t.Context(), base)
			if err != nil {
				t.Fatal(err)
			}
			if err := srv.Close(); err != nil {
				t.Fatal(err)
			}
			cases["data of another server"] = struct {
				spoil func(*testing.T, *Config)
				want  string
			}{func(_ *testing.T, c *Config) {
				c.File.Regions = slices.Clone(c.File.Regions)
				c.File.Regions[0].Name = "us"
				creds := *c.Credentials
				creds.Identity.Region = "us"
				c.Credentials = &creds
			}, "eu"}
		}
		for _, name := range slices.Sorted(maps.Keys(cases)) {
			t.Run(fmt.Sprintf("%s, used %v", name, used), func(t *testing.T) {
				c := base
				cases[name].spoil(t, &c)
				before := hash(t, c.DataDir)
				srv, err := New(t.Context(), c)
				if err == nil {
					_ = srv.Close()
				}
				if err == nil || !strings.Contains(err.Error(), cases[name].want) {
					t.Errorf("%v\nwant %s", err, cases[name].want)
				}
				if after := hash(t, c.DataDir); after != before {
					t.Errorf("the data directory changed")
				}
			})
		}
	}
	srv, err := New(t.Context(), base) // nothing was left occupied or locked
	if err != nil {
		t.Fatal(err)
	}
	if err := srv.Close(); err != nil {
		t.Error(err)
	}
}

// TestEveryCallOfAWorkerGoesOverTheStream: what clients send over it is served on
// it; a call that is not costs a try more, and then a stream of its own.
func TestEveryCallOfAWorkerGoesOverTheStream(t *testing.T) {
	s, err := New(t.Context(), config(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	served := s.carried.Methods()
	for _, m := range callstream.WorkerMethods() {
		if !slices.Contains(served, m) {
			t.Errorf("%s is not served over the stream of calls", m)
		}
	}
}

// TestThePolicyIsExactlyWhatIsServed: no method without a rule, no rule
// without a method.
func TestThePolicyIsExactlyWhatIsServed(t *testing.T) {
	c := config(t)
	faults, err := fault.NewTable(fault.Rules{})
	if err != nil {
		t.Fatal(err)
	}
	defer faults.Close()
	c.Faults, c.Drills = faults, true
	s, err := New(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	served := map[string]bool{}
	for _, g := range []*grpc.Server{s.api, s.votes} {
		for service, info := range g.GetServiceInfo() {
			for _, m := range info.Methods {
				served["/"+service+"/"+m.Name] = true
			}
		}
	}
	table := map[string]bool{}
	for method := range api.Policy() {
		table[method] = true
	}
	if !maps.Equal(served, table) {
		t.Errorf("served %v\nin the policy %v", slices.Sorted(maps.Keys(served)), slices.Sorted(maps.Keys(table)))
	}
}
