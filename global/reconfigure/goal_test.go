package reconfigure

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/internal/clusterfile"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func example(t testing.TB) (clusterfile.File, *pb.ClusterConfiguration) {
	t.Helper()
	f, _, err := clusterfile.Parse([]byte(clusterfile.Example()), nil)
	if err != nil {
		t.Fatal(err)
	}
	c := config.FromFile(f, "id")
	for i, id := range []string{"region/eu", "region/us", "witness/w1", "witness/w2", "witness/w3"} {
		c.Voters = append(c.Voters, &pb.Voter{Id: id, Incarnation: uint64(100 + i)})
	}
	return f, c
}

// steps follows a goal to its end; every step must be one that voters take.
func steps(t *testing.T, c *pb.ClusterConfiguration, goal Goal) (out []string, last *pb.ClusterConfiguration) {
	t.Helper()
	for range 10 {
		s, err := goal(c)
		if err != nil {
			t.Fatal(err)
		}
		if s == nil {
			return out, c
		}
		if err := config.CheckChange(c, s.Next); err != nil {
			t.Fatalf("%s: %v", s.What, err)
		}
		out, c = append(out, s.What), s.Next
	}
	t.Fatal("no end")
	return nil, nil
}

func voter(id string, inc uint64) *pb.Voter { return &pb.Voter{Id: id, Incarnation: inc} }

func TestH8GoalsTakeOneMemberAStep(t *testing.T) {
	_, c := example(t)
	for name, tc := range map[string]struct {
		goal Goal
		want []string
		has  *pb.Voter
		not  string
	}{
		"add":                  {Add(voter("witness/w4", 7)), []string{"add witness/w4 (incarnation 7)"}, voter("witness/w4", 7), ""},
		"add a member":         {Add(voter("witness/w1", 102)), nil, voter("witness/w1", 102), ""},
		"remove":               {Remove("witness/w2"), []string{"remove witness/w2 (incarnation 67)"}, nil, "witness/w2"},
		"remove a stranger":    {Remove("witness/w9"), nil, nil, "witness/w9"},
		"replace by another":   {Replace("witness/w2", voter("witness/w4", 7)), []string{"add witness/w4 (incarnation 7)", "remove witness/w2 (incarnation 67)"}, voter("witness/w4", 7), "witness/w2"},
		"replace by itself":    {Replace("witness/w2", voter("witness/w2", 7)), []string{"remove witness/w2 (incarnation 67)", "add witness/w2 (incarnation 7)"}, voter("witness/w2", 7), ""},
		"replace, same data":   {Replace("witness/w2", voter("witness/w2", 103)), nil, voter("witness/w2", 103), ""},
		"replace a region":     {Replace("region/eu", voter("region/eu", 7)), []string{"remove region/eu (incarnation 64)", "add region/eu (incarnation 7)"}, voter("region/eu", 7), ""},
		"replace one not here": {Replace("witness/w9", voter("witness/w4", 7)), []string{"add witness/w4 (incarnation 7)"}, voter("witness/w4", 7), "witness/w9"},
	} {
		t.Run(name, func(t *testing.T) {
			got, last := steps(t, c, tc.goal)
			if !slices.Equal(got, tc.want) {
				t.Errorf("steps %q, want %q", got, tc.want)
			}
			if tc.has != nil && !config.Member(last, tc.has) || tc.not != "" && config.VoterIncarnation(last, tc.not) != 0 {
				t.Errorf("%v", last.GetVoters())
			}
			if !slices.EqualFunc(last.GetPartitions(), c.GetPartitions(), func(a, b *pb.PartitionSpec) bool { return proto.Equal(a, b) }) {
				t.Error("the partitions changed")
			}
		})
	}
}

func TestGoalsRefuse(t *testing.T) {
	_, c := example(t)
	for name, tc := range map[string]struct {
		goal Goal
		want string
	}{
		"another incarnation": {Add(voter("witness/w1", 9)), "it was made anew; replace it"},
		"new one made anew":   {Replace("witness/w2", voter("witness/w1", 9)), "it was made anew; replace it"},
	} {
		if s, err := tc.goal(c); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, %v", name, s, err)
		}
	}
	for range 2 { // the last region stays
		c = config.WithoutVoter(c, "region/us")
	}
	if _, err := Remove("region/eu")(c); err == nil || !strings.Contains(err.Error(), "no region") {
		t.Error(err)
	}
}

func TestReplaceRemovesFirstWhenThereIsNoRoom(t *testing.T) {
	_, c := example(t)
	for i := 4; i <= clusterfile.MaxWitnesses; i++ {
		c = config.WithVoter(c, voter(fmt.Sprintf("witness/w%d", i), uint64(i)))
	}
	got, _ := steps(t, c, Replace("witness/w2", voter("witness/w8", 8)))
	if !slices.Equal(got, []string{"remove witness/w2 (incarnation 67)", "add witness/w8 (incarnation 8)"}) {
		t.Error(got)
	}
}

func TestSettings(t *testing.T) {
	f, c := example(t)
	if s, err := Settings(f)(c); s != nil || err != nil {
		t.Fatalf("nothing has changed: %v, %v", s, err)
	}
	if lines := Drift(f, c); len(lines) != 0 {
		t.Errorf("%q", lines)
	}
	f.D += time.Second
	f.Partitions = slices.Clone(f.Partitions)
	f.Partitions[0].Prefer = []string{"us", "eu"}
	got, last := steps(t, c, Settings(f))
	if len(got) != 1 || !strings.Contains(got[0], "~ d: 4s -> 5s; ~ partition east: prefer [eu us] -> [us eu]") || last.GetVersion() != 2 {
		t.Errorf("%q", got)
	}
	for name, tc := range map[string]struct {
		bend func(*clusterfile.File)
		want string
	}{
		"shorter d":      {func(f *clusterfile.File) { f.D = 2 * time.Second }, "it can only grow"},
		"shards":         {func(f *clusterfile.File) { f.Shards = 512; f.Partitions[1].Shards[0].Last = 511 }, "fixed when a cluster is made"},
		"a moved shard":  {func(f *clusterfile.File) { f.Partitions[0].Shards[0].Last++; f.Partitions[1].Shards[0].First++ }, "a shard keeps its partition"},
		"no partition":   {func(f *clusterfile.File) { f.Partitions[0].Shards[0].Last = 255; f.Partitions = f.Partitions[:1] }, "is gone"},
		"a stranger":     {func(f *clusterfile.File) { f.Partitions[0].Prefer = []string{"us", "moon"} }, `prefers "moon", which is no voter`},
		"another's file": {func(f *clusterfile.File) { f.Cluster = "other" }, `of cluster "other"`},
	} {
		f, c := example(t)
		tc.bend(&f)
		if s, err := Settings(f)(c); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, %v", name, s, err)
		}
	}
}

func TestRetiredPartitionsNeverComeBack(t *testing.T) {
	f, c := example(t)
	c.Partitions = append(c.Partitions, &pb.PartitionSpec{Name: "idle", Prefer: []string{"eu"}})
	_, last := steps(t, c, Settings(f))
	if !slices.Equal(last.GetRetiredPartitions(), []string{"idle"}) {
		t.Fatalf("%v", last.GetRetiredPartitions())
	}
	f.Partitions = append(slices.Clone(f.Partitions), clusterfile.Partition{Name: "idle", Prefer: []string{"eu"}})
	if _, err := Settings(f)(last); err == nil || !strings.Contains(err.Error(), "choose another name") {
		t.Error(err)
	}
}

func TestDrift(t *testing.T) {
	f, c := example(t)
	c = config.WithVoter(config.WithoutVoter(c, "witness/w1"), voter("witness/w9", 9))
	got := strings.Join(Drift(f, c), "\n")
	for _, want := range []string{"witness/w1 is in the file and no member; add it with `headlease witness add w1`", "witness/w9 is a member and not in the file"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q lacks %q", got, want)
		}
	}
}
