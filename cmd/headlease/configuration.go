package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	cluster "github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/reconfigure"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/clusterfile/load"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func newConfigShowCmd(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "show",
		Short: "Show the configuration in force, and which version each voter has",
		Long: `Show asks all voters and prints the newest configuration that is decided: the
voters with the incarnation of their data, the partitions and the regions that may
own them, d, and the exception table; then what each voter says of itself, and
how the cluster file differs.`,
		Example: `  headlease config show -f cluster.yaml --certs certs
  headlease config show --json | jq .voters`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withCluster(func(c *cluster.Cluster) error {
				conf, described, err := c.Configuration(cmd.Context())
				if err != nil {
					return err
				}
				s := summariseConfig(c.File(), conf, described)
				if asJSON {
					enc := json.NewEncoder(a.stdout)
					enc.SetIndent("", "  ")
					return enc.Encode(s)
				}
				return s.print(a.stdout)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newConfigApplyCmd(a *app) *cobra.Command {
	var yes bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "apply [FILE]",
		Short: "Give the cluster the settings of a cluster file",
		Long: `Apply shows how the partitions, preferences and d of a cluster file (FILE, or
--config) differ from the configuration in force, checks that they may change
while the cluster runs, asks, and has the voters decide on them.

What may change: which regions a partition prefers and in which order, d (it only
grows), allow_even_witnesses. What may not: the number of shards, and the
partition of a shard, since a resource's tokens rise within its partition. Members
are changed by 'headlease witness' and 'headlease region'.` + resumable,
		Example: "  headlease config apply cluster.yaml --certs certs",
		Args:    usage(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				a.config = args[0]
			}
			f, _, err := load.File(a.config)
			if err != nil {
				return err
			}
			return a.change(cmd.Context(), timeout, func(ctx context.Context, c *cluster.Cluster, progress func(string)) (*pb.ClusterConfiguration, error) {
				differs := false
				conf, err := c.Change(ctx, cluster.Change{
					Goal: reconfigure.Settings(f), Progress: progress,
					Confirm: func(diff []string) error {
						differs = true
						return a.confirm(yes, diff)
					},
				})
				if err == nil {
					if !differs {
						progress("the cluster has the settings of the file")
					}
					for _, line := range reconfigure.Drift(f, conf) {
						progress("note: " + line)
					}
				}
				return conf, err
			})
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	cmd.Flags().DurationVar(&timeout, "timeout", changeTimeout, "how long to wait for voters that do not answer")
	return cmd
}

// configSummary is the JSON form of config show.
type configSummary struct {
	Cluster    string                `json:"cluster"`
	ClusterID  string                `json:"cluster_id"`
	Era        string                `json:"era"`
	Version    uint64                `json:"version"`
	D          string                `json:"d"`
	Shards     uint32                `json:"shards"`
	Voters     []voterSummary        `json:"voters"`
	Partitions []configPartition     `json:"partitions"`
	Exceptions []exceptionSummary    `json:"exceptions,omitempty"`
	Pending    *pendingConfiguration `json:"pending,omitempty"`
	Drift      []string              `json:"drift,omitempty"`
	// Destroyed are the voters declared so and not replaced since.
	Destroyed []string `json:"destroyed,omitempty"`
}

type voterSummary struct {
	ID          string `json:"id"`
	Incarnation string `json:"incarnation"`
	// Has is the version that the voter has; 0: it did not answer, or has none.
	Has uint64 `json:"has"`
	// State is ok, behind, or why it does not count.
	State string `json:"state"`
}

type configPartition struct {
	Name   string   `json:"name"`
	Shards string   `json:"shards"`
	Prefer []string `json:"prefer"`
}

type exceptionSummary struct {
	Key   string `json:"key"`
	Shard uint32 `json:"shard"`
}

// pendingConfiguration is a proposal that some voter has accepted for the next
// version; the next change finishes it first.
type pendingConfiguration struct {
	Version uint64   `json:"version"`
	Changes []string `json:"changes"`
}

func summariseConfig(f clusterfile.File, conf *pb.ClusterConfiguration, described map[string]*pb.DescribeVoterResponse) configSummary {
	s := configSummary{
		Cluster: conf.GetClusterName(), ClusterID: conf.GetClusterId(), Version: conf.GetVersion(), Era: config.EraOf(conf).String(),
		D: time.Duration(conf.GetDNs()).String(), Shards: conf.GetShards(), Drift: reconfigure.Drift(f, conf),
	}
	for _, v := range conf.GetVoters() {
		s.Voters = append(s.Voters, summariseVoter(conf, v, described[v.GetId()]))
	}
	for _, v := range conf.GetDestroyedVoters() {
		s.Destroyed = append(s.Destroyed, v.GetId())
	}
	for _, p := range conf.GetPartitions() {
		var shards []string
		for _, r := range p.GetShards() {
			shards = append(shards, clusterfile.ShardRange{First: r.GetFirst(), Last: r.GetLast()}.String())
		}
		s.Partitions = append(s.Partitions, configPartition{p.GetName(), strings.Join(shards, ","), p.GetPrefer()})
	}
	for _, e := range conf.GetExceptions() {
		s.Exceptions = append(s.Exceptions, exceptionSummary{e.GetKey(), e.GetShard()})
	}
	var best config.Register
	for _, d := range described {
		if r := config.RegisterOf(d.GetConfigRegister()); d.GetConfiguration().GetVersion() == conf.GetVersion() && best.Accepted.Less(r.Accepted) {
			best = r
		}
	}
	if best.Proposed != nil {
		s.Pending = &pendingConfiguration{best.Proposed.GetVersion(), config.Diff(conf, best.Proposed)}
	}
	return s
}

func summariseVoter(conf *pb.ClusterConfiguration, v *pb.Voter, d *pb.DescribeVoterResponse) voterSummary {
	out := voterSummary{ID: v.GetId(), Incarnation: fmt.Sprintf("%x", v.GetIncarnation()), Has: d.GetConfiguration().GetVersion(), State: "ok"}
	is := d.GetState().GetVoter()
	switch {
	case d == nil:
		out.State = "did not answer"
	case d.GetEraStop() != nil:
		out.State = (&config.StoppedError{Own: config.EraOf(d.GetConfiguration()), Stop: d.GetEraStop()}).Error()
	case is.GetIncarnation() != v.GetIncarnation():
		out.State = fmt.Sprintf("does not count: its data was made anew (incarnation %x); replace it", is.GetIncarnation())
	case out.Has == 0:
		out.State = "behind: it has no configuration yet"
	case config.EraOf(d.GetConfiguration()) != config.EraOf(conf):
		out.State = fmt.Sprintf("is in era %v: apply the plan of era %v to its data", config.EraOf(d.GetConfiguration()), config.EraOf(conf))
	case out.Has < conf.GetVersion():
		out.State = fmt.Sprintf("behind: it has version %d", out.Has)
	}
	return out
}

func (s configSummary) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "cluster %s (%s), configuration %d, era %s, d %s, %d shards\n\n", s.Cluster, s.ClusterID, s.Version, s.Era, s.D, s.Shards)
	fmt.Fprintln(w, "VOTER\tINCARNATION\tSTATE")
	for _, v := range s.Voters {
		fmt.Fprintf(w, "%s\t%s\t%s\n", v.ID, v.Incarnation, v.State)
	}
	fmt.Fprintln(w, "\nPARTITION\tSHARDS\tPREFER")
	for _, p := range s.Partitions {
		fmt.Fprintf(w, "%s\t%s\t%s\n", p.Name, p.Shards, strings.Join(p.Prefer, ", "))
	}
	if len(s.Exceptions) > 0 {
		fmt.Fprintln(w, "\nKEY\tSHARD")
		for _, e := range s.Exceptions {
			fmt.Fprintf(w, "%s\t%d\n", e.Key, e.Shard)
		}
	}
	if s.Pending != nil {
		fmt.Fprintf(w, "\nconfiguration %d is proposed and may be decided; the next change finishes it: %s\n", s.Pending.Version, strings.Join(s.Pending.Changes, "; "))
	}
	for _, id := range s.Destroyed {
		fmt.Fprintf(w, "\nnote: %s was declared destroyed; replace it, with an empty data directory\n", id)
	}
	for _, line := range s.Drift {
		fmt.Fprintf(w, "\nnote: %s\n", line)
	}
	return w.Flush()
}

// stdin is where answers come from.
func (a *app) stdin() io.Reader {
	if a.in != nil {
		return a.in
	}
	return os.Stdin
}
