package main

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/clusterfile/load"
)

// app is what every command has: its streams and the global flags. A flag
// counts before its variable, a variable before the cluster file.
type app struct {
	stdout, stderr io.Writer
	// in answers questions; nil: the standard input.
	in io.Reader

	config    string
	certs     string
	insecure  bool
	logLevel  string
	logFormat string
}

// newRoot builds the command tree. One file per command; each adds itself here.
func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:   "headlease",
		Short: "Leases with fencing tokens over several regions",
		Long: `Headlease grants leases on shards and named locks to workers, over several
regions: a partition of the shards belongs to one region at a time, and passes to
another, by a majority of regions and witnesses, when its region is lost. Every
lease has a fencing token, so that a late write of an old holder is refused.

Exit codes: 0 done; 1 failed, or something was refused; 2 a command line that
makes no sense; 'headlease run' and 'headlease elect' pass on the code of
their command.`,
		Example: `  headlease config example > cluster.yaml
  headlease config check cluster.yaml
  headlease certs -f cluster.yaml --out certs --client worker`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args: usage(func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
				return fmt.Errorf("unknown command %q; did you mean %s?", args[0], strings.Join(near, " or "))
			}
			return fmt.Errorf("unknown command %q", args[0])
		}),
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		Version:           versionLine(),
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
	}
	root.SuggestionsMinimumDistance = 2
	root.SetVersionTemplate("headlease {{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return &usageError{cmd.CommandPath(), err} })

	flags := root.PersistentFlags()
	flags.StringVarP(&a.config, "config", "f", envOr("HEADLEASE_CONFIG", "cluster.yaml"), "the cluster file (HEADLEASE_CONFIG)")
	flags.StringVar(&a.certs, "certs", "", "directory of the certificates (HEADLEASE_CERTS, or certs in the cluster file)")
	flags.BoolVar(&a.insecure, "insecure", false, "plain text without certificates; loopback addresses only")
	flags.StringVar(&a.logLevel, "log-level", envOr("HEADLEASE_LOG_LEVEL", "info"), "debug, info, warn or error (HEADLEASE_LOG_LEVEL)")
	flags.StringVar(&a.logFormat, "log-format", envOr("HEADLEASE_LOG_FORMAT", "text"), "text or json (HEADLEASE_LOG_FORMAT)")
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if _, err := a.logger(); err != nil {
			return &usageError{cmd.CommandPath(), err}
		}
		return nil
	}

	root.AddCommand(
		newAcquireCmd(a),
		newAuditCmd(a),
		newBackupCmd(a),
		newCertsCmd(a),
		newConfigCmd(a),
		newDevCmd(a),
		newDoctorCmd(a),
		newDrillCmd(a),
		newElectCmd(a),
		newExplainCmd(a),
		newForceQuorumCmd(a),
		newGetCmd(a),
		newInitCmd(a),
		newListCmd(a),
		newPartitionCmd(a),
		newRegionCmd(a),
		newReleaseCmd(a),
		newRunCmd(a),
		newServerCmd(a),
		newShardCmd(a),
		newStatusCmd(a),
		newVersionCmd(a),
		newWatchCmd(a),
		newWitnessCmd(a),
	)
	return root
}

// logger logs to the standard error stream as the flags say.
func (a *app) logger() (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(a.logLevel)); err != nil {
		return nil, fmt.Errorf("--log-level %q is not a level; use debug, info, warn or error", a.logLevel)
	}
	options := &slog.HandlerOptions{Level: level}
	switch a.logFormat {
	case "text":
		return slog.New(slog.NewTextHandler(a.stderr, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(a.stderr, options)), nil
	}
	return nil, fmt.Errorf("--log-format %q is not a format; use text or json", a.logFormat)
}

// clusterFile reads the cluster file and logs its warnings. --certs, if given,
// replaces the file's.
func (a *app) clusterFile() (clusterfile.File, error) {
	log, err := a.logger()
	if err != nil {
		return clusterfile.File{}, err
	}
	f, warnings, err := load.File(a.config)
	if err != nil {
		return clusterfile.File{}, err
	}
	for _, w := range warnings {
		log.Warn("cluster file", "file", a.config, "warning", w)
	}
	if a.certs != "" {
		f.Certs = a.certs
	}
	return f, nil
}

// printf writes to the standard output; a failed write (a closed pipe) is the
// command's error.
func (a *app) printf(format string, args ...any) error {
	_, err := fmt.Fprintf(a.stdout, format, args...)
	return err
}

func envOr(name, fallback string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return fallback
}
