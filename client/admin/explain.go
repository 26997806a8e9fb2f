package admin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Explanation says who owns a partition, why, and what every voter knows of it.
type Explanation struct {
	Partition string
	// Owner holds the head lease under Epoch for Left more, by its own word; empty:
	// nobody says so.
	Owner string
	Epoch uint32
	Left  time.Duration
	// Version of the configuration, D, and the regions that may own it.
	Version uint64
	D       time.Duration
	Prefer  []string
	// Why and Needs are sentences: how the owner has it, and what it takes to
	// change that or to get one.
	Why, Needs []string
	Voters     []VoterExplanation
	Regions    []RegionExplanation
}

// VoterExplanation is a voter's register of the partition.
type VoterExplanation struct {
	ID string
	// Problem says why it does not count; empty: it does.
	Problem string
	// Version of its configuration, Software of its program.
	Version  uint64
	Software string
	// Promised and Accepted are ballots; Accepted's value is Owner's (empty:
	// released) under Epoch.
	Promised, Accepted string
	Owner              string
	Epoch              uint32
	Reason             string
	// Remaining is what the head lease has left on its clock. Renewed is how long
	// ago it last renewed it; negative: longer than D, or never.
	Remaining, Renewed time.Duration
	// Verdict, Phi and Silent are what it hears of the owner's region.
	Verdict string
	Phi     float64
	Silent  time.Duration
}

// RegionExplanation is what a region's leader does about the partition.
type RegionExplanation struct {
	Name, Phase, Activity string
	// Transfer that runs, in words.
	Transfer string
	// Problem says why there is no answer.
	Problem string
}

// Explain asks all processes and puts together what they say of a partition.
func (c *Cluster) Explain(ctx context.Context, partition string) (*Explanation, error) {
	conf, described, err := c.Configuration(ctx)
	if err != nil {
		return nil, err
	}
	view := c.Look(ctx)
	// A region as a voter is its leader, which Configuration has asked.
	return explain(partition, conf, described, view.Regions)
}

func explain(partition string, conf *pb.ClusterConfiguration, described map[string]*pb.DescribeVoterResponse, regions []RegionView) (*Explanation, error) {
	specs := conf.GetPartitions()
	i := slices.IndexFunc(specs, func(p *pb.PartitionSpec) bool { return p.GetName() == partition })
	if i < 0 {
		var names []string
		for _, p := range specs {
			names = append(names, p.GetName())
		}
		return nil, fmt.Errorf("there is no partition %q; the configuration has %s", partition, strings.Join(names, ", "))
	}
	e := &Explanation{Partition: partition, Version: conf.GetVersion(), D: time.Duration(conf.GetDNs()), Prefer: specs[i].GetPrefer()}
	for _, r := range regions {
		e.region(r)
	}
	newest := e.newest(described)
	for _, v := range conf.GetVoters() {
		e.voter(conf, v, described[v.GetId()], newest)
	}
	e.conclude(conf, newest)
	return e, nil
}

// region takes what a region's leader says.
func (e *Explanation) region(r RegionView) {
	out := RegionExplanation{Name: r.Name}
	if r.Err != nil {
		out.Problem = firstLine(r.Err)
	}
	for _, p := range r.Status.GetPartitions() {
		if p.GetName() != e.Partition {
			continue
		}
		out.Phase = strings.ToLower(strings.TrimPrefix(p.GetPhase().String(), "PARTITION_PHASE_"))
		out.Activity = p.GetActivity()
		if t := p.GetTransfer(); t != nil {
			out.Transfer = fmt.Sprintf("to region %s, %s: %d leases and %d lock delays left, %v to go", t.GetSuccessor(),
				strings.ToLower(strings.TrimPrefix(t.GetStage().String(), "TRANSFER_STAGE_")), t.GetLeases(), t.GetLockDelays(), time.Duration(t.GetLeftNs()).Round(time.Millisecond))
		}
		if p.GetHeldNs() > 0 && p.GetEpoch() >= e.Epoch {
			e.Owner, e.Epoch, e.Left = r.Name, p.GetEpoch(), time.Duration(p.GetHeldNs())
		}
	}
	e.Regions = append(e.Regions, out)
}

// newest is the record of the highest ballot that any voter has accepted.
func (e *Explanation) newest(described map[string]*pb.DescribeVoterResponse) (rec register.Record) {
	for _, d := range described {
		for _, r := range d.GetRegisters() {
			if at := register.RecordOf(r.GetRegister()); r.GetPartition() == e.Partition && rec.Accepted.Less(at.Accepted) {
				rec = at
			}
		}
	}
	return rec
}

func (e *Explanation) voter(conf *pb.ClusterConfiguration, v *pb.Voter, d *pb.DescribeVoterResponse, newest register.Record) {
	out := VoterExplanation{ID: v.GetId(), Version: d.GetConfiguration().GetVersion(), Software: d.GetVersion(), Renewed: -1}
	switch {
	case d == nil:
		out.Problem = "does not answer"
	case d.GetState().GetVoter().GetIncarnation() != v.GetIncarnation():
		out.Problem = "does not count: its data was made anew; replace it"
	case out.Version == 0:
		out.Problem = "has no configuration yet"
	case d.GetEraStop() != nil:
		out.Problem = (&config.StoppedError{Own: config.EraOf(d.GetConfiguration()), Stop: d.GetEraStop()}).Error()
	case config.EraOf(d.GetConfiguration()) != config.EraOf(conf):
		out.Problem = fmt.Sprintf("is in era %v, the cluster in era %v: apply the plan of force-quorum to its data", config.EraOf(d.GetConfiguration()), config.EraOf(conf))
	case out.Version != conf.GetVersion():
		out.Problem = fmt.Sprintf("has configuration %d", out.Version)
	}
	for _, r := range d.GetRegisters() {
		if r.GetPartition() != e.Partition {
			continue
		}
		rec := register.RecordOf(r.GetRegister())
		out.Promised, out.Accepted = rec.Promised.String(), rec.Accepted.String()
		out.Owner, out.Epoch, out.Reason = rec.Value.Owner.Name, uint32(rec.Value.Epoch), rec.Value.Reason
		if out.Remaining = time.Duration(r.GetRemainingNs()); out.Remaining > 0 {
			out.Renewed = rec.Value.D - out.Remaining
		}
		if rec.Alarm != "" {
			out.Problem = "register alarmed: " + rec.Alarm
		}
	}
	for _, p := range d.GetPeers() {
		if owner := newest.Value.Owner.Name; owner != "" && p.GetRegion() == owner {
			out.Verdict = strings.ToLower(strings.TrimPrefix(p.GetVerdict().String(), "VERDICT_"))
			out.Phi, out.Silent = p.GetPhi(), time.Duration(p.GetSilentNs())
		}
	}
	e.Voters = append(e.Voters, out)
}

// conclude says why it is as it is and what would change it.
func (e *Explanation) conclude(conf *pb.ClusterConfiguration, newest register.Record) {
	why := func(format string, a ...any) { e.Why = append(e.Why, fmt.Sprintf(format, a...)) }
	needs := func(format string, a ...any) { e.Needs = append(e.Needs, fmt.Sprintf(format, a...)) }
	witnesses, answer, answerW := 0, 0, 0
	var silent, running, alive []string
	over := time.Duration(0)
	for _, v := range e.Voters {
		if config.IsWitness(v.ID) {
			witnesses++
		}
		if v.Problem != "" {
			silent = append(silent, v.ID+" ("+v.Problem+")")
			continue
		}
		answer++
		if config.IsWitness(v.ID) {
			answerW++
		}
		if v.Remaining > 0 && v.Owner != "" {
			running = append(running, v.ID)
			over = max(over, v.Remaining)
		}
		if v.Verdict == "healthy" || v.Verdict == "slow" {
			alive = append(alive, v.ID)
		}
	}
	majority, majorityW := len(e.Voters)/2+1, witnesses/2+1
	if witnesses == 0 {
		majorityW = 0
	}
	owner := newest.Value.Owner.Name
	switch {
	case newest.Accepted.IsZero():
		why("no voter that answers has accepted an owner: nobody has owned it yet")
	case newest.Value.Reason == register.ReasonForced:
		why("force-quorum began era %v: the partition is released at epoch %d, and nobody gets it before the head leases of before are over, %v after the voters' start", newest.Value.Era, newest.Value.Epoch, newest.Value.D)
	case newest.Value.Released():
		why("the newest accepted value (ballot %v) is a release of epoch %d for region %q: %s", newest.Accepted, newest.Value.Epoch, newest.Value.Successor, newest.Value.Reason)
	case e.Owner == owner:
		why("region %s was chosen with ballot %v and renews its head lease with a majority of the voters every %v", owner, newest.Accepted, e.D/5)
	case e.Owner == "":
		why("region %s is the last owner that was accepted (ballot %v, epoch %d) and does not hold the head lease: it has not renewed it in time", owner, newest.Accepted, newest.Value.Epoch)
	default:
		why("region %s says that it holds epoch %d; the newest accepted value names region %s with epoch %d: one of them is about to learn of it", e.Owner, e.Epoch, owner, newest.Value.Epoch)
	}
	if newest.Value.Reason == register.ReasonTransferred {
		why("it came by a planned transfer, so no automatic failback moves it")
	}
	if e.Owner != "" && len(e.Prefer) > 0 && e.Owner != e.Prefer[0] {
		why("region %s is preferred to it", e.Prefer[0])
		needs("to move it: headlease partition transfer %s --to %s", e.Partition, e.Prefer[0])
	}
	if e.Owner != "" {
		needs("to renew: %d of %d voters, region %s among them; %d answer", majority, len(e.Voters), e.Owner, answer)
	} else {
		needs("to get an owner: one of %s reaches %d of %d voters and %d of %d witnesses; %d and %d answer", strings.Join(e.Prefer, ", "), majority, len(e.Voters), majorityW, witnesses, answer, answerW)
		if len(running) > 0 {
			needs("V2: the last head lease still runs at %s; it is over in %v", strings.Join(running, ", "), over.Round(time.Millisecond))
		}
		if len(alive) > 0 && owner != "" {
			needs("V3: %s still hear region %s; another region waits until they do not, or for %v after the lease's end", strings.Join(alive, ", "), owner, 2*e.D)
		}
	}
	if len(silent) > 0 {
		needs("missing: %s", strings.Join(silent, ", "))
	}
}
