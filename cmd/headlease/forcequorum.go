package main

import (
	"bufio"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/era"
	"github.com/headlease/headlease/internal/fsync"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/replica"
	"github.com/headlease/headlease/witness"
)

func newForceQuorumCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "force-quorum",
		Short: "Let the survivors decide again when a majority of the voters is destroyed; offline",
		Long: `Force-quorum is for the day on which a majority of the voters (regions and witnesses)
is destroyed, so that nothing can be promoted and no member replaced. It begins a new
era, in which the survivors alone vote. It talks to nobody: it reads and changes data
directories of processes that do not run.

  1. Make certain that the lost voters never vote again: switched off, wiped, or cut
     from everything. Should they live on, two regions may own one partition.
  2. Stop every survivor: each witness, and all servers of each region. Each server
     needs to have been at feature level 3 (headlease server list).
  3. inspect the data of each, and bring the files to one place.
  4. plan from all of them, naming the lost voters.
  5. apply that one plan to the data of each, then start them.

A region survives if a quorum of its servers does. Nothing is granted before the
longest head lease of before is over (d), and every token is above all before. All
leases end. Every step may be repeated; if the plan is lost half-way, inspect and
plan once more.`,
		Example: `  headlease force-quorum inspect /var/lib/headlease > w1.json
  headlease force-quorum plan eu-1.json eu-2.json eu-3.json w1.json --destroyed region/us,region/ap,witness/w2,witness/w3 > era.json
  headlease force-quorum apply era.json --data /var/lib/headlease`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newForceInspectCmd(a), newForcePlanCmd(a), newForceApplyCmd(a))
	return cmd
}

func newForceInspectCmd(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "inspect DIR",
		Short: "Print what the data of a stopped witness or region server says of its voter",
		Long: `Inspect reads the data directory of a process that does not run and prints, as JSON,
what the plan needs to know of it: the configuration, the epochs that it has seen,
and whether it has stopped. It refuses while the process runs.`,
		Example: "  headlease force-quorum inspect /var/lib/headlease > w1.json",
		Args:    usage(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error {
			f, err := facts(args[0])
			if err != nil {
				return err
			}
			return a.printProto(f)
		},
	}
}

// facts are those of whatever process the directory is of.
func facts(dir string) (*pb.VoterFacts, error) {
	switch {
	case witness.IsData(dir):
		return witness.Facts(dir)
	case replica.IsData(dir):
		s, err := replica.ReadStopped(dir)
		if err != nil {
			return nil, err
		}
		f := &pb.VoterFacts{
			Cluster: s.Cluster, Voter: &pb.Voter{Id: config.RegionVoter(s.Region), Incarnation: uint64(s.View.Incarnation())},
			Server: s.Server, Group: s.Voters, Configuration: s.View.Configuration(), ConfigRegister: s.View.ConfigRegister().Proto(),
			EraStop: s.View.EraStop(), FeatureLevel: s.View.Level(),
		}
		for p := range s.View.Partitions() {
			seen := max(p.Epoch, p.Dropped, p.Register.Value.Epoch)
			f.Epochs = append(f.Epochs, &pb.EraEpoch{Partition: p.Name, Epoch: uint32(seen), DNs: int64(p.Register.Value.D)})
		}
		return f, nil
	}
	return nil, fmt.Errorf("%s is neither a witness's nor a region server's data directory", dir)
}

// stoppedForGood is the flag that says what no program can see.
const stoppedForGood = "they-never-vote-again"

func newForcePlanCmd(a *app) *cobra.Command {
	var destroyed []string
	var out string
	var confirmed bool
	cmd := &cobra.Command{
		Use:   "plan FACTS…",
		Short: "Plan the new era from the facts of all survivors",
		Long: `Plan makes one plan for all survivors from the files that 'inspect' wrote: one of each
surviving witness, and one of each server of the surviving regions, a quorum of each
at least. Every other voter must be named with --destroyed.

It refuses when the survivors can still decide: then start them, and replace the lost
ones ('headlease witness replace', 'headlease region replace').

It asks for the word "destroyed", or needs --` + stoppedForGood + `: that the voters named are
switched off or wiped, and that no copy of their data will ever be started. The plan
must not be made before that is so: the wait for their head leases counts from there.`,
		Example: `  headlease force-quorum plan eu-1.json eu-2.json eu-3.json w1.json \
    --destroyed region/us,region/ap,witness/w2,witness/w3 -o era.json`,
		Args: usage(cobra.MinimumNArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error {
			in := era.Input{Destroyed: destroyed, ID: randomEra()}
			for _, path := range args {
				f := &pb.VoterFacts{}
				if err := readProto(path, f); err != nil {
					return err
				}
				in.Facts = append(in.Facts, f)
			}
			plan, notes, err := era.Plan(in)
			if err != nil {
				return err
			}
			lines := era.Summary(plan)
			for _, n := range notes {
				lines = append(lines, "note: "+n)
			}
			for _, line := range lines {
				if _, err := fmt.Fprintln(a.stderr, line); err != nil {
					return err
				}
			}
			if err := a.confirmDestroyed(confirmed, plan); err != nil {
				return err
			}
			if out == "" {
				return a.printProto(plan)
			}
			return writeProto(out, plan)
		},
	}
	cmd.Flags().StringSliceVar(&destroyed, "destroyed", nil, "the voters (region/NAME, witness/NAME) that are lost and never vote again, with commas between")
	cmd.Flags().StringVarP(&out, "out", "o", "", "file for the plan (default: the standard output)")
	cmd.Flags().BoolVar(&confirmed, stoppedForGood, false, "do not ask whether the destroyed voters are stopped for good: they are")
	return cmd
}

// confirmDestroyed has the operator say that the lost voters are stopped.
func (a *app) confirmDestroyed(confirmed bool, plan *pb.EraPlan) error {
	if confirmed {
		return nil
	}
	var destroyed []string // those of an era before too
	for _, v := range plan.GetConfiguration().GetDestroyedVoters() {
		destroyed = append(destroyed, v.GetId())
	}
	if _, err := fmt.Fprintf(a.stderr, "If one of %s lives on, two regions may own one partition.\nType \"destroyed\" if all of them are stopped for good: ", strings.Join(destroyed, ", ")); err != nil {
		return err
	}
	line, _ := bufio.NewReader(a.stdin()).ReadString('\n')
	if strings.TrimSpace(line) != "destroyed" {
		return errors.New("not planned: make certain that they are stopped for good, then type \"destroyed\" or give --" + stoppedForGood)
	}
	return nil
}

func newForceApplyCmd(a *app) *cobra.Command {
	var dirs []string
	cmd := &cobra.Command{
		Use:   "apply PLAN",
		Short: "Take the data of a stopped survivor into the plan's era",
		Long: `Apply changes the data directory of a witness, by one transaction, or leaves the plan
in that of a region server, whose region commits it when it has a leader: apply it to
every server of the region. It refuses while the process runs, and data that the plan
was not made for. To apply it again changes nothing.`,
		Example: "  headlease force-quorum apply era.json --data /var/lib/headlease",
		Args:    usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(dirs) == 0 {
				return &usageError{cmd.CommandPath(), errors.New("--data is needed: the data directory of a stopped survivor")}
			}
			plan := &pb.EraPlan{}
			if err := readProto(args[0], plan); err != nil {
				return err
			}
			if err := config.CheckPlan(plan); err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			for _, dir := range dirs {
				said, err := applyPlan(dir, plan)
				if err != nil {
					return err
				}
				if err := a.printf("%s: %s\n", dir, said); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().StringArrayVar(&dirs, "data", nil, "data directory of a stopped survivor; repeat it for each on this machine")
	return cmd
}

// applyPlan applies a plan to whatever process the directory is of, and says what
// was done.
func applyPlan(dir string, plan *pb.EraPlan) (string, error) {
	e := config.EraOf(plan.GetConfiguration())
	if witness.IsData(dir) {
		already, err := witness.BeginEra(dir, plan)
		switch {
		case err != nil:
			return "", fmt.Errorf("%s: %w", dir, err)
		case already:
			return fmt.Sprintf("is in era %v already", e), nil
		}
		return fmt.Sprintf("is in era %v; start the witness", e), nil
	}
	if !replica.IsData(dir) {
		return "", fmt.Errorf("%s is neither a witness's nor a region server's data directory", dir)
	}
	s, err := replica.ReadStopped(dir)
	if err != nil {
		return "", err
	}
	self := &pb.Voter{Id: config.RegionVoter(s.Region), Incarnation: uint64(s.View.Incarnation())}
	_, stored, err := config.Voter{Decided: s.View.Configuration(), Stop: s.View.EraStop()}.BeginEra(self, plan)
	if err != nil {
		return "", fmt.Errorf("%s: %w", dir, err)
	}
	if !stored {
		return fmt.Sprintf("is in era %v already", e), nil
	}
	for p := range s.View.Partitions() { // as Apply will judge
		if i := slices.IndexFunc(plan.GetEpochs(), func(e *pb.EraEpoch) bool { return e.GetPartition() == p.Name }); i >= 0 {
			if _, err := config.EraRecord(plan, p.Name, max(p.Epoch, p.Dropped, p.Register.Value.Epoch)); err != nil {
				return "", fmt.Errorf("%s: %w", dir, err)
			}
		}
	}
	if err := replica.LeavePlan(dir, plan); err != nil {
		return "", err
	}
	return fmt.Sprintf("has the plan of era %v; apply it to every server of region %s, then start them", e, s.Region), nil
}

func randomEra() uint64 {
	var b [8]byte
	for {
		_, _ = rand.Read(b[:]) // never fails
		if n := binary.LittleEndian.Uint64(b[:]); n != 0 {
			return n
		}
	}
}

func encodeProto(m proto.Message) ([]byte, error) {
	raw, err := protojson.MarshalOptions{Multiline: true, UseProtoNames: true}.Marshal(m)
	return append(raw, '\n'), err
}

func (a *app) printProto(m proto.Message) error {
	raw, err := encodeProto(m)
	if err != nil {
		return err
	}
	_, err = a.stdout.Write(raw)
	return err
}

// writeProto writes a file that is whole and synced when it has its name.
func writeProto(path string, m proto.Message) error {
	raw, err := encodeProto(m)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return err
	}
	_, err = f.Write(raw)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), os.Remove(f.Name()))
	}
	return fsync.Dir(filepath.Dir(path))
}

func readProto(path string, m proto.Message) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := protojson.Unmarshal(raw, m); err != nil {
		return fmt.Errorf("%s is not what `headlease force-quorum` wrote: %w", path, err)
	}
	return nil
}
