package drill

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/drill/worker"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/devcluster"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestNeededRoundTrip(t *testing.T) {
	f := clusterfile.File{
		Regions:   []clusterfile.Region{{Name: "eu-frankfurt"}, {Name: "us-virginia"}, {Name: "ap-tokyo"}},
		Witnesses: []clusterfile.Witness{{Name: "w-oregon"}, {Name: "w-london"}, {Name: "w-singapore"}},
	}
	m := devcluster.DefaultMatrix()
	// Four of six: virginia itself, oregon 65, london 76, and then tokyo 150.
	if got := needed(f, m, "us-virginia", "eu-frankfurt"); got != 150*time.Millisecond {
		t.Errorf("us-virginia needs %v", got)
	}
	f.Witnesses = nil // two of three: itself and tokyo
	if got := needed(f, m, "us-virginia", "eu-frankfurt"); got != 150*time.Millisecond {
		t.Errorf("without witnesses us-virginia needs %v", got)
	}
	if got := needed(f, devcluster.Matrix{}, "us-virginia", "eu-frankfurt"); got != 0 {
		t.Errorf("without delays us-virginia needs %v", got)
	}
}

func TestWorkOfACutWorker(t *testing.T) {
	good := []worker.Event{
		{Kind: worker.Acquired, At: at(1)}, {Kind: worker.Written, At: at(5)},
		{Kind: worker.Written, At: at(15)}, {Kind: worker.Written, At: at(19)}, {Kind: worker.Written, At: at(21)},
	}
	if n, wrong := work("w", good, at(10), at(20)); n != 2 || len(wrong) != 0 {
		t.Errorf("%d writes, %q", n, wrong)
	}
	for name, events := range map[string][]worker.Event{
		"0 writes accepted in the cut": {good[0], good[1], good[4]},
		"0 after it":                   good[:4],
		"2 grants":                     append([]worker.Event{{Kind: worker.Acquired}}, good...),
		"lost: why":                    append([]worker.Event{{Kind: worker.Lost, Reason: "why"}}, good...),
		"refused: why":                 append([]worker.Event{{Kind: worker.Refused, Reason: "why"}}, good...),
		"failed: why":                  append([]worker.Event{{Kind: worker.Failed, Reason: "why"}}, good...),
	} {
		if _, wrong := work("w", events, at(10), at(20)); len(wrong) != 1 || !strings.Contains(wrong[0], name) {
			t.Errorf("%s: %q", name, wrong)
		}
	}
}

// quiet is a cluster of two regions and a witness in which eu holds p.
func quiet() admin.View {
	ballot := func() *pb.Register {
		b := &pb.Ballot{Round: 3, Region: "eu", Incarnation: 7}
		return &pb.Register{Promised: b, Accepted: &pb.Ballot{Round: 3, Region: "eu", Incarnation: 7}}
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
	if err := unsettled(quiet()); err != nil {
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
		v := quiet()
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
	_, err := Run(t.Context(), "region-loss", Options{D: time.Millisecond})
	for _, want := range []string{"d: 1ms", "ready, admin"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
	o := Options{
		Ready: func(context.Context, *devcluster.Cluster) error { return nil },
		Admin: func(clusterfile.File, string) (*admin.Cluster, func() error, error) {
			return nil, nil, errors.ErrUnsupported
		},
	}
	if _, err := Run(t.Context(), "flood", o); err == nil || !strings.Contains(err.Error(), "use region-loss or cable-cut") {
		t.Errorf("%v", err)
	}
}
