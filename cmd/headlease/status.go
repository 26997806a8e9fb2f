package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	cluster "github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/global/config"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func newStatusCmd(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show partitions and their owners, regions, witnesses, suspicion and round trips",
		Long: `Status asks every process of the cluster file and shows what they say: the owner
and epoch of each partition, the leader of each region, what each process
suspects of the regions (phi), and the measured round-trip times.

It exits with 1 when a partition has no owner that holds it.`,
		Example: `  headlease status -f cluster.yaml --certs certs
  headlease status --json | jq .partitions`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withCluster(func(c *cluster.Cluster) error {
				s := summarise(c, c.Look(cmd.Context()))
				if asJSON {
					enc := json.NewEncoder(a.stdout)
					enc.SetIndent("", "  ")
					if err := enc.Encode(s); err != nil {
						return err
					}
				} else if err := s.print(a.stdout); err != nil {
					return err
				}
				return s.verdict()
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// summary is the JSON form of status.
type summary struct {
	Cluster   string `json:"cluster"`
	ClusterID string `json:"cluster_id,omitempty"`
	// Era of the newest configuration that anybody has; more than "0" after a
	// force-quorum.
	Era        string             `json:"era,omitempty"`
	Partitions []partitionSummary `json:"partitions"`
	Regions    []regionSummary    `json:"regions"`
	Processes  []processSummary   `json:"processes"`
	Peers      []peerSummary      `json:"peers"`
	RoundTrips []tripSummary      `json:"round_trips"`
	// Voters that a region's leader has no answer from, or does not count.
	Voters []voterProblem `json:"voter_problems,omitempty"`
}

type partitionSummary struct {
	Name   string   `json:"name"`
	Owner  string   `json:"owner,omitempty"`
	Epoch  uint32   `json:"epoch,omitempty"`
	HeldMS int64    `json:"held_ms,omitempty"`
	Prefer []string `json:"prefer"`
	// Activity is what each region says it does about the partition.
	Activity map[string]string `json:"activity,omitempty"`
}

// regionSummary is a region by its leader's word.
type regionSummary struct {
	Name         string `json:"name"`
	Leader       string `json:"leader,omitempty"`
	FeatureLevel uint32 `json:"feature_level,omitempty"`
	Sessions     uint64 `json:"sessions"`
	Leases       uint64 `json:"leases"`
	Waiters      uint64 `json:"waiters"`
}

type processSummary struct {
	Name    string `json:"name"`
	Role    string `json:"role"`
	Region  string `json:"region,omitempty"`
	State   string `json:"state"`
	Term    uint64 `json:"term,omitempty"`
	Applied uint64 `json:"applied,omitempty"`
	Version string `json:"version,omitempty"`
	// Error says why it is unreachable.
	Error string `json:"error,omitempty"`
}

type peerSummary struct {
	Observer string  `json:"observer"`
	Region   string  `json:"region"`
	Verdict  string  `json:"verdict"`
	Phi      float64 `json:"phi"`
	SilentMS int64   `json:"silent_ms"`
}

type voterProblem struct {
	Region    string `json:"region"`
	Voter     string `json:"voter"`
	Problem   string `json:"problem"`
	Uncounted bool   `json:"uncounted"`
	// Stopped: the voter itself says why it votes no more, or that it is in another
	// era.
	Stopped bool `json:"stopped,omitempty"`
}

type tripSummary struct {
	From string  `json:"from"`
	To   string  `json:"to"`
	MS   float64 `json:"ms"`
}

func summarise(c *cluster.Cluster, v cluster.View) summary {
	file := c.File()
	s := summary{Cluster: file.Cluster}
	for i, o := range v.Owners(file) {
		p := partitionSummary{Name: o.Partition, Owner: o.Region, Epoch: o.Epoch, HeldMS: o.Held.Milliseconds(), Prefer: file.Partitions[i].Prefer}
		for _, r := range v.Regions {
			for _, ps := range r.Status.GetPartitions() {
				if ps.GetName() == o.Partition && ps.GetActivity() != "" {
					if p.Activity == nil {
						p.Activity = map[string]string{}
					}
					p.Activity[r.Name] = ps.GetActivity()
				}
			}
		}
		s.Partitions = append(s.Partitions, p)
	}
	peers := func(observer string, reports []*pb.PeerReport, trips []*pb.RoundTrip) {
		for _, r := range reports {
			verdict := strings.ToLower(strings.TrimPrefix(r.GetVerdict().String(), "VERDICT_"))
			s.Peers = append(s.Peers, peerSummary{observer, r.GetRegion(), verdict, r.GetPhi(), r.GetSilentNs() / 1e6})
		}
		for _, t := range trips {
			s.RoundTrips = append(s.RoundTrips, tripSummary{observer, t.GetPeer(), float64(t.GetRttNs()) / 1e6})
		}
	}
	for _, r := range v.Regions {
		s.Regions = append(s.Regions, regionSummary{
			r.Name, r.Status.GetLeader(), r.Status.GetFeatureLevel(), r.Status.GetSessions(), r.Status.GetLeases(), r.Status.GetWaiters(),
		})
		for _, p := range r.Status.GetVoterProblems() {
			s.Voters = append(s.Voters, voterProblem{Region: r.Name, Voter: p.GetVoter(), Problem: p.GetProblem(), Uncounted: p.GetUncounted()})
		}
		if r.Err == nil {
			s.ClusterID = r.Status.GetConfiguration().GetClusterId()
			peers(r.Name, r.Status.GetPeers(), r.Status.GetRoundTrips())
		}
	}
	for _, sv := range v.Servers {
		p := processSummary{Name: sv.Process.Name, Role: "region", Region: sv.Process.Region, State: "unreachable"}
		if d := sv.Describe; sv.Err == nil {
			p.Term, p.Applied, p.Version = d.GetTerm(), d.GetAppliedIndex(), d.GetVersion()
			switch {
			case d.GetIsLeader():
				p.State = "leader"
			case !d.GetInitialised():
				p.State = "uninitialised"
			case d.GetLeader() != "":
				p.State = "follower"
			default:
				p.State = "without a leader"
			}
		} else {
			p.Error = sv.Err.Error()
		}
		s.Processes = append(s.Processes, p)
	}
	for _, w := range v.Witnesses {
		p := processSummary{Name: w.Process.Name, Role: "witness", State: "unreachable"}
		if w.Err == nil {
			p.State, p.Version = "up", w.Describe.GetVersion()
			if w.Describe.GetConfiguration() == nil {
				p.State = "uninitialised"
			}
			peers(w.Process.Name, w.Describe.GetPeers(), w.Describe.GetRoundTrips())
		} else {
			p.Error = w.Err.Error()
		}
		s.Processes = append(s.Processes, p)
	}
	s.eras(v)
	return s
}

// eras finds the newest era, and the voters that are in another one or have
// stopped.
func (s *summary) eras(v cluster.View) {
	var newest *pb.ClusterConfiguration
	each := func(f func(voter string, c *pb.ClusterConfiguration, stop *pb.EraStop)) {
		for _, r := range v.Regions {
			f(config.RegionVoter(r.Name), r.Status.GetConfiguration(), r.Status.GetEraStop())
		}
		for _, w := range v.Witnesses {
			f(config.WitnessVoter(w.Process.Name), w.Describe.GetConfiguration(), w.Describe.GetEraStop())
		}
	}
	each(func(_ string, c *pb.ClusterConfiguration, _ *pb.EraStop) {
		if config.Newer(c, newest) {
			newest = c
		}
	})
	if newest != nil {
		s.Era = config.EraOf(newest).String()
	}
	each(func(voter string, c *pb.ClusterConfiguration, stop *pb.EraStop) {
		var why error
		switch own := config.EraOf(c); {
		case stop != nil:
			why = &config.StoppedError{Own: own, Stop: stop}
		case c != nil && own != config.EraOf(newest):
			why = &config.EraError{Own: own, Theirs: config.EraOf(newest)}
		default:
			return
		}
		s.Voters = append(s.Voters, voterProblem{Region: "-", Voter: voter, Problem: why.Error(), Stopped: true})
	})
}

// verdict is nil if every partition has an owner that holds it. Otherwise the
// error names those that have none, and every process that did not answer.
func (s summary) verdict() error {
	var errs []error
	for _, p := range s.Partitions {
		if p.Owner == "" {
			errs = append(errs, fmt.Errorf("no region holds partition %s", p.Name))
		}
	}
	if len(errs) == 0 {
		return nil
	}
	for _, p := range s.Processes {
		if p.Error != "" {
			errs = append(errs, errors.New(p.Error))
		}
	}
	return errors.Join(errs...)
}

func (s summary) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintf(w, "PARTITION\tOWNER\tEPOCH\tHELD\tPREFER\n")
	for _, p := range s.Partitions {
		owner, held := p.Owner, (time.Duration(p.HeldMS) * time.Millisecond).String()
		if owner == "" {
			owner, held = "none", "-"
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\n", p.Name, owner, p.Epoch, held, strings.Join(p.Prefer, " "))
	}
	if s.Era != "" && s.Era != "0" {
		fmt.Fprintf(w, "\nera %s: a quorum was forced; see 'headlease config show'\n", s.Era)
	}
	fmt.Fprintf(w, "\nREGION\tLEADER\tLEVEL\tSESSIONS\tLEASES\tWAITERS\n")
	for _, r := range s.Regions {
		leader := r.Leader
		if leader == "" {
			leader = "-"
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%d\n", r.Name, leader, r.FeatureLevel, r.Sessions, r.Leases, r.Waiters)
	}
	fmt.Fprintf(w, "\nPROCESS\tROLE\tREGION\tSTATE\tTERM\tAPPLIED\tVERSION\n")
	for _, p := range s.Processes {
		region := p.Region
		if region == "" {
			region = "-"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%d\t%s\n", p.Name, p.Role, region, p.State, p.Term, p.Applied, p.Version)
	}
	if len(s.Voters) > 0 {
		fmt.Fprintf(w, "\nREGION\tVOTER\tPROBLEM\n")
	}
	for _, p := range s.Voters {
		what := "does not answer: "
		switch {
		case p.Stopped:
			what = "says: "
		case p.Uncounted:
			what = "is not counted: "
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", p.Region, p.Voter, what+p.Problem)
	}
	fmt.Fprintf(w, "\nOBSERVER\tREGION\tVERDICT\tPHI\tSILENT\n")
	for _, p := range s.Peers {
		silent := (time.Duration(p.SilentMS) * time.Millisecond).String()
		if p.SilentMS < 0 {
			silent = "never heard"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%.2f\t%s\n", p.Observer, p.Region, p.Verdict, p.Phi, silent)
	}
	fmt.Fprintf(w, "\nFROM\tTO\tROUND TRIP\n")
	for _, t := range s.RoundTrips {
		fmt.Fprintf(w, "%s\t%s\t%.1f ms\n", t.From, t.To, t.MS)
	}
	return w.Flush()
}
