package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	cluster "github.com/headlease/headlease/client/admin"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/backup"
	"github.com/headlease/headlease/region/state"
)

func newBackupCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "backup",
		Short: "Save, verify and restore a region's data",
		Long: `Backup saves the data of a region while it runs, checks such a file, and makes the
data directories of a new group from it when all of a region's servers are lost.

A region that has a quorum of its servers left needs no restore: 'headlease server
replace' brings the others back, and nothing is lost.`,
		Example: `  headlease backup save eu.backup --region eu
  headlease backup verify eu.backup`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newBackupSaveCmd(a), newBackupVerifyCmd(a), newBackupRestoreCmd(a))
	return cmd
}

func newBackupSaveCmd(a *app) *cobra.Command {
	var region string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "save FILE",
		Short: "Save a region's data to a file, while it runs",
		Long: `Save asks the region's leader for its state as of now, with everything acknowledged
before, and writes it to FILE. The file gets its name when it is whole and on disk;
one that was there before is replaced then, and only then.`,
		Example: `  headlease backup save /backup/eu-$(date +%F).backup --region eu`,
		Args:    usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withCluster(func(c *cluster.Cluster) error {
				region, err := oneRegion(c, region)
				if err != nil {
					return err
				}
				ctx, cancel := context.WithTimeoutCause(cmd.Context(), timeout, errors.New("the time given by --timeout is over"))
				defer cancel()
				var header *pb.BackupHeader
				var written int64
				p := &byteProgress{out: a.stderr, every: time.Second}
				err = backup.Save(args[0], func(put func(*pb.BackupFrame) error) error {
					return c.SaveBackup(ctx, region, func(f *pb.BackupFrame) error {
						if h := f.GetHeader(); h != nil {
							header = h
						}
						return put(f)
					})
				}, func(n int64) {
					written = n
					p.at(n)
				})
				if err != nil {
					return err
				}
				return a.printf("%s: region %s (incarnation %x) at entry %d, %d bytes\n", args[0], region, header.GetIncarnation(), header.GetIndex(), written)
			})
		},
	}
	cmd.Flags().StringVar(&region, "region", "", "which region; may be left out if the cluster file has one only")
	cmd.Flags().DurationVar(&timeout, "timeout", 30*time.Minute, "how long it may take")
	return cmd
}

// oneRegion is the region meant by a flag that may be left out.
func oneRegion(c *cluster.Cluster, flag string) (string, error) {
	names := c.File().RegionNames()
	switch {
	case flag == "" && len(names) == 1:
		return names[0], nil
	case flag == "":
		return "", fmt.Errorf("--region is not set; the cluster file has %s", strings.Join(names, ", "))
	case !slices.Contains(names, flag):
		return "", fmt.Errorf("--region %q is not in the cluster file; it has %s", flag, strings.Join(names, ", "))
	}
	return flag, nil
}

// byteProgress shows at most one line per interval.
type byteProgress struct {
	out   io.Writer
	every time.Duration
	last  time.Time
}

func (p *byteProgress) at(n int64) {
	now := time.Now()
	if p.last.IsZero() {
		p.last = now // a quick one says nothing
	}
	if now.Sub(p.last) >= p.every {
		p.last = now
		_, _ = fmt.Fprintf(p.out, "%.1f MiB\n", float64(n)/(1<<20))
	}
}

func newBackupVerifyCmd(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "verify FILE",
		Short: "Check a backup as a whole and show what is in it",
		Long: `Verify reads a backup to its end, with every checksum and every rule of the state,
and shows what is in it. A file that is empty, cut off or changed is refused, with
the offset at which it is damaged.`,
		Example: `  headlease backup verify eu.backup`,
		Args:    usage(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error {
			c, err := backup.Load(args[0])
			if err != nil {
				return err
			}
			s := summariseBackup(c)
			if !asJSON {
				return s.print(a.stdout)
			}
			enc := json.NewEncoder(a.stdout)
			enc.SetIndent("", "  ")
			return enc.Encode(s)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// backupSummary is the JSON form of backup verify.
type backupSummary struct {
	Cluster       string            `json:"cluster"`
	ClusterID     string            `json:"cluster_id"`
	Region        string            `json:"region"`
	Incarnation   string            `json:"incarnation"`
	Configuration uint64            `json:"configuration_version"`
	Index         uint64            `json:"index"`
	Term          uint64            `json:"term"`
	Time          time.Time         `json:"time"`
	Version       string            `json:"version"`
	FeatureLevel  uint32            `json:"feature_level"`
	Server        string            `json:"server"`
	Bytes         int64             `json:"bytes"`
	Sessions      int               `json:"sessions"`
	Leases        int               `json:"leases"`
	Waiters       int               `json:"waiters"`
	Partitions    []backupPartition `json:"partitions"`
}

type backupPartition struct {
	Name string `json:"name"`
	// Epoch is the highest ever adopted by the region, Live whether it was at the
	// time of the backup, Owner who owned it then by the region's own register.
	Epoch uint32 `json:"epoch"`
	Seq   uint32 `json:"seq"`
	Live  bool   `json:"live"`
	Owner string `json:"owner,omitempty"`
}

func summariseBackup(c backup.Content) backupSummary {
	h, n := c.Header, c.View.Counts()
	s := backupSummary{
		Cluster: h.GetCluster(), ClusterID: h.GetClusterId(), Region: h.GetRegion(), Incarnation: fmt.Sprintf("%x", h.GetIncarnation()),
		Configuration: h.GetConfigurationVersion(), Index: h.GetIndex(), Term: h.GetTerm(), Time: time.UnixMilli(h.GetUnixMs()).UTC(),
		Version: h.GetVersion(), FeatureLevel: h.GetFeatureLevel(), Server: h.GetServer(), Bytes: c.Bytes,
		Sessions: n.Sessions, Leases: n.Leases, Waiters: n.Waiters, Partitions: []backupPartition{},
	}
	for p := range c.View.Partitions() {
		s.Partitions = append(s.Partitions, partitionOf(p))
	}
	return s
}

func partitionOf(p state.Partition) backupPartition {
	return backupPartition{Name: p.Name, Epoch: uint32(p.Epoch), Seq: uint32(p.Seq), Live: p.Live(), Owner: p.Register.Value.Owner.Name}
}

func (s backupSummary) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintf(w, "cluster\t%s (%s), configuration %d\n", s.Cluster, s.ClusterID, s.Configuration)
	fmt.Fprintf(w, "region\t%s, incarnation %s\n", s.Region, s.Incarnation)
	fmt.Fprintf(w, "taken\t%s at %s, entry %d of term %d\n", s.Time.Format(time.RFC3339), s.Server, s.Index, s.Term)
	fmt.Fprintf(w, "written by\t%s, feature level %d\n", s.Version, s.FeatureLevel)
	fmt.Fprintf(w, "holds\t%d sessions, %d leases, %d waiters, %d bytes\n", s.Sessions, s.Leases, s.Waiters, s.Bytes)
	fmt.Fprintf(w, "\nPARTITION\tEPOCH\tSEQ\tLIVE\tOWNER\n")
	for _, p := range s.Partitions {
		owner := p.Owner
		if owner == "" {
			owner = "-"
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%v\t%s\n", p.Name, p.Epoch, p.Seq, p.Live, owner)
	}
	return w.Flush()
}

func newBackupRestoreCmd(a *app) *cobra.Command {
	var region string
	var data []string
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Make a region's data directories anew from a backup, offline",
		Long: `Restore makes new data directories from a backup, when a region has lost a quorum of
its servers for good. It talks to nobody. Stop whatever is left of the old region
first, and never start it again.

The region is a new incarnation of its data: no session and no lease of before, no
configuration until it is a voter again, nothing granted before the head leases of
before are over, and all tokens above all tokens of before. Everything after the
backup is lost, as is everything that only sessions had.

Give every server of the new group its directory; copy each to its host if they are
made elsewhere. More servers can join later with --join. Then, if the cluster has
other voters, 'headlease region replace' puts the region in the old one's place; if
this region is the only voter, 'headlease init' does.`,
		Example: `  headlease backup restore eu.backup --region eu --data eu-1=/var/lib/headlease
  headlease backup restore eu.backup --region eu --data eu-1=d1 --data eu-2=d2 --data eu-3=d3`,
		Args: usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			var targets []backup.Target
			for _, d := range data {
				name, dir, ok := strings.Cut(d, "=")
				if !ok || name == "" || dir == "" {
					return &usageError{cmd.CommandPath(), fmt.Errorf("--data %q is not SERVER=DIR", d)}
				}
				targets = append(targets, backup.Target{Name: name, DataDir: dir})
			}
			if region == "" || len(targets) == 0 {
				return &usageError{cmd.CommandPath(), errors.New("--region and --data SERVER=DIR are needed")}
			}
			c, err := backup.Load(args[0])
			if err != nil {
				return err
			}
			if got := c.Header.GetRegion(); got != region {
				return fmt.Errorf("backup %s is of region %s, not of %s; a region is restored under its own name", args[0], got, region)
			}
			r, err := backup.Restore(c, targets)
			if err != nil {
				return err
			}
			var errs []error
			for i, s := range r.Servers {
				errs = append(errs, a.printf("%s: %s\n", s.RaftID, targets[i].DataDir))
			}
			errs = append(errs, a.printf("region %s is incarnation %x now; start its servers on these directories, then run 'headlease region replace %s', or 'headlease init' if it is the cluster's only voter\n",
				r.Region, r.Incarnation, r.Region))
			return errors.Join(errs...)
		},
	}
	cmd.Flags().StringVar(&region, "region", "", "the region that the backup is of")
	cmd.Flags().StringArrayVar(&data, "data", nil, "SERVER=DIR: a server of the region and its new data directory; repeat it for each")
	return cmd
}
