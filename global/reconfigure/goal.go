package reconfigure

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/internal/clusterfile"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Step is the next configuration on the way to a goal, and what it does in
// words.
type Step struct {
	Next *pb.ClusterConfiguration
	What string
}

// Goal returns the next step from a decided configuration, or nil when the goal
// is reached. It depends on nothing else, so any run of a command on any
// machine goes on where another one stopped.
type Goal func(c *pb.ClusterConfiguration) (*Step, error)

// Add makes v a member. It is an error if the cluster has another incarnation
// of it.
func Add(v *pb.Voter) Goal {
	return func(c *pb.ClusterConfiguration) (*Step, error) {
		switch old := config.VoterIncarnation(c, v.GetId()); old {
		case v.GetIncarnation():
			return nil, nil
		case 0:
			return addStep(c, v), nil
		default:
			return nil, fmt.Errorf("%s is a member with incarnation %x, its data now has %x: it was made anew; replace it", v.GetId(), old, v.GetIncarnation())
		}
	}
}

// Remove ends the membership of the voter of that id.
func Remove(id string) Goal {
	return func(c *pb.ClusterConfiguration) (*Step, error) {
		if config.VoterIncarnation(c, id) == 0 {
			return nil, nil
		}
		return removeStep(c, id)
	}
}

// Replace makes v a member instead of the voter named old. With another name, v
// is added first: until then the cluster can miss no more voters than before.
// With the same name (its data was wiped or restored, which makes a new
// incarnation) the old member must go first; so must it if there are as many
// witnesses as there may be.
func Replace(old string, v *pb.Voter) Goal {
	return func(c *pb.ClusterConfiguration) (*Step, error) {
		member := config.Member(c, v)
		has := config.VoterIncarnation(c, old) != 0
		switch {
		case old == v.GetId() && member:
			return nil, nil
		case old != v.GetId() && !member && config.VoterIncarnation(c, v.GetId()) != 0:
			return Add(v)(c) // says what is wrong
		case !has && !member, !member && old != v.GetId() && !witnessesFull(c, v):
			return addStep(c, v), nil
		case has:
			return removeStep(c, old)
		}
		return nil, nil
	}
}

func witnessesFull(c *pb.ClusterConfiguration, v *pb.Voter) bool {
	n := 0
	for _, m := range c.GetVoters() {
		if config.IsWitness(m.GetId()) {
			n++
		}
	}
	return config.IsWitness(v.GetId()) && n >= clusterfile.MaxWitnesses
}

func addStep(c *pb.ClusterConfiguration, v *pb.Voter) *Step {
	return &Step{config.WithVoter(c, v), fmt.Sprintf("add %s (incarnation %x)", v.GetId(), v.GetIncarnation())}
}

func removeStep(c *pb.ClusterConfiguration, id string) (*Step, error) {
	next := config.WithoutVoter(c, id)
	if err := config.Check(next); err != nil {
		return nil, fmt.Errorf("%s cannot be removed: %w", id, err)
	}
	return &Step{next, fmt.Sprintf("remove %s (incarnation %x)", id, config.VoterIncarnation(c, id))}, nil
}

// Settings gives the cluster the partitions, preferences, d and
// allow_even_witnesses of a cluster file. Members are changed by other
// commands: those of the file that are no voters, and the other way round, are
// in the error.
func Settings(f clusterfile.File) Goal {
	return func(c *pb.ClusterConfiguration) (*Step, error) {
		want := config.FromFile(f, c.GetClusterId())
		if f.Cluster != c.GetClusterName() {
			return nil, fmt.Errorf("the file is of cluster %q, this is %q", f.Cluster, c.GetClusterName())
		}
		next := config.Next(c)
		next.Partitions, next.Shards, next.DNs, next.AllowEvenWitnesses = want.Partitions, want.Shards, want.DNs, want.AllowEvenWitnesses
		if err := retire(c, next); err != nil {
			return nil, err
		}
		diff := config.Diff(c, next)
		if len(diff) == 0 && proto.Equal(asBefore(next, c), c) {
			return nil, nil
		}
		if err := config.CheckChange(c, next); err != nil {
			return nil, err
		}
		return &Step{next, "change settings: " + strings.Join(diff, "; ")}, nil
	}
}

// asBefore is next with what every step changes put back.
func asBefore(next, c *pb.ClusterConfiguration) *pb.ClusterConfiguration {
	b := proto.CloneOf(next)
	b.Version, b.PreviousVoters = c.GetVersion(), c.GetPreviousVoters()
	return b
}

// retire keeps the names of partitions that the next configuration lacks, and
// refuses one that comes back.
func retire(c, next *pb.ClusterConfiguration) error {
	has := map[string]bool{}
	for _, p := range next.GetPartitions() {
		has[p.GetName()] = true
	}
	for _, name := range c.GetRetiredPartitions() {
		if has[name] {
			return fmt.Errorf("partition %q was removed before, and its registers still exist; choose another name", name)
		}
	}
	for _, p := range c.GetPartitions() {
		if !has[p.GetName()] {
			next.RetiredPartitions = append(next.RetiredPartitions, p.GetName())
		}
	}
	return nil
}

// Drift says how the members of a cluster file differ from the configuration's.
func Drift(f clusterfile.File, c *pb.ClusterConfiguration) (out []string) {
	inFile := map[string]bool{}
	for _, p := range f.Processes() {
		if id := p.Voter(); !inFile[id] {
			inFile[id] = true
			if config.VoterIncarnation(c, id) == 0 {
				out = append(out, fmt.Sprintf("%s is in the file and no member; add it with `headlease %s`", id, command(id, "add")))
			}
		}
	}
	for _, v := range c.GetVoters() {
		if !inFile[v.GetId()] {
			out = append(out, fmt.Sprintf("%s is a member and not in the file; remove it with `headlease %s`, or put it back", v.GetId(), command(v.GetId(), "remove")))
		}
	}
	return out
}

func command(id, verb string) string {
	role, name, _ := strings.Cut(id, "/")
	return role + " " + verb + " " + name
}
