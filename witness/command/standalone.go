package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/clusterfile/load"
	"github.com/headlease/headlease/internal/version"
)

// Exit codes of the standalone binary, as of headlease.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// Main is headlease-witness: the witness command as a program of its own. It
// returns the exit code.
func Main(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	cmd := standalone(stderr)
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	err := cmd.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	if errors.As(err, new(usageError)) {
		_, _ = fmt.Fprintf(stderr, "headlease-witness: %v; see 'headlease-witness --help'\n", err)
		return exitUsage
	}
	_, _ = fmt.Fprintf(stderr, "headlease-witness: %v\n", err)
	return exitFailed
}

func standalone(stderr io.Writer) *cobra.Command {
	var config, certs, level, format string
	var insecure bool
	logger := func() (*slog.Logger, error) {
		var l slog.Level
		if err := l.UnmarshalText([]byte(level)); err != nil {
			return nil, usageError{fmt.Errorf("--log-level %q is not a level; use debug, info, warn or error", level)}
		}
		options := &slog.HandlerOptions{Level: l}
		switch format {
		case "text":
			return slog.New(slog.NewTextHandler(stderr, options)), nil
		case "json":
			return slog.New(slog.NewJSONHandler(stderr, options)), nil
		}
		return nil, usageError{fmt.Errorf("--log-format %q is not a format; use text or json", format)}
	}
	cmd := New(Env{
		File: func() (clusterfile.File, error) {
			log, err := logger()
			if err != nil {
				return clusterfile.File{}, err
			}
			f, warnings, err := load.File(config)
			if err != nil {
				return clusterfile.File{}, err
			}
			for _, w := range warnings {
				log.Warn("cluster file", "file", config, "warning", w)
			}
			if certs != "" {
				f.Certs = certs
			}
			return f, nil
		},
		Path:     func() string { return config },
		Insecure: func() bool { return insecure },
		Logger:   logger,
		Args: func(check cobra.PositionalArgs) cobra.PositionalArgs {
			return func(cmd *cobra.Command, args []string) error {
				if err := check(cmd, args); err != nil {
					return usageError{err}
				}
				return nil
			}
		},
	})
	cmd.Use = "headlease-witness"
	cmd.Short = "A witness of a Headlease cluster, and nothing else"
	cmd.Example = `  headlease-witness -f cluster.yaml --name w1 --data-dir /var/lib/headlease --certs /etc/headlease/certs`
	cmd.Version = version.String()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.CompletionOptions.DisableDefaultCmd = true
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	cmd.Flags().StringVarP(&config, "config", "f", envOr("HEADLEASE_CONFIG", "cluster.yaml"), "the cluster file (HEADLEASE_CONFIG)")
	cmd.Flags().StringVar(&certs, "certs", "", "directory of the certificates (HEADLEASE_CERTS, or certs in the cluster file)")
	cmd.Flags().BoolVar(&insecure, "insecure", false, "plain text without certificates; loopback addresses only")
	cmd.Flags().StringVar(&level, "log-level", envOr("HEADLEASE_LOG_LEVEL", "info"), "debug, info, warn or error (HEADLEASE_LOG_LEVEL)")
	cmd.Flags().StringVar(&format, "log-format", envOr("HEADLEASE_LOG_FORMAT", "text"), "text or json (HEADLEASE_LOG_FORMAT)")
	return cmd
}

func envOr(name, fallback string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return fallback
}
