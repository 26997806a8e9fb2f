package drill

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/drill/scenarios"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/history"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func at(ms int64) instant.Instant { return instant.Instant(ms * int64(time.Millisecond)) }

// three is a cluster of three regions and witnesses, of which us owns p.
func three() world {
	f := clusterfile.File{Shards: 256}
	for _, r := range []string{"eu", "us", "ap"} {
		region := clusterfile.Region{Name: r}
		for _, n := range []string{"1", "2", "3"} {
			region.Servers = append(region.Servers, clusterfile.Server{Name: r + "-" + n})
		}
		f.Regions = append(f.Regions, region)
	}
	for _, w := range []string{"w1", "w2", "w3"} {
		f.Witnesses = append(f.Witnesses, clusterfile.Witness{Name: w})
	}
	f.Partitions = []clusterfile.Partition{{Name: "p", Prefer: []string{"eu", "us", "ap"}}, {Name: "q", Prefer: []string{"ap"}}}
	return world{
		file: f, owners: map[string]string{"p": "us", "q": "ap"}, leaders: map[string]string{"us": "us-2", "eu": "eu-1"},
		chosen: 2, pick: func(int) int { return 1 },
	}
}

func target(t *testing.T, s string) plan.Target {
	t.Helper()
	x, err := plan.ParseTarget(s)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func TestRolesAreResolved(t *testing.T) {
	w := three()
	for text, want := range map[string]string{
		"owner of p":               "us-1 us-2 us-3",
		"owner of partition 2":     "ap-1 ap-2 ap-3",
		"next owner of p":          "eu-1 eu-2 eu-3",
		"next owner of q":          "eu-1 eu-2 eu-3",
		"bystander of p":           "ap-1 ap-2 ap-3",
		"leader of the owner of p": "us-2",
		"followers of owner of p":  "us-1 us-3",
		"a follower of owner of p": "us-3",
		"leader of region eu":      "eu-1",
		"server ap-2":              "ap-2",
		"witness w2":               "w2",
		"2 witnesses":              "w3 w1",
		"all witnesses":            "w1 w2 w3",
		"leader of region ap":      "error: region ap has no leader now",
		"region xx":                "error: region xx: the cluster has [eu us ap]",
		"owner of r":               "error: partition r: the cluster has none",
		"owner of partition 3":     "error: partition 3: the cluster has 2",
		"7 witnesses":              "error: 7 witnesses: the cluster has 3",
		"server w1":                "error: server w1: the cluster has none of that name",
	} {
		got, err := w.processes(target(t, text))
		var names []string
		for _, p := range got {
			names = append(names, p.Name)
		}
		out := strings.Join(names, " ")
		if err != nil {
			out = "error: " + err.Error()
		}
		if out != want && (err == nil || !strings.HasPrefix(out, want)) {
			t.Errorf("%s: %s, want %s", text, out, want)
		}
	}
	delete(w.owners, "p")
	if _, err := w.processes(target(t, "owner of p")); err == nil {
		t.Error("a partition without owner has one")
	}
}

func TestLinksOfAStep(t *testing.T) {
	w := three()
	us, eu, w1 := site{"us", true}, site{"eu", true}, site{"w1", false}
	for name, c := range map[string]struct {
		step plan.Step
		n    int
		has  []link
		not  []link
	}{
		"a cut":     {plan.Step{Do: plan.Cut, From: target(t, "owner of p"), To: target(t, "region eu"), Both: true}, 2, []link{{us, eu}, {eu, us}}, nil},
		"one way":   {plan.Step{Do: plan.OneWay, From: target(t, "owner of p"), To: target(t, "region eu")}, 1, []link{{us, eu}}, nil},
		"unheard":   {plan.Step{Do: plan.OneWay, From: target(t, "owner of p"), To: target(t, "all sites")}, 5, []link{{us, eu}, {us, w1}}, []link{{eu, us}, {us, us}}},
		"isolation": {plan.Step{Do: plan.Isolate, Target: target(t, "owner of p")}, 10, []link{{us, w1}, {w1, us}}, []link{{eu, w1}}},
		"two isolated witnesses see each other": {
			plan.Step{Do: plan.Isolate, Target: target(t, "2 witnesses")}, 16, nil, []link{{site{"w3", false}, w1}, {w1, site{"w3", false}}},
		},
		"within a region": {
			plan.Step{Do: plan.OneWay, From: target(t, "leader of owner of p"), To: target(t, "followers of owner of p")}, 2,
			[]link{{site{"us-2", false}, site{"us-1", false}}}, []link{{site{"us-1", false}, site{"us-2", false}}},
		},
		"everywhere": {plan.Step{Do: plan.Delay, From: target(t, "all sites"), To: target(t, "all sites"), Both: true}, 30, []link{{us, eu}, {eu, us}, {w1, us}}, nil},
	} {
		got, err := w.links(c.step)
		if err != nil || len(got) != c.n {
			t.Errorf("%s: %d links, want %d: %v, %v", name, len(got), c.n, got, err)
		}
		for _, l := range c.has {
			if !slices.Contains(got, l) {
				t.Errorf("%s: no %v", name, l)
			}
		}
		for _, l := range c.not {
			if slices.Contains(got, l) {
				t.Errorf("%s: has %v", name, l)
			}
		}
	}
	if _, err := w.links(plan.Step{Do: plan.Cut, From: target(t, "owner of p"), To: target(t, "region us"), Both: true}); err == nil {
		t.Error("a region is cut from itself")
	}
}

// A cut is a rule in each process of each side, which expires by itself.
func TestRulesAreSetAtTheSenders(t *testing.T) {
	w := three()
	step := plan.Step{Do: plan.Cut, From: target(t, "owner of p"), To: target(t, "witness w1"), Both: true, Planes: []string{"votes", "gossip"}}
	links, err := w.links(step)
	if err != nil {
		t.Fatal(err)
	}
	rules := w.rules("x", step, links, 7*time.Second)
	if len(rules) != 4 {
		t.Fatalf("%d processes have rules: %v", len(rules), rules)
	}
	f := rules["w1"].GetFaults()
	if len(f) != 2 || f[0].GetPeer() != "region/us" || !f[0].GetDrop() || f[0].GetExpiresMs() != 7000 || f[1].GetPlane() != pb.Plane_PLANE_GOSSIP || f[0].GetId() == f[1].GetId() {
		t.Errorf("%v", f)
	}
	if f := rules["us-3"].GetFaults(); len(f) != 2 || f[0].GetPeer() != "w1" {
		t.Errorf("%v", f)
	}
}

// A process that starts again in the middle is told what is left, and no more.
func TestAStartedProcessCarriesWhatIsLeft(t *testing.T) {
	var c carried
	c.note("eu-1", &pb.SetFaultsRequest{Faults: []*pb.Fault{{Id: "a", Peer: "w1", Drop: true, ExpiresMs: 9000}}}, at(9000))
	c.note("eu-1", &pb.SetFaultsRequest{DiskFaults: []*pb.DiskFault{{Id: "b", Stall: true, ExpiresMs: 1000}}}, at(1000))
	left := c.left("eu-1", at(4000))
	if len(left.GetFaults()) != 1 || left.GetFaults()[0].GetExpiresMs() != 5000 || !left.GetFaults()[0].GetDrop() || len(left.GetDiskFaults()) != 0 {
		t.Errorf("%v", left)
	}
	if left := c.left("eu-2", at(0)); len(left.GetFaults()) != 0 {
		t.Errorf("%v", left)
	}
}

// Every shipped scenario fits the cluster that it asks for.
// cached are regions with a lease cache each.
func cached(regions []clusterfile.Region) []clusterfile.Region {
	out := slices.Clone(regions)
	for i := range out {
		out[i].Cache.Addresses = []string{"127.0.0.1:6379"}
	}
	return out
}

func TestShippedScenariosFitTheirCluster(t *testing.T) {
	for _, name := range scenarios.Names() {
		s, err := scenarios.Get(name)
		if err != nil {
			t.Fatal(err)
		}
		w := three()
		w.file.Regions = w.file.Regions[:s.Cluster.Regions]
		if s.Cluster.Redis {
			w.file.Regions = cached(w.file.Regions)
		}
		if err := w.check(s); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if s.Workload.Sessions <= s.Workload.Waiters {
			t.Errorf("%s: a session would wait for itself", name)
		}
	}
	s, err := plan.Parse([]byte("name: x\nsummary: y\nsteps: [{at: 1s, do: kill, target: region mars}, {at: 1s, do: isolate, target: server eu-1, for: 1s}]"))
	if err != nil {
		t.Fatal(err)
	}
	err = three().check(s)
	for _, want := range []string{"step 1 (kill region mars, line 3): region mars: the cluster has [eu us ap]", "step 2 (isolate server eu-1 for 1s, line 3): server eu-1: a server shares its region's links"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
}

// Without anybody who can signal processes a scenario is refused before its
// first step, and the step is named.
func TestRefusedBeforeTheFirstStep(t *testing.T) {
	for name, want := range map[string]string{
		"region-loss":      "step 2 (kill owner of partition 1) needs processes that can be signalled and started: eu-1: nothing here",
		"leader-disk-hang": "step 1 (disk-hang leader of the owner of partition 1 for 5s) ends a process, which must be started again: eu-1: nothing here",
		"cable-cut":        "",
	} {
		s, err := scenarios.Get(name)
		if err != nil {
			t.Fatal(err)
		}
		r := &rig{cluster: three().file, processes: nobody{}}
		err = r.reach(t.Context(), s)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Only lease caches that the cluster has can be taken down, by somebody who can.
func TestLeaseCachesThatCannotBeTakenDown(t *testing.T) {
	some := three()
	some.file.Regions = slices.Concat(cached(some.file.Regions[:1]), some.file.Regions[1:])
	for step, want := range map[string]struct{ none, some, reach string }{
		"{at: 1s, do: redis-down, for: 1s}": {
			none: "the cluster has no lease cache; a private one has them by 'redis: true'", reach: "redis-eu: nothing here can signal",
		},
		"{at: 1s, do: redis-down, target: region us, for: 1s}": {
			none: "the cluster has no lease cache", some: "region us has no lease cache; [eu] have", reach: "redis-eu: nothing here can signal",
		},
	} {
		s, err := plan.Parse([]byte("name: x\nsummary: y\nsteps: [" + step + "]"))
		if err != nil {
			t.Fatal(err)
		}
		r := &rig{cluster: some.file, processes: nobody{}}
		for what, got := range map[string]struct {
			err  error
			want string
		}{
			"none":  {three().check(s), want.none},
			"some":  {some.check(s), want.some},
			"reach": {r.reach(t.Context(), s), want.reach},
		} {
			if got.want == "" && got.err != nil || got.want != "" && (got.err == nil || !strings.Contains(got.err.Error(), got.want)) {
				t.Errorf("%s, %s: %v, want %q", step, what, got.err, got.want)
			}
		}
	}
}

// What a history says after the cut is not known, and what was open then may
// have happened.
func TestPrefixOfAHistory(t *testing.T) {
	h := history.History{
		Ops: []*history.Op{
			{Call: 1, Return: 2, Answer: history.Answer{Code: history.OK}},
			{Call: 3, Return: 9, Answer: history.Answer{Code: history.OK}},
			{Call: 6, Return: 7},
		},
		Messages: []history.Message{{At: 4}, {At: 5}},
		Beliefs:  []history.Belief{{At: 4}, {At: 6}},
	}
	p := prefix(h, 5)
	if len(p.Ops) != 2 || p.Ops[0].Unknown() || !p.Ops[1].Unknown() || p.Ops[1].Return != history.Never || len(p.Messages) != 1 || len(p.Beliefs) != 1 {
		t.Errorf("%+v", p)
	}
	if h.Ops[1].Unknown() {
		t.Error("the whole history was changed")
	}
}

// quietView is a cluster of two regions and a witness in which eu holds p.
func quietView() admin.View {
	ballot := func() *pb.Register {
		return &pb.Register{
			Promised: &pb.Ballot{Round: 3, Region: "eu", Incarnation: 7}, Accepted: &pb.Ballot{Round: 3, Region: "eu", Incarnation: 7},
		}
	}
	region := func(name, other string, left int64) admin.RegionView {
		return admin.RegionView{Name: name, Status: &pb.StatusResponse{
			Partitions: []*pb.PartitionStatus{{Name: "p", Register: ballot(), HeldNs: left}},
			Peers:      []*pb.PeerReport{{Region: other, Verdict: pb.Verdict_VERDICT_HEALTHY}},
		}}
	}
	return admin.View{
		Regions: []admin.RegionView{region("eu", "us", 1), region("us", "eu", 0)},
		Witnesses: []admin.WitnessView{{
			Process:  clusterfile.Process{Name: "w1"},
			Describe: &pb.DescribeVoterResponse{Registers: []*pb.RegisterStatus{{Partition: "p", Register: ballot()}}},
		}},
	}
}

func TestSettled(t *testing.T) {
	if err := unsettled(quietView()); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(v *admin.View){
		"p has no owner":             func(v *admin.View) { v.Regions[0].Status.Partitions[0].HeldNs = 0 },
		"us does not hear eu":        func(v *admin.View) { v.Regions[1].Status.Peers[0].Verdict = pb.Verdict_VERDICT_CRASHED },
		"eu does not hear us":        func(v *admin.View) { v.Regions[0].Status.Peers = nil },
		"w1 has not the ballot of":   func(v *admin.View) { v.Witnesses[0].Describe.Registers[0].Register.Promised.Round++ },
		"us has not the ballot of":   func(v *admin.View) { v.Regions[1].Status.Partitions[0].Register.Accepted.Round-- },
		"it is gone":                 func(v *admin.View) { v.Witnesses[0].Err = errors.New("it is gone") },
		"a region that does not say": func(v *admin.View) { v.Regions[0].Err = errors.New("a region that does not say") },
	} {
		v := quietView()
		change(&v)
		if err := unsettled(v); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

func TestDirectoryOfADrill(t *testing.T) {
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]string{
		full:                                     "is not empty",
		filepath.Join(full, "file"):              "not a directory",
		filepath.Join(full, "no", "such", "dir"): "make its parent first",
	} {
		if _, err := makeDir(dir); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", dir, err)
		}
	}
	fresh := filepath.Join(t.TempDir(), "new")
	for range 2 { // made, and then empty
		if got, err := makeDir(fresh); err != nil || got != fresh {
			t.Errorf("%s, %v", got, err)
		}
	}
}

func TestOptionsSayAllThatIsWrong(t *testing.T) {
	_, err := Run(t.Context(), plan.Scenario{}, Options{D: time.Millisecond})
	for _, want := range []string{"d: 1ms", "ready, connect"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
	o := Options{
		Ready:   func(context.Context, *devcluster.Cluster) error { return nil },
		Connect: func(clusterfile.File, string, string) (*Connections, error) { return nil, errors.ErrUnsupported },
		D:       time.Second, Running: &Running{},
	}
	if err := o.Validate(); err == nil || !strings.Contains(err.Error(), "a running cluster has its own") {
		t.Errorf("%v", err)
	}
}

func TestPressureIsRead(t *testing.T) {
	const text = "some avg10=97.64 avg60=97.43 avg300=97.09 total=12113048310\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
	if d, ok := parsePressure(text); !ok || d != 12113048310*time.Microsecond {
		t.Errorf("%v, %v", d, ok)
	}
	for _, bad := range []string{"", "full avg10=0.00 total=7\n", "some total=x\n", "some avg10=1\n"} {
		if d, ok := parsePressure(bad); ok {
			t.Errorf("%q: %v", bad, d)
		}
	}
}
