package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/doctor"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
)

func newDoctorCmd(a *app) *cobra.Command {
	var name, dataDir string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Measure whether this host can meet the numbers",
		Long: `Doctor measures, on the host on which a process of the cluster runs or will run, what
its guarantees of time rest on: how long the data directory's disk takes to sync, the
clock and its rate, the system's limits, and the way to every other process of the
cluster file on each plane. Each finding says what it is needed for, and what to do.

Give it the process's name, and it looks with that process's certificate. It takes
at most 15 seconds, works before init and beside a running process, and leaves
nothing behind. It exits with 1 when something failed; processes that do not run yet
are warnings.`,
		Example: `  headlease doctor -f cluster.yaml --name eu-1 --data-dir /var/lib/headlease --certs /etc/headlease/certs
  headlease doctor --name w1 --json`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := a.clusterFile()
			if err != nil {
				return err
			}
			if name != "" {
				f.Name = name
			}
			if dataDir != "" {
				f.DataDir = dataDir
			}
			c, err := a.examination(f)
			if err != nil {
				return err
			}
			checks := doctor.Run(cmd.Context(), c)
			if asJSON {
				enc := json.NewEncoder(a.stdout)
				enc.SetIndent("", "  ")
				err = enc.Encode(checks)
			} else {
				err = printChecks(a.stdout, checks)
			}
			if err := errors.Join(err, c.Links.Close()); err != nil {
				return err
			}
			if doctor.Failed(checks) {
				return &exitError{code: exitFailed} // it is all said
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "which server or witness of the cluster file this host is for (HEADLEASE_NAME)")
	cmd.Flags().StringVar(&dataDir, "data-dir", "", "the process's data directory, which need not exist yet (HEADLEASE_DATA_DIR)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// examination is what the doctor looks at: as the process that the file names,
// or as the admin.
func (a *app) examination(f clusterfile.File) (doctor.Config, error) {
	c := doctor.Config{File: f, DataDir: f.DataDir}
	id := admin()
	if f.Name != "" {
		p, ok := f.Process(f.Name)
		if !ok {
			return c, fmt.Errorf("name: %q is neither a server nor a witness of the cluster file", f.Name)
		}
		c.Self = p
		id = pki.Identity{Role: pki.Role(p.Role), Region: p.Region, Name: p.Name}
	}
	log, err := a.logger()
	if err != nil {
		return c, err
	}
	id.Cluster = f.Cluster
	cfg := link.Config{Identity: id, Insecure: a.insecure, Logger: log}
	if !a.insecure {
		if f.Certs == "" {
			return c, errors.New("certs: is not set; give --certs or HEADLEASE_CERTS ('headlease certs' makes a set), or --insecure on loopback")
		}
		if cfg.Credentials, err = pki.Load(pki.LoadConfig{Dir: f.Certs, Want: id, Gossip: c.Self.Name != ""}); err != nil {
			return c, fmt.Errorf("certs: %w", err)
		}
		c.GossipKey = cfg.Credentials.GossipKey
		c.CertificateEnds = cfg.Credentials.Certificate.Leaf.NotAfter
	}
	c.Links, err = link.New(cfg)
	return c, err
}

func printChecks(out io.Writer, checks []doctor.Check) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	for _, c := range checks {
		fmt.Fprintf(w, "%s\t%s\t%s\n", c.Verdict, c.Name, c.Found)
		if c.Verdict != doctor.OK {
			if c.Needed != "" {
				fmt.Fprintf(w, "\t  needed\t%s\n", c.Needed)
			}
			fmt.Fprintf(w, "\t  remedy\t%s\n", c.Remedy)
		}
	}
	return w.Flush()
}
