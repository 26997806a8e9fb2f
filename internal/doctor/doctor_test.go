package doctor

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/leaktest"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
)

func TestMain(m *testing.M) { leaktest.VerifyTestMain(m) }

func lat(p50, p99, worst time.Duration) latencies { return latencies{100, p50, p99, worst} }

// TestVerdicts at the bounds, and that every one that is not ok says what it is
// for and what to do.
func TestVerdicts(t *testing.T) {
	const m = time.Millisecond
	lan, calm := paceOf(clusterfile.TimingLAN), paceOf(clusterfile.TimingCalm)
	disk := func(i int, single, parallel latencies, p pace) Check { return judgeDisk(single, parallel, p)[i] }
	for name, c := range map[string]struct {
		check Check
		want  Verdict
	}{
		"quick disk":              {disk(0, lat(m, m, m), lat(m, m, m), lan), OK},
		"medium disk":             {disk(0, lat(5*m, 5*m, 5*m), lat(m, m, m), lan), Warn},
		"slow disk":               {disk(0, lat(11*m, m, m), lat(m, m, m), lan), Fail},
		"slow together":           {disk(1, lat(m, m, m), lat(30*m, 30*m, 30*m), lan), Fail},
		"unsteady":                {disk(2, lat(m, m, m), lat(m, 60*m, 60*m), lan), Warn},
		"unsteady, calm":          {disk(2, lat(m, m, m), lat(m, 60*m, 60*m), calm), OK},
		"very unsteady":           {disk(2, lat(m, 101*m, 101*m), lat(m, m, m), lan), Fail},
		"near the watchdog":       {disk(3, lat(m, m, 400*m), lat(m, m, m), lan), Warn},
		"beyond the watchdog":     {disk(3, lat(m, m, m), lat(m, m, 1501*m), lan), Fail},
		"files unlimited":         {judgeFiles(^uint64(0)), OK},
		"files many":              {judgeFiles(65536), OK},
		"files some":              {judgeFiles(65535), Warn},
		"files few":               {judgeFiles(1023), Fail},
		"space":                   {judgeSpace(2<<30, 1e6, 1e6), OK},
		"space, no inode count":   {judgeSpace(2<<30, 0, 0), OK},
		"little space":            {judgeSpace(1<<30, 1e6, 1e6), Warn},
		"no space":                {judgeSpace(1<<20, 1e6, 1e6), Fail},
		"no inodes":               {judgeSpace(2<<30, 1e6, 9), Fail},
		"true clock":              {judgeRate(2*time.Second, 2*time.Second+m), OK},
		"slewed clock":            {judgeRate(2*time.Second, 2*time.Second-5*m), Warn},
		"wrong clock":             {judgeRate(2*time.Second, 2*time.Second+21*m), Fail},
		"stopped clock":           {judgeRate(0, time.Second), Fail},
		"timers":                  {judgeLateness(lat(0, 20*m, 50*m), lan), OK},
		"late timers":             {judgeLateness(lat(0, 21*m, 50*m), lan), Warn},
		"late timers, calm":       {judgeLateness(lat(0, 21*m, 50*m), calm), OK},
		"very late timers":        {judgeLateness(lat(0, 76*m, 80*m), lan), Fail},
		"a gap":                   {judgeLateness(lat(0, m, 1001*m), lan), Fail},
		"no timer":                {judgeLateness(latencies{}, lan), Fail},
		"never suspended":         {judgeSuspend(3*m, nil), OK},
		"suspended once":          {judgeSuspend(time.Minute, nil), Warn},
		"no clock for suspends":   {judgeSuspend(0, os.ErrInvalid), Fail},
		"synchronised":            {judgeSynchronised(true, m), OK},
		"not synchronised":        {judgeSynchronised(false, 0), Warn},
		"certificate":             {examineCertificate(Config{CertificateEnds: time.Now().Add(365 * 24 * time.Hour)})[0], OK},
		"certificate ending soon": {examineCertificate(Config{CertificateEnds: time.Now().Add(24 * time.Hour)})[0], Warn},
	} {
		if c.check.Verdict != c.want {
			t.Errorf("%s: %+v; want %s", name, c.check, c.want)
		}
		if c.check.Name == "" || c.check.Found == "" || c.check.Needed == "" || (c.want == OK) != (c.check.Remedy == "") {
			t.Errorf("%s says too little or too much: %+v", name, c.check)
		}
	}
	if got := summarise([]time.Duration{5, 1, 4, 2, 3}); got != (latencies{5, 3, 5, 5}) {
		t.Errorf("%+v", got)
	}
}

// TestThePathsSayWhatTheyAreEnoughFor: per region and to the voters.
func TestThePathsSayWhatTheyAreEnoughFor(t *testing.T) {
	const m = time.Millisecond
	proc := func(name, region string) clusterfile.Process { return clusterfile.Process{Name: name, Region: region} }
	c := Config{File: clusterfile.File{D: 4 * time.Second, Timing: clusterfile.TimingLAN}, Self: proc("eu-1", "eu")}
	paths := func(near, far time.Duration) []*path {
		return []*path{
			{process: proc("eu-2", "eu"), plane: link.PlaneRaft, rtt: near / 2},
			{process: proc("eu-3", "eu"), plane: link.PlaneVotes, rtt: near},
			{process: proc("us-1", "us"), plane: link.PlaneVotes, rtt: far},
			{process: proc("us-2", "us"), plane: link.PlaneVotes, rtt: time.Hour, err: os.ErrClosed}, // never measured
		}
	}
	for name, want := range map[string]struct {
		near, far, disk time.Duration
		verdicts        [3]Verdict // Raft, grant, D
		d               time.Duration
	}{
		"good":            {m, 100 * m, m, [3]Verdict{OK, OK, OK}, 0},
		"slow grants":     {m, 100 * m, 4 * m, [3]Verdict{OK, Warn, OK}, 0},
		"a wide region":   {30 * m, 100 * m, m, [3]Verdict{Warn, Fail, OK}, 0},
		"a spread region": {50 * m, 100 * m, m, [3]Verdict{Fail, Fail, OK}, 0},
		"far voters":      {m, 500 * m, m, [3]Verdict{OK, OK, Warn}, 0},
		"D too short":     {m, 300 * m, m, [3]Verdict{OK, OK, Fail}, time.Second},
	} {
		conf := c
		if want.d != 0 {
			conf.File.D = want.d
		}
		got := judgePaths(conf, paths(want.near, want.far), lat(want.disk, want.disk, want.disk))
		if len(got) != 3 {
			t.Fatalf("%s: %+v", name, got)
		}
		for i, v := range want.verdicts {
			if got[i].Verdict != v || (v == OK) != (got[i].Remedy == "") {
				t.Errorf("%s: %+v; want %s", name, got[i], v)
			}
		}
	}
}

// TestTheDiskIsMeasuredWhereItDoesNoHarm: an empty data directory, which must
// stay empty, is passed over for its parent; nothing is left anywhere.
func TestTheDiskIsMeasuredWhereItDoesNoHarm(t *testing.T) {
	dir := t.TempDir()
	empty, used := filepath.Join(dir, "empty"), filepath.Join(dir, "used")
	for _, d := range []string{empty, used} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(used, "server.json"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{empty: dir, used: used, filepath.Join(empty, "a", "b"): dir} {
		if got, err := diskDir(name); err != nil || got != want {
			t.Errorf("%s is measured in %s, %v; want %s", name, got, err, want)
		}
	}
	checks, speed := examineDisk(t.Context(), filepath.Join(empty, "a"), paceOf(""))
	if speed.n == 0 || len(checks) != 4 {
		t.Errorf("%+v, %+v", checks, speed)
	}
	for d, n := range map[string]int{dir: 2, empty: 0, used: 1} {
		if list, err := os.ReadDir(d); err != nil || len(list) != n {
			t.Errorf("%s holds %v, %v", d, list, err)
		}
	}
	file := filepath.Join(used, "server.json")
	if checks, _ := examineDisk(t.Context(), file, paceOf("")); len(checks) != 1 || checks[0].Verdict != Fail || checks[0].Remedy == "" {
		t.Errorf("a file as data directory: %+v", checks)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if checks, _ := examineDisk(ended, "", paceOf("")); checks[0].Verdict != Warn {
		t.Errorf("no data directory: %+v", checks)
	}
}

// TestPeers: one that is silent, one that is not there, one that is another
// than it should be, and itself.
func TestPeers(t *testing.T) {
	links := func(id pki.Identity) *link.Links {
		t.Helper()
		id.Cluster = "c"
		l, err := link.New(link.Config{Identity: id, Insecure: true, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	listen := func() net.Listener {
		t.Helper()
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ln.Close() })
		return ln
	}
	silent := listen() // accepts, in the kernel, and says nothing
	absent := listen()
	address := absent.Addr().String()
	_ = absent.Close()
	self := listen()
	ours := self.Addr().String()
	_ = self.Close()
	w9 := links(pki.Identity{Role: pki.RoleWitness, Name: "w9"})
	ln, err := w9.Listen(link.PlaneVotes, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(w9.ServerOptions(link.PlaneVotes)...)
	go func() { _ = server.Serve(ln) }()
	t.Cleanup(server.Stop)
	stranger := ln.Addr().String()
	f := clusterfile.File{
		Cluster: "c", D: 4 * time.Second,
		Regions: []clusterfile.Region{{Name: "eu", Servers: []clusterfile.Server{{Name: "eu-1", API: ours, Votes: ours, Raft: ours, Gossip: ours}}}},
		Witnesses: []clusterfile.Witness{
			{Name: "w1", Votes: silent.Addr().String(), Gossip: silent.Addr().String()},
			{Name: "w2", Votes: address, Gossip: address},
			{Name: "w3", Votes: stranger, Gossip: stranger},
		},
	}
	p, _ := f.Process("eu-1")
	began := time.Now()
	checks := examineNetwork(t.Context(), Config{File: f, Self: p, Links: links(pki.Identity{Role: pki.RoleRegion, Region: "eu", Name: "eu-1"})}, latencies{})
	if took := time.Since(began); took > Limit {
		t.Errorf("took %v", took)
	}
	want := map[string]struct {
		verdict Verdict
		found   string
	}{
		"network: own addresses":        {OK, "free to listen on"},
		"network: votes of witness/w1":  {Fail, "no answer within 2s"},
		"network: votes of witness/w2":  {Warn, "nobody listens there"},
		"network: votes of witness/w3":  {Fail, "w9"},
		"network: gossip of witness/w1": {Warn, "no answer to three pings"},
		"network: gossip of witness/w2": {Warn, "no answer to three pings"},
		"network: gossip of witness/w3": {Warn, "no answer to three pings"},
	}
	if len(checks) != len(want) {
		t.Errorf("%d checks", len(checks))
	}
	for _, c := range checks {
		w := want[c.Name]
		if c.Verdict != w.verdict || !strings.Contains(c.Found, w.found) || (c.Verdict == OK) != (c.Remedy == "") {
			t.Errorf("%+v; want %+v", c, w)
		}
	}

	p.Metrics = silent.Addr().String() // where another process listens
	taken := own(t.Context(), Config{File: f, Self: p, Links: links(pki.Identity{Role: pki.RoleRegion, Region: "eu", Name: "eu-1"})})
	if len(taken) != 1 || taken[0].Verdict != Fail || !strings.Contains(taken[0].Found, "metrics") {
		t.Errorf("%+v", taken)
	}
}
