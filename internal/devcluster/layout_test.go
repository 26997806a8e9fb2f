package devcluster

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/fault"
)

func made(t *testing.T, o Options) *Cluster {
	t.Helper()
	o.Logger = quiet
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Stop(t.Context()) })
	return c
}

func TestDefaultShape(t *testing.T) {
	c := made(t, Options{Dir: t.TempDir(), RTT: DefaultMatrix(), Clients: []string{"worker-a"}})
	f := c.File()
	if f.Cluster != "dev" || f.D != 4*time.Second || f.Timing != clusterfile.TimingCalm || len(f.Processes()) != 12 {
		t.Fatalf("default cluster: %+v", f)
	}
	want := map[string]string{
		"eu": "0-84 eu-frankfurt us-virginia ap-tokyo",
		"us": "85-169 us-virginia eu-frankfurt ap-tokyo",
		"ap": "170-255 ap-tokyo us-virginia eu-frankfurt",
	}
	for _, p := range f.Partitions {
		got := p.Shards[0].String() + " " + strings.Join(p.Prefer, " ")
		if got != want[p.Name] {
			t.Errorf("partition %s: %s, want %s", p.Name, got, want[p.Name])
		}
		delete(want, p.Name)
	}
	if len(want) > 0 {
		t.Errorf("no partitions %v", want)
	}
	s := c.State()
	if len(s.Clients) != 2 || s.Clients[1].Name != "worker-a" {
		t.Errorf("clients %+v", s.Clients)
	}
	for _, path := range []string{s.CA, s.Admin.Cert, s.Admin.Key, s.Clients[0].Cert, s.Clients[1].Key} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
}

// A sender delays by half the round trip, per region or witness, and not to
// its own region.
func TestFaultTablesAreHalfTheMatrix(t *testing.T) {
	c := made(t, Options{Dir: t.TempDir(), RTT: DefaultMatrix()})
	table := func(name string) map[string]int64 {
		p, _ := c.Process(name)
		text, err := os.ReadFile(p.Faults)
		if err != nil {
			t.Fatal(err)
		}
		rules, err := fault.ParseStartup(text)
		if err != nil {
			t.Fatal(err)
		}
		if tbl, err := fault.NewTable(rules); err != nil {
			t.Errorf("%s would not start with its table: %v", name, err)
		} else {
			tbl.Close()
		}
		delays := map[string]int64{}
		for _, r := range rules.Links {
			if r.ID == "" || r.Drop || r.Expires != 0 || r.Plane != fault.PlaneAll {
				t.Errorf("%s: %+v", name, r)
			}
			delays[r.Peer] = r.Delay.Milliseconds()
		}
		return delays
	}
	if got, want := fmt.Sprint(table("us-virginia-3")), "map[region/ap-tokyo:75 region/eu-frankfurt:45 w-london:38 w-oregon:33 w-singapore:108]"; got != want {
		t.Errorf("us-virginia-3: %s, want %s", got, want)
	}
	if got, want := fmt.Sprint(table("w-london")), "map[region/ap-tokyo:105 region/eu-frankfurt:8 region/us-virginia:38 w-oregon:65 w-singapore:85]"; got != want {
		t.Errorf("w-london: %s, want %s", got, want)
	}
	if err := c.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The delays are not the cluster's shape: the next start may have none.
	c = made(t, Options{Dir: c.Dir()})
	if got := table("w-london"); len(got) != 0 {
		t.Errorf("without delays: %v", got)
	}
}

func TestMatrixIsWholeAndTriangular(t *testing.T) {
	m := DefaultMatrix()
	sites := append(append([]string{}, regionNames...), witnessNames...)
	for _, a := range sites {
		for _, b := range sites {
			if a == b {
				continue
			}
			if m.RTT(a, b) <= 0 || m.RTT(a, b) != m.RTT(b, a) {
				t.Errorf("%s to %s: %v and %v back", a, b, m.RTT(a, b), m.RTT(b, a))
			}
		}
	}
	for pair, want := range map[[2]string]time.Duration{
		{"eu-frankfurt", "us-virginia"}: 90 * time.Millisecond,
		{"us-virginia", "ap-tokyo"}:     150 * time.Millisecond,
		{"ap-tokyo", "eu-frankfurt"}:    220 * time.Millisecond,
	} {
		if got := m.RTT(pair[0], pair[1]); got != want {
			t.Errorf("%v: %v, want %v", pair, got, want)
		}
	}
}

func TestParseMatrix(t *testing.T) {
	for in, want := range map[string]time.Duration{
		"":                              90 * time.Millisecond,
		"default":                       90 * time.Millisecond,
		"off":                           0,
		"30ms":                          30 * time.Millisecond,
		"us-virginia/eu-frankfurt=12ms": 12 * time.Millisecond,
		"w-london/w-oregon=1s, eu-frankfurt/us-virginia=0s": 0,
	} {
		m, err := ParseMatrix(in)
		if err != nil || m.RTT("eu-frankfurt", "us-virginia") != want {
			t.Errorf("%q: %v, %v; want %v", in, m.RTT("eu-frankfurt", "us-virginia"), err, want)
		}
	}
	_, err := ParseMatrix("moon/mars=1s,eu-frankfurt/us-virginia=x,eu-frankfurt/ap-tokyo=-1s")
	for _, want := range []string{`"moon/mars" are not two sites`, `"x" is not a time`, "-1s is outside"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: does not say %q", err, want)
		}
	}
	if _, err := ParseMatrix("soon"); err == nil || !strings.Contains(err.Error(), "such as 80ms") {
		t.Errorf("soon: %v", err)
	}
}

// hashDir is the names and contents of all files.
func hashDir(t *testing.T, dir string) string {
	t.Helper()
	h := sha256.New()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		fmt.Fprintf(h, "%s %q\n", path, data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

func TestOtherShapeIsRefusedAndNothingChanges(t *testing.T) {
	dir := t.TempDir()
	if err := made(t, Options{Dir: dir, Regions: 2, Servers: 1, Witnesses: 3}).Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := hashDir(t, dir)
	_, err := New(Options{Dir: dir, Cluster: "other", Regions: 3, Servers: 3, Witnesses: 1, D: 9 * time.Second, Timing: clusterfile.TimingLAN, Redis: true, Logger: quiet})
	for _, want := range []string{
		"holds a cluster with regions 2, not 3; leave regions out, or name another directory",
		"servers 1, not 3", "witnesses 3, not 1", "d 4s, not 9s", "name dev, not other", "timing calm, not lan", "redis false, not true",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: does not say %q", err, want)
		}
	}
	if _, err := New(Options{Dir: dir, NoWitnesses: true, AllowEvenWitnesses: true, Logger: quiet}); err == nil {
		t.Error("no witnesses asked of a directory with three")
	}
	if hashDir(t, dir) != before {
		t.Error("the directory changed")
	}
}

func TestForeignDirectoryIsRefused(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "thesis.txt"), []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Options{Dir: dir, Logger: quiet}); err == nil || !strings.Contains(err.Error(), "has thesis.txt but no cluster.yaml") {
		t.Errorf("among other files: %v", err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("refused, but made %v, %v", entries, err)
	}
	if _, err := New(Options{Dir: filepath.Join(dir, "a", "b"), Logger: quiet}); err == nil || !strings.Contains(err.Error(), "make its parent first") {
		t.Errorf("without a parent: %v", err)
	}
}

func TestOptionsFaultsAllAtOnce(t *testing.T) {
	_, err := New(Options{Regions: 6, Servers: -1, Witnesses: 8, NoWitnesses: true, D: time.Millisecond, Grace: -1})
	for _, want := range []string{"dir: empty", "regions: 6; use 1 to 5", "servers: -1; use 3 or 5", "witnesses: 8; use 0 to 7", "choose one", "d: 1ms", "grace"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: does not say %q", err, want)
		}
	}
	if _, err := New(Options{Dir: t.TempDir(), Binary: "does/not/exist"}); err == nil || !strings.Contains(err.Error(), "build it or name another") {
		t.Errorf("missing binary: %v", err)
	}
	// What the cluster file itself refuses is refused before anything is made.
	dir := t.TempDir()
	if _, err := New(Options{Dir: dir, Witnesses: 2, Logger: quiet}); err == nil || !strings.Contains(err.Error(), "witnesses") {
		t.Errorf("two witnesses: %v", err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("refused, but made %v, %v", entries, err)
	}
}
