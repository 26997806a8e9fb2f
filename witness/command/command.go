// Package command is the command line of a witness, for the headlease command
// tree and for the small headlease-witness binary alike.
package command

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/clusterfile/load"
	"github.com/headlease/headlease/internal/fault"
	"github.com/headlease/headlease/internal/pki"
	"github.com/headlease/headlease/internal/telemetry"
	"github.com/headlease/headlease/internal/version"
	"github.com/headlease/headlease/witness"
)

// Env is what the command takes from the tree that it is in. Every field must
// be given.
type Env struct {
	// File reads the cluster file as the global flags say.
	File func() (clusterfile.File, error)
	// Path is where it is read from.
	Path func() string
	// Insecure tells of the global flag.
	Insecure func() bool
	Logger   func() (*slog.Logger, error)
	// Args judges positional arguments, so that the tree's usage errors look alike.
	Args func(cobra.PositionalArgs) cobra.PositionalArgs
}

// flags of the command itself.
type flags struct {
	name, dataDir, faults string
	drills                bool
}

// New makes the command `witness`.
func New(e Env) *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:   "witness",
		Short: "Run a witness",
		Long: `Witness runs one witness of the cluster file: a voter in a zone of its own, which
keeps a few hundred bytes per partition and no leases. It votes after
'headlease init' has configured it.

It ends when its disk fails or hangs, on SIGTERM and on an interrupt.`,
		Example: `  headlease witness -f cluster.yaml --name w1 --data-dir /var/lib/headlease --certs /etc/headlease/certs`,
		Args:    e.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			file, err := e.File()
			if err != nil {
				return err
			}
			log, err := e.Logger()
			if err != nil {
				return err
			}
			watch := load.NewWatcher(e.Path(), log)
			hup := make(chan os.Signal, 1)
			signal.Notify(hup, syscall.SIGHUP)
			defer signal.Stop(hup)
			watch.Hup = hup
			return run(cmd.Context(), f, file, watch, e.Insecure(), log)
		},
	}
	cmd.Flags().StringVar(&f.name, "name", "", "which witness of the cluster file this is (HEADLEASE_NAME)")
	cmd.Flags().StringVar(&f.dataDir, "data-dir", "", "directory for this witness alone (HEADLEASE_DATA_DIR)")
	cmd.Flags().BoolVar(&f.drills, "drills", false, "let an admin inject faults; never in production")
	cmd.Flags().StringVar(&f.faults, "faults", "", "file of the faults in force from the start; needs --drills")
	return cmd
}

func run(ctx context.Context, f flags, file clusterfile.File, watch *load.Watcher, insecure bool, log *slog.Logger) error {
	cfg, err := configure(f, file, insecure)
	if err != nil {
		return err
	}
	cfg.Follow = func(ctx context.Context, changed func([]witness.Peer)) error {
		file.Name = cfg.Name
		return watch.Run(ctx, file, func(now clusterfile.File) { changed(peers(now, cfg.Name)) })
	}
	cfg.Logger = log
	defer cfg.Faults.Close()
	if cfg.Clock, err = clock.NewSystem(); err != nil {
		return err
	}
	cfg.Registry = telemetry.NewRegistry(cfg.Version)
	w, err := witness.New(cfg)
	if err != nil {
		return err
	}
	return w.Run(ctx)
}

// configure makes a witness's configuration of flags and cluster file.
func configure(f flags, file clusterfile.File, insecure bool) (witness.Config, error) {
	if f.name != "" {
		file.Name = f.name
	}
	if f.dataDir != "" {
		file.DataDir = f.dataDir
	}
	w, err := find(file)
	if err != nil {
		return witness.Config{}, err
	}
	cfg := witness.Config{
		Cluster: file.Cluster, Name: w.Name, DataDir: file.DataDir, Votes: w.Votes, Gossip: w.Gossip, Metrics: w.Metrics, D: file.D,
		Insecure: insecure, Version: version.String(),
	}
	cfg.Peers = peers(file, w.Name)
	var errs []error
	if cfg.DataDir == "" {
		errs = append(errs, errors.New("data_dir: is not set; give --data-dir or HEADLEASE_DATA_DIR"))
	}
	switch {
	case insecure:
	case file.Certs == "":
		errs = append(errs, errors.New("certs: is not set; give --certs or HEADLEASE_CERTS ('headlease certs' makes a set), or --insecure on loopback"))
	default:
		want := pki.Identity{Cluster: file.Cluster, Role: pki.RoleWitness, Name: w.Name}
		if cfg.Credentials, err = pki.Load(pki.LoadConfig{Dir: file.Certs, Want: want, Gossip: true}); err != nil {
			errs = append(errs, fmt.Errorf("certs: %w", err))
		}
	}
	if cfg.Faults, err = fault.Startup(f.faults, f.drills); err != nil {
		errs = append(errs, err)
	}
	return cfg, errors.Join(errs...)
}

func peers(file clusterfile.File, self string) []witness.Peer {
	var out []witness.Peer
	for _, p := range file.Peers(self) {
		out = append(out, witness.Peer{Name: p.Name, Role: pki.Role(p.Role), Region: p.Region, Gossip: p.Gossip})
	}
	return out
}

// find returns the witness that this process is.
func find(file clusterfile.File) (clusterfile.Witness, error) {
	if w, ok := file.Witness(file.Name); ok {
		return w, nil
	}
	var names []string
	for _, w := range file.Witnesses {
		names = append(names, w.Name)
	}
	known := "it has none"
	if len(names) > 0 {
		known = "it has " + strings.Join(names, ", ")
	}
	if file.Name == "" {
		return clusterfile.Witness{}, fmt.Errorf("name: is not set; give --name or HEADLEASE_NAME, a witness of the cluster file (%s)", known)
	}
	if _, region, ok := file.Server(file.Name); ok {
		return clusterfile.Witness{}, fmt.Errorf("name: %q is a server of region %s, not a witness; start it with 'headlease region'", file.Name, region)
	}
	return clusterfile.Witness{}, fmt.Errorf("name: %q is not a witness of the cluster file (%s)", file.Name, known)
}
