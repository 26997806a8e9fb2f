package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	cluster "github.com/headlease/headlease/client/admin"
)

func newServerCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "server",
		Short: "List, add, remove and replace the servers of a region, and say which leads",
		Long: `Server changes which servers make up a region's Raft group, while it runs.

A new server needs a certificate, a place in the cluster file (running processes
read the file again by themselves, and at once on SIGHUP), an empty data directory
and --join. It joins as a non-voter, which counts for nothing, gets the data, and
becomes a voter by 'server add'.

A server whose data is lost must not come back as the one it was: it could vote
again where it had promised otherwise. Start it with an empty directory and --join,
and replace it by itself: 'server replace eu-2 eu-2'.`,
		Example: `  headlease server list
  headlease server add eu-4
  headlease server replace eu-2 eu-4`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newServerListCmd(a), newServerAddCmd(a), newServerRemoveCmd(a), newServerReplaceCmd(a), newServerLeadCmd(a))
	return cmd
}

func newServerListCmd(a *app) *cobra.Command {
	var region string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "Show the servers of the regions: voters, leader, how far each is",
		Long: `List shows, by the word of each region's leader, who is in its Raft group and how
far each server is, and the servers of the cluster file that are not in it.

It exits with 1 when a region's leader does not answer.`,
		Example: `  headlease server list
  headlease server list --region eu --json`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withCluster(func(c *cluster.Cluster) error {
				var only []string
				if region != "" {
					if _, ok := c.File().Region(region); !ok {
						return fmt.Errorf("--region %q is not in the cluster file", region)
					}
					only = []string{region}
				}
				list := summariseServers(c.ListServers(cmd.Context(), only...))
				var err error
				if asJSON {
					enc := json.NewEncoder(a.stdout)
					enc.SetIndent("", "  ")
					err = enc.Encode(list)
				} else {
					err = printServers(a.stdout, list)
				}
				return errors.Join(err, serversVerdict(list))
			})
		},
	}
	cmd.Flags().StringVar(&region, "region", "", "this region only")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// regionServers is the JSON form of server list.
type regionServers struct {
	Region       string          `json:"region"`
	Error        string          `json:"error,omitempty"`
	Term         uint64          `json:"term,omitempty"`
	Commit       uint64          `json:"commit_index,omitempty"`
	FeatureLevel uint32          `json:"feature_level"`
	Warning      string          `json:"warning,omitempty"`
	Servers      []serverSummary `json:"servers"`
}

type serverSummary struct {
	Name   string `json:"name"`
	RaftID string `json:"raft_id,omitempty"`
	// Role is leader, voter, non-voter, or why it is not in the group.
	Role         string `json:"role"`
	Live         bool   `json:"live"`
	Last         uint64 `json:"last_index,omitempty"`
	Applied      uint64 `json:"applied_index,omitempty"`
	Behind       uint64 `json:"behind"`
	FeatureLevel uint32 `json:"feature_level"`
	Version      string `json:"version,omitempty"`
	Problem      string `json:"problem,omitempty"`
}

func summariseServers(regions []cluster.RegionServers) []regionServers {
	out := []regionServers{}
	for _, r := range regions {
		s := regionServers{
			Region: r.Region, Term: r.List.GetTerm(), Commit: r.List.GetCommitIndex(),
			FeatureLevel: r.List.GetFeatureLevel(), Warning: r.List.GetWarning(), Servers: []serverSummary{},
		}
		if r.Err != nil {
			s.Error = r.Err.Error()
		}
		for _, sv := range r.Servers {
			s.Servers = append(s.Servers, summariseServer(sv, r.Err == nil))
		}
		out = append(out, s)
	}
	return out
}

// summariseServer of a region whose leader answered, or did not.
func summariseServer(s cluster.Server, known bool) serverSummary {
	out := serverSummary{Name: s.Name, Version: s.Describe.GetVersion()}
	m := s.Member
	switch {
	case m != nil:
		out.RaftID, out.Live, out.Problem = m.GetRaftId(), m.GetLive(), m.GetProblem()
		out.Last, out.Applied, out.Behind, out.FeatureLevel = m.GetLastIndex(), m.GetAppliedIndex(), m.GetBehind(), m.GetFeatureLevel()
		switch {
		case m.GetLeader():
			out.Role = "leader"
		case m.GetVoter():
			out.Role = "voter"
		default:
			out.Role = "non-voter"
		}
		if !s.InFile && out.Problem == "" {
			out.Problem = "not in the cluster file"
		}
		return out
	case s.Err != nil:
		out.Role, out.Problem = "unreachable", s.Err.Error()
		return out
	}
	out.RaftID, out.Applied = s.Describe.GetRaftId(), s.Describe.GetAppliedIndex()
	switch {
	case !s.Describe.GetInitialised():
		out.Role = "uninitialised"
	case known:
		out.Role, out.Problem = "not a member", "it has data of a group that it does not belong to (any more); stop it"
	default:
		out.Role = "without a leader"
	}
	return out
}

func printServers(out io.Writer, list []regionServers) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintf(w, "REGION\tSERVER\tROLE\tLIVE\tLAST\tAPPLIED\tBEHIND\tLEVEL\tVERSION\tRAFT ID\n")
	for _, r := range list {
		for _, s := range r.Servers {
			live := "no"
			if s.Live {
				live = "yes"
			}
			id, version := s.RaftID, s.Version
			if id == "" {
				id = "-"
			}
			if version == "" {
				version = "-"
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%s\t%s\n", r.Region, s.Name, s.Role, live, s.Last, s.Applied, s.Behind, s.FeatureLevel, version, id)
		}
	}
	for _, r := range list {
		for _, s := range r.Servers {
			if s.Problem != "" {
				fmt.Fprintf(w, "%s: %s\n", s.Name, s.Problem)
			}
		}
		if r.Warning != "" {
			fmt.Fprintf(w, "region %s has %s\n", r.Region, r.Warning)
		}
	}
	return w.Flush()
}

func serversVerdict(list []regionServers) error {
	var errs []error
	for _, r := range list {
		if r.Error != "" {
			why, _, _ := strings.Cut(r.Error, "\n") // the list has the others
			errs = append(errs, fmt.Errorf("region %s has no leader that answers: %s", r.Region, why))
		}
	}
	return errors.Join(errs...)
}

// changeFlags are those of all commands that change a group.
type changeFlags struct {
	timeout time.Duration
	force   bool
}

func (f *changeFlags) add(cmd *cobra.Command, withForce bool) {
	cmd.Flags().DurationVar(&f.timeout, "timeout", 10*time.Minute, "how long to wait; running the command again goes on where it stopped")
	if withForce {
		cmd.Flags().BoolVar(&f.force, "force", false, "also when the region then survives no further loss; never without a live quorum")
	}
}

// changing runs a change of a group under its time limit, with progress on the
// standard error stream.
func (a *app) changing(ctx context.Context, f changeFlags, do func(ctx context.Context, c *cluster.Cluster, say func(string)) (warning string, err error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, f.timeout, errors.New("the time given by --timeout is over"))
	defer cancel()
	return a.withCluster(func(c *cluster.Cluster) error {
		say := func(s string) { _, _ = fmt.Fprintln(a.stderr, s) }
		warning, err := do(ctx, c, say)
		if warning != "" {
			say("warning: " + warning)
		}
		return err
	})
}

// reporter says how far a server is, when that has changed.
func reporter(say func(string)) func(cluster.Progress) {
	last := ""
	return func(p cluster.Progress) {
		line := fmt.Sprintf("%s has %d of %d entries, %d to go", p.Server, p.Commit-p.Behind, p.Commit, p.Behind)
		switch {
		case p.Waiting:
			line = fmt.Sprintf("waiting for %s: %s", p.Server, p.Reason)
		case p.Behind == 0:
			line = p.Server + " has caught up"
		}
		if line != last {
			last = line
			say(line)
		}
	}
}

func newServerAddCmd(a *app) *cobra.Command {
	var f changeFlags
	cmd := &cobra.Command{
		Use:   "add SERVER",
		Short: "Make a joined server a voter, once it has caught up",
		Long: `Add waits until the server, which runs with --join, is in its region's group as a
non-voter and has the log, and then makes it a voter. Progress goes to the standard
error stream. It may be run again at any time.`,
		Example: `  headlease region -f cluster.yaml --name eu-4 --data-dir /var/lib/headlease --join   # on the new host
  headlease server add eu-4`,
		Args: usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.changing(cmd.Context(), f, func(ctx context.Context, c *cluster.Cluster, say func(string)) (string, error) {
				warning, err := c.AddServer(ctx, args[0], reporter(say))
				if err == nil {
					err = a.printf("%s is a voter\n", args[0])
				}
				return warning, err
			})
		},
	}
	f.add(cmd, false)
	return cmd
}

func newServerRemoveCmd(a *app) *cobra.Command {
	var f changeFlags
	cmd := &cobra.Command{
		Use:   "remove SERVER",
		Short: "Take a server out of its region's group",
		Long: `Remove takes a server out of its region's Raft group. A leader hands leadership
over first. It is refused, and says who is missing, when the servers that would
remain have no live quorum: with those down nothing could be decided any more.

Stop the server afterwards, take it out of the cluster file, and delete its data.`,
		Example: `  headlease server remove eu-2`,
		Args:    usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.changing(cmd.Context(), f, func(ctx context.Context, c *cluster.Cluster, say func(string)) (string, error) {
				region, err := c.RegionOf(ctx, args[0])
				if err != nil {
					return "", err
				}
				already, warning, err := c.RemoveServer(ctx, region, args[0], "", f.force, say)
				switch {
				case err != nil:
				case already:
					err = a.printf("%s is not in the group of region %s\n", args[0], region)
				default:
					err = a.printf("%s is removed\n", args[0])
				}
				return warning, err
			})
		},
	}
	f.add(cmd, true)
	return cmd
}

func newServerReplaceCmd(a *app) *cobra.Command {
	var f changeFlags
	cmd := &cobra.Command{
		Use:   "replace OLD NEW",
		Short: "Put one server in the place of another",
		Long: `Replace adds NEW, which runs with an empty data directory and --join, waits until it
has caught up, and then removes OLD. With one name for both it brings back a server
whose data is lost: the old member is removed, and the server joins again.

It may be broken off at any point, also by the death of this machine: run the same
command again, and it goes on where it stopped.`,
		Example: `  headlease server replace eu-2 eu-4
  headlease server replace eu-2 eu-2   # the same host, after its disk was lost`,
		Args: usage(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.changing(cmd.Context(), f, func(ctx context.Context, c *cluster.Cluster, say func(string)) (string, error) {
				warning, err := c.ReplaceServer(ctx, args[0], args[1], f.force, say, reporter(say))
				if err == nil {
					err = a.printf("%s is in the place of %s\n", args[1], args[0])
				}
				return warning, err
			})
		},
	}
	f.add(cmd, true)
	return cmd
}

func newServerLeadCmd(a *app) *cobra.Command {
	var f changeFlags
	cmd := &cobra.Command{
		Use:   "lead SERVER",
		Short: "Hand the leadership of a region to one of its servers",
		Long: `Lead has the leader of the server's region hand leadership over to it, and returns
when it leads. The server must be a voter that has caught up; clients are without a
leader for some milliseconds. A server that is stopped hands leadership over by
itself; use this to choose the successor, for example before maintenance.`,
		Example: `  headlease server lead eu-2`,
		Args:    usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.changing(cmd.Context(), f, func(ctx context.Context, c *cluster.Cluster, _ func(string)) (string, error) {
				region, err := c.RegionOf(ctx, args[0])
				if err != nil {
					return "", err
				}
				already, err := c.HandOver(ctx, region, args[0])
				switch {
				case err != nil:
				case already:
					err = a.printf("%s leads region %s already\n", args[0], region)
				default:
					err = a.printf("%s leads region %s\n", args[0], region)
				}
				return "", err
			})
		},
	}
	f.add(cmd, false)
	return cmd
}
