package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/fence"
)

func newReleaseCmd(a *app) *cobra.Command {
	var o leaseOptions
	cmd := &cobra.Command{
		Use:   "release HANDLE",
		Short: "Release the lease of a handle file",
		Long: `Release ends the lease of a handle file, as 'headlease acquire' wrote it, and
removes the file. The next one in the queue has the resource at once.

It exits with 1 when the lease has ended already; the file is removed then, too.`,
		Example: `  headlease release lock-nightly-report.4294967297.json`,
		Args:    usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.validate(cmd); err != nil {
				return err
			}
			h, err := readHandle(args[0])
			if err != nil {
				return err
			}
			return a.withConfig(o, func(cfg client.Config) error {
				ctx, cancel := within(cmd.Context(), o.timeout)
				defer cancel()
				err := client.ReleaseHandle(ctx, cfg, h)
				ended := errors.Is(err, client.ErrNotHolder) || errors.Is(err, client.ErrSessionExpired)
				if err != nil && !ended {
					return err
				}
				if rm := os.Remove(args[0]); rm != nil {
					return errors.Join(err, rm)
				}
				if ended {
					return fmt.Errorf("the lease on %s (token %s) had ended already: %s", h.Resource, h.Token, sinceThen(ctx, cfg, h, time.Now()))
				}
				return a.printf("released %s\n", h.Resource)
			})
		},
	}
	o.who(cmd)
	return cmd
}

// sinceThen says what became of a lease that has ended. Nobody keeps when that
// was; it is known how long its session was kept.
func sinceThen(ctx context.Context, cfg client.Config, h client.Handle, now time.Time) string {
	why := "it was released, revoked or lost"
	if now.After(h.Expires) {
		why = "its session was kept until " + h.Expires.Local().Format(time.DateTime)
	}
	c, err := client.New(cfg)
	if err != nil {
		return why
	}
	defer c.Close(ctx) //nolint:errcheck // it has no session
	switch holder, err := c.Get(ctx, h.Resource); {
	case err != nil:
		return fmt.Sprintf("%s; who holds it now is not known: %v", why, err)
	case holder == nil:
		return why + "; nobody holds it now"
	default:
		return fmt.Sprintf("%s; %s holds it now, with token %s", why, holder.GetHolder(), fence.Token(holder.GetToken()))
	}
}

// maxHandle bounds a handle file.
const maxHandle = 64 << 10

func readHandle(path string) (client.Handle, error) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return client.Handle{}, fmt.Errorf("handle: %w; give the file that 'headlease acquire' printed", err)
	case !info.Mode().IsRegular() || info.Size() > maxHandle:
		return client.Handle{}, fmt.Errorf("handle: %s is no handle file; give the file that 'headlease acquire' printed", path)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return client.Handle{}, fmt.Errorf("handle: %w", err)
	}
	var h client.Handle
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&h); err != nil {
		return client.Handle{}, fmt.Errorf("handle: %s is no handle file (%w); give the file that 'headlease acquire' printed", path, err)
	}
	if err := h.Validate(); err != nil {
		return client.Handle{}, fmt.Errorf("handle: %s is incomplete: %w", path, err)
	}
	return h, nil
}
