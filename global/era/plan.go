package era

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// Jump is how far above the highest epoch that the survivors have seen the
	// registers are released at least: more changes of owner than they can have
	// missed, each of which takes at least D. Versions and the numbers of dedicated
	// shards go on as far above.
	Jump fence.Epoch = 1 << 10
	// Sides that can be forced of one cluster, each by an operator who takes the
	// others for destroyed, without an epoch that two of them use: each side has
	// Jump of its own. More regions than that share.
	Sides = 16
	// stride is what all sides have together.
	stride = uint64(Jump) * Sides
	// Level is the feature level that regions need for eras.
	Level = 3
)

// Input of Plan.
type Input struct {
	// Facts of every survivor.
	Facts []*pb.VoterFacts
	// Destroyed are the ids of all other voters.
	Destroyed []string
	// ID is random and not 0.
	ID uint64
}

// survivor is a voter with the facts of its processes.
type survivor struct {
	voter *pb.Voter
	facts []*pb.VoterFacts
	conf  *pb.ClusterConfiguration // the newest of its
}

// Plan plans the next era, and says what the operator should know of it. The
// error has all that is wrong with the input.
func Plan(in Input) (plan *pb.EraPlan, notes []string, err error) {
	survivors, newest, err := gather(in.Facts)
	if err != nil {
		return nil, nil, err
	}
	if err := check(in, survivors, newest); err != nil {
		return nil, nil, err
	}
	own := place{side: side(survivors, newest), counter: newest.GetEra().GetCounter(), met: met(in.Facts)}
	next := proto.CloneOf(newest)
	next.Era = &pb.Era{Counter: max(own.counter, own.met) + 1, Id: in.ID}
	next.Version = 0
	for _, f := range in.Facts {
		proposed := f.GetConfigRegister().GetProposed()
		next.Version = max(next.Version, f.GetConfiguration().GetVersion(), proposed.GetVersion())
		if proposed.GetVersion() > newest.GetVersion() {
			notes = append(notes, fmt.Sprintf("%s had accepted a proposal for configuration %d, which may have been decided and is not taken over (%s); make that change again",
				name(f), proposed.GetVersion(), strings.Join(config.Diff(newest, proposed), "; ")))
		}
		if alarmed := f.GetEraStop(); alarmed != nil {
			notes = append(notes, fmt.Sprintf("%s had stopped when it met era %v; this plan lets it vote again", name(f), register.EraOf(alarmed.GetEra())))
		}
	}
	// Versions number the moves of keys, and dedicated shards are numbered for good:
	// those that only destroyed voters knew are not used again.
	next.Version = own.goOn(next.Version)
	if n, err := config.NextDedicated(newest); err == nil {
		if n := own.goOn(uint64(n - 1)); n < math.MaxUint32 {
			next.LastDedicated = uint32(n)
		}
	}
	next.Voters = nil
	for _, v := range newest.GetVoters() {
		if slices.Contains(in.Destroyed, v.GetId()) {
			next.DestroyedVoters = append(next.DestroyedVoters, v)
		} else {
			next.Voters = append(next.Voters, v)
		}
	}
	next.PreviousVoters = proto.CloneOf(next).GetVoters()
	plan = &pb.EraPlan{Configuration: next}
	for _, p := range next.GetPartitions() {
		e := &pb.EraEpoch{Partition: p.GetName(), DNs: next.GetDNs()}
		for _, f := range in.Facts {
			for _, seen := range f.GetEpochs() {
				if seen.GetPartition() == p.GetName() {
					e.Epoch, e.DNs = max(e.GetEpoch(), seen.GetEpoch()), max(e.GetDNs(), seen.GetDNs())
				}
			}
		}
		first := own.goOn(uint64(e.GetEpoch()))
		if first > uint64(fence.MaxEpoch-Jump) {
			return nil, nil, fmt.Errorf("partition %s: epoch %d leaves no room: the era would begin at %d, and epochs end at %d", p.GetName(), e.GetEpoch(), first, fence.MaxEpoch)
		}
		e.Epoch = uint32(first)
		plan.Epochs = append(plan.Epochs, e)
	}
	if err := config.CheckPlan(plan); err != nil {
		return nil, nil, err
	}
	return plan, notes, nil
}

// side is the number of the survivors' side: which of the cluster's regions, by
// name, is the first that survives there. Sides have no survivor in common, and
// no side is without a region. Those declared destroyed before count too: on
// another side they may be the survivors.
func side(survivors []*survivor, c *pb.ClusterConfiguration) int {
	var regions []string
	for _, v := range slices.Concat(c.GetVoters(), c.GetDestroyedVoters()) {
		if !config.IsWitness(v.GetId()) && !slices.Contains(regions, v.GetId()) {
			regions = append(regions, v.GetId())
		}
	}
	slices.Sort(regions)
	return slices.IndexFunc(regions, func(id string) bool {
		return slices.ContainsFunc(survivors, func(s *survivor) bool { return s.voter.GetId() == id })
	})
}

// met is the highest counter of an era that a survivor has met and stopped at; 0: none has.
func met(facts []*pb.VoterFacts) (highest uint64) {
	for _, f := range facts {
		highest = max(highest, f.GetEraStop().GetEra().GetCounter())
	}
	return highest
}

// place of a side among others.
type place struct {
	side int
	// counter of the side's era, 0 before its first; met is the highest one that
	// it has met of another side.
	counter, met uint64
}

// goOn is where a side counts on that has seen up to highest: at least Jump
// above, and where no other side does whatever that has seen. In an era after
// another it is also above all that the other sides have reached, one of which
// may have been given up since: each era of theirs took less than two strides.
func (p place) goOn(highest uint64) uint64 {
	from := highest + uint64(Jump)
	if p.counter > 0 || p.met > 0 {
		ahead := max(p.met, p.counter) - p.counter
		from += stride * (2*ahead + 1)
	}
	return (from+stride-1)/stride*stride + uint64(p.side%Sides)*uint64(Jump)
}

// name is whose facts they are.
func name(f *pb.VoterFacts) string {
	if f.GetServer() != "" {
		return f.GetVoter().GetId() + " (" + f.GetServer() + ")"
	}
	return f.GetVoter().GetId()
}

// gather groups the facts by voter and finds the newest configuration.
func gather(facts []*pb.VoterFacts) ([]*survivor, *pb.ClusterConfiguration, error) {
	var (
		survivors []*survivor
		newest    *pb.ClusterConfiguration
		errs      []error
	)
	for _, f := range facts {
		c := f.GetConfiguration()
		if c == nil || f.GetVoter().GetIncarnation() == 0 {
			errs = append(errs, fmt.Errorf("%s has no configuration: it is no voter yet; leave it out", name(f)))
			continue
		}
		i := slices.IndexFunc(survivors, func(s *survivor) bool { return s.voter.GetId() == f.GetVoter().GetId() })
		if i < 0 {
			i, survivors = len(survivors), append(survivors, &survivor{voter: f.GetVoter()})
		}
		s := survivors[i]
		if !proto.Equal(s.voter, f.GetVoter()) {
			errs = append(errs, fmt.Errorf("%s: incarnations %x and %x are given; one of the two is old data, leave it out", name(f), s.voter.GetIncarnation(), f.GetVoter().GetIncarnation()))
		}
		s.facts = append(s.facts, f)
		if config.Newer(c, s.conf) {
			s.conf = c
		}
		switch {
		case newest != nil && c.GetClusterId() != newest.GetClusterId():
			errs = append(errs, fmt.Errorf("%s belongs to cluster %s, others to %s; give the facts of one cluster", name(f), c.GetClusterId(), newest.GetClusterId()))
		case newest != nil && c.GetEra().GetCounter() == newest.GetEra().GetCounter() && config.EraOf(c) != config.EraOf(newest):
			errs = append(errs, fmt.Errorf("%s is in era %v, others in era %v, which were forced on two sides; choose one side, and name the voters of the other as destroyed", name(f), config.EraOf(c), config.EraOf(newest)))
		case config.Newer(c, newest):
			newest = c
		}
	}
	if len(survivors) == 0 {
		errs = append(errs, errors.New("no facts are given; inspect the data of every survivor"))
	}
	return survivors, newest, errors.Join(errs...)
}

func check(in Input, survivors []*survivor, newest *pb.ClusterConfiguration) error {
	var errs []error
	fault := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if in.ID == 0 {
		fault("the era's id is 0; make a random one")
	}
	deciding, regions := 0, 0
	for _, s := range survivors {
		id := s.voter.GetId()
		switch {
		case slices.Contains(in.Destroyed, id):
			fault("%s is named as destroyed, and its data is given; it is one or the other", id)
		case config.VoterIncarnation(newest, id) == 0:
			fault("%s is no voter of configuration %d (era %v); leave it out", id, newest.GetVersion(), config.EraOf(newest))
		case !config.Member(newest, s.voter):
			fault("%s: its data has incarnation %x, configuration %d has %x: it was made anew; leave it out and name the voter as destroyed", id, s.voter.GetIncarnation(), newest.GetVersion(), config.VoterIncarnation(newest, id))
		}
		stopped := slices.ContainsFunc(s.facts, func(f *pb.VoterFacts) bool { return f.GetEraStop() != nil })
		if config.EraOf(s.conf) == config.EraOf(newest) && !stopped {
			deciding++
		}
		if !config.IsWitness(id) {
			regions++
			errs = append(errs, checkRegion(s))
		}
	}
	for _, id := range in.Destroyed {
		before := slices.ContainsFunc(newest.GetDestroyedVoters(), func(v *pb.Voter) bool { return v.GetId() == id })
		if config.VoterIncarnation(newest, id) == 0 && !before {
			fault("%s is named as destroyed and is no voter; the voters are %s", id, voterIDs(newest))
		}
	}
	for _, v := range newest.GetVoters() {
		known := slices.Contains(in.Destroyed, v.GetId()) || slices.ContainsFunc(survivors, func(s *survivor) bool { return s.voter.GetId() == v.GetId() })
		if !known {
			fault("%s is neither named as destroyed nor are its facts given; inspect its data, or name it once it is certain that it never runs again", v.GetId())
		}
	}
	if need := config.QuorumOf(newest).Voters; deciding >= need {
		fault("not needed: %d of %d voters are left, and %d decide; start them, and replace the lost ones with `headlease witness replace` and `headlease region replace`", deciding, len(newest.GetVoters()), need)
	}
	if regions == 0 && len(survivors) > 0 {
		fault("no region survives, and only a region can own a partition; restore one from its backup and set a new cluster up with it (`headlease backup restore`, `headlease init`)")
	}
	return errors.Join(errs...)
}

// checkRegion checks that what is known of a region is what a quorum of its
// servers knows.
func checkRegion(s *survivor) error {
	var errs []error
	var group []string
	var servers []string
	for _, f := range s.facts {
		if len(f.GetGroup()) > 0 {
			group = f.GetGroup() // of all the newest is meant, and they differ by one at most while it changes
		}
		if !slices.Contains(servers, f.GetServer()) {
			servers = append(servers, f.GetServer())
		}
		if f.GetFeatureLevel() < Level {
			errs = append(errs, fmt.Errorf("%s is at feature level %d and eras need %d; start the region's servers on this program until `headlease server list` shows it, then stop them again", name(f), f.GetFeatureLevel(), Level))
		}
	}
	have := 0
	for _, server := range group {
		if slices.Contains(servers, server) {
			have++
		}
	}
	if have <= len(group)/2 {
		errs = append(errs, fmt.Errorf("%s: facts of %d of its servers (%s) are given, a quorum of %s is needed; a region without a quorum of its servers is destroyed", s.voter.GetId(), have, strings.Join(servers, ", "), strings.Join(group, ", ")))
	}
	return errors.Join(errs...)
}

func voterIDs(c *pb.ClusterConfiguration) string {
	var ids []string
	for _, v := range c.GetVoters() {
		ids = append(ids, v.GetId())
	}
	return strings.Join(ids, ", ")
}

// Summary says what a plan does, one line each.
func Summary(p *pb.EraPlan) []string {
	c := p.GetConfiguration()
	out := []string{
		fmt.Sprintf("era %v of cluster %s, configuration %d", config.EraOf(c), c.GetClusterName(), c.GetVersion()),
		"voters: " + voterIDs(c),
	}
	for _, v := range c.GetDestroyedVoters() {
		out = append(out, fmt.Sprintf("declared destroyed: %s (incarnation %x)", v.GetId(), v.GetIncarnation()))
	}
	for _, e := range p.GetEpochs() {
		out = append(out, fmt.Sprintf("partition %s: released at epoch %d, granted to nobody for %v after the voters' start", e.GetPartition(), e.GetEpoch(), time.Duration(e.GetDNs())))
	}
	return out
}
