package admin

import (
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func explained(t *testing.T, change func(described map[string]*pb.DescribeVoterResponse, eu, us *RegionView)) *Explanation {
	t.Helper()
	ids := []string{"region/eu", "region/us", "witness/w1", "witness/w2", "witness/w3"}
	conf := &pb.ClusterConfiguration{
		ClusterId: "c", Version: 3, DNs: int64(4 * time.Second),
		Partitions: []*pb.PartitionSpec{{Name: "p", Prefer: []string{"eu", "us"}}, {Name: "other", Prefer: []string{"us"}}},
	}
	described := map[string]*pb.DescribeVoterResponse{}
	for i, id := range ids {
		v := &pb.Voter{Id: id, Incarnation: uint64(i + 1)}
		conf.Voters = append(conf.Voters, v)
		b := &pb.Ballot{Round: 7, Region: "eu", Incarnation: 1}
		described[id] = &pb.DescribeVoterResponse{
			State: &pb.VoterState{Voter: v}, Configuration: conf, Version: "v1",
			Registers: []*pb.RegisterStatus{{Partition: "p", RemainingNs: int64(3 * time.Second), Register: &pb.Register{
				Promised: b, Accepted: b, Value: &pb.Value{Owner: "eu", OwnerIncarnation: 1, Epoch: 5, DNs: int64(4 * time.Second)},
			}}},
			Peers: []*pb.PeerReport{{Region: "eu", Verdict: pb.Verdict_VERDICT_HEALTHY, Phi: 0.5, SilentNs: int64(100 * time.Millisecond)}},
		}
	}
	eu := RegionView{Name: "eu", Status: &pb.StatusResponse{Partitions: []*pb.PartitionStatus{{
		Name: "p", Phase: pb.PartitionPhase_PARTITION_PHASE_ACTIVE, Epoch: 5, HeldNs: int64(3 * time.Second), Activity: "holding",
	}}}}
	us := RegionView{Name: "us", Status: &pb.StatusResponse{Partitions: []*pb.PartitionStatus{{Name: "p", Phase: pb.PartitionPhase_PARTITION_PHASE_ABSENT}}}}
	change(described, &eu, &us)
	e, err := explain("p", conf, described, []RegionView{eu, us})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestExplainPartition(t *testing.T) {
	for name, c := range map[string]struct {
		change func(described map[string]*pb.DescribeVoterResponse, eu, us *RegionView)
		owner  string
		want   []string
	}{
		"held": {func(map[string]*pb.DescribeVoterResponse, *RegionView, *RegionView) {}, "eu", []string{
			"region eu was chosen with ballot 7.eu and renews", "to renew: 3 of 5 voters, region eu among them; 5 answer",
		}},
		"lost": {func(d map[string]*pb.DescribeVoterResponse, eu, _ *RegionView) {
			eu.Status, eu.Err = nil, errors.New("nobody answers")
			d["region/eu"] = nil
			d["witness/w1"].Registers[0].RemainingNs = 0
			d["witness/w2"].Peers[0].Verdict = pb.Verdict_VERDICT_CRASHED
		}, "", []string{
			"region eu is the last owner that was accepted (ballot 7.eu, epoch 5)",
			"one of eu, us reaches 3 of 5 voters and 2 of 3 witnesses; 4 and 3 answer",
			"V2: the last head lease still runs at region/us, witness/w2, witness/w3; it is over in 3s",
			"V3: region/us, witness/w1, witness/w3 still hear region eu", "missing: region/eu (does not answer)",
		}},
		"released": {func(d map[string]*pb.DescribeVoterResponse, eu, _ *RegionView) {
			eu.Status.Partitions[0].HeldNs = 0
			for _, v := range d {
				v.Registers[0].Register.Value = &pb.Value{Epoch: 5, DNs: int64(4 * time.Second), Successor: "us", Reason: "drained"}
			}
		}, "", []string{`is a release of epoch 5 for region "us": drained`}},
		"not the preferred one": {func(d map[string]*pb.DescribeVoterResponse, eu, us *RegionView) {
			us.Status, eu.Status = eu.Status, us.Status
			for _, v := range d {
				v.Registers[0].Register.Value.Owner, v.Registers[0].Register.Value.Reason = "us", "transferred"
			}
		}, "us", []string{"by a planned transfer", "region eu is preferred to it", "headlease partition transfer p --to eu"}},
		"voters that do not count": {func(d map[string]*pb.DescribeVoterResponse, _, _ *RegionView) {
			d["witness/w1"].State = &pb.VoterState{Voter: &pb.Voter{Id: "witness/w1", Incarnation: 99}}
			d["witness/w2"].Configuration = &pb.ClusterConfiguration{Version: 2}
			d["witness/w3"].Registers[0].Register.Alarm = "two values"
		}, "eu", []string{"2 answer", "witness/w1 (does not count: its data was made anew; replace it)", "witness/w2 (has configuration 2)", "witness/w3 (register alarmed: two values)"}},
	} {
		t.Run(name, func(t *testing.T) {
			e := explained(t, c.change)
			text := strings.Join(append(e.Why, e.Needs...), "\n")
			if e.Owner != c.owner {
				t.Errorf("owner %q, want %q", e.Owner, c.owner)
			}
			for _, want := range c.want {
				if !strings.Contains(text, want) {
					t.Errorf("want %q in\n%s", want, text)
				}
			}
		})
	}
	e := explained(t, func(map[string]*pb.DescribeVoterResponse, *RegionView, *RegionView) {})
	if v := e.Voters[2]; v.Renewed != time.Second || v.Remaining != 3*time.Second || v.Phi != 0.5 || v.Verdict != "healthy" || v.Promised != "7.eu" {
		t.Errorf("%+v", v)
	}
	if _, err := explain("nope", &pb.ClusterConfiguration{Partitions: []*pb.PartitionSpec{{Name: "p"}}}, nil, nil); err == nil || !strings.Contains(err.Error(), "has p") {
		t.Errorf("unknown partition: %v", err)
	}
}

// TestF16ExplainOfAnEra: a partition that waits in a new era, and voters that are
// not in it.
func TestF16ExplainOfAnEra(t *testing.T) {
	first := register.Era{Counter: 1, ID: 7 << 32}
	conf := &pb.ClusterConfiguration{
		ClusterId: "c", Version: 2, DNs: 4e9, Era: first.Proto(), Partitions: []*pb.PartitionSpec{{Name: "p", Prefer: []string{"eu"}}},
		Voters: []*pb.Voter{{Id: "region/eu", Incarnation: 1}, {Id: "witness/w1", Incarnation: 2}, {Id: "witness/w2", Incarnation: 3}},
	}
	describe := func(v *pb.Voter, c *pb.ClusterConfiguration, rec register.Record) *pb.DescribeVoterResponse {
		return &pb.DescribeVoterResponse{
			State: &pb.VoterState{Voter: v}, Configuration: c,
			Registers: []*pb.RegisterStatus{{Partition: "p", Register: rec.Proto(), RemainingNs: 1e9}},
		}
	}
	old := proto.CloneOf(conf)
	old.Era, old.Version = nil, 1
	before := register.Ballot{Round: 99, Region: "us", Incarnation: 9}
	described := map[string]*pb.DescribeVoterResponse{
		"region/eu":  describe(conf.Voters[0], conf, register.EraRecord(first, 1029, 4e9)),
		"witness/w1": describe(conf.Voters[1], old, register.Record{Promised: before, Accepted: before, Value: register.Value{Owner: register.Region{Name: "us", Incarnation: 9}, Epoch: 5, D: 4e9}}),
		"witness/w2": describe(conf.Voters[2], conf, register.EraRecord(first, 1029, 4e9)),
	}
	described["witness/w2"].EraStop = &pb.EraStop{Era: &pb.Era{Counter: 1, Id: 9}, By: "region/us"}
	e, err := explain("p", conf, described, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(e.Why[0], "force-quorum began era 1-00000007: the partition is released at epoch 1029") {
		t.Errorf("%q", e.Why)
	}
	for i, want := range []string{"", "is in era 0, the cluster in era 1-00000007: apply the plan", "has met era 1-00000000 (told by region/us) and votes no more: two operators"} {
		if got := e.Voters[i].Problem; !strings.Contains(got, want) || (got == "") != (want == "") {
			t.Errorf("%s: %q, want %q", e.Voters[i].ID, got, want)
		}
	}
}
