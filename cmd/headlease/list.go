package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// listPage leases are asked for at a time.
const listPage = 1000

func newListCmd(a *app) *cobra.Command {
	var o leaseOptions
	var prefix string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List leases",
		Long: `List shows the leases of all regions, or of one, in the order of their names. It
reads page by page: each page is true at one time, the whole need not be.

A region that cannot be asked is an error, after the others' leases.`,
		Example: `  headlease list
  headlease list --prefix lock/ --region eu-frankfurt
  headlease list --json | jq -r .resource`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.validate(cmd); err != nil {
				return err
			}
			return a.withClient(o, func(cfg client.Config, c *client.Client) error {
				ctx, cancel := within(cmd.Context(), o.timeout)
				defer cancel()
				out := &leasePrinter{out: a.stdout, asJSON: asJSON}
				var errs []error
				for _, r := range cfg.Regions {
					if o.region == "" || o.region == r.Name {
						errs = append(errs, list(ctx, c, r.Name, prefix, out.print))
					}
				}
				return errors.Join(append(errs, out.end())...)
			})
		},
	}
	o.who(cmd)
	cmd.Flags().StringVar(&o.region, "region", "", "list this region only")
	cmd.Flags().StringVar(&prefix, "prefix", "", "list resources that begin so, for example lock/")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON, one lease a line")
	return cmd
}

// list asks a region for all its leases.
func list(ctx context.Context, c *client.Client, region, prefix string, do func([]*pb.LeaseInfo) error) error {
	req := &pb.ListLeasesRequest{Prefix: prefix, Limit: listPage}
	for {
		res, err := c.List(ctx, region, req)
		if err != nil {
			return fmt.Errorf("list %s: %w", region, err)
		}
		if err := do(res.GetLeases()); err != nil {
			return err
		}
		if req.Page = res.GetNextPage(); req.Page == "" {
			return nil
		}
	}
}

// leasePrinter prints leases as a table, or as JSON, one a line.
type leasePrinter struct {
	out    io.Writer
	asJSON bool
	table  *tabwriter.Writer
}

func (p *leasePrinter) print(leases []*pb.LeaseInfo) error {
	if p.asJSON {
		enc := json.NewEncoder(p.out)
		for _, l := range leases {
			if err := enc.Encode(summariseLease(l.GetResource(), l)); err != nil {
				return err
			}
		}
		return nil
	}
	p.begin()
	for _, l := range leases {
		fmt.Fprintf(p.table, "%s\t%s\t%s\t%s\t%s\t%d\n",
			l.GetResource(), fence.Token(l.GetToken()), l.GetHolder(), l.GetRegion(), l.GetPartition(), l.GetWaiters())
	}
	return p.table.Flush() // a page at a time, so that it need not be kept
}

func (p *leasePrinter) begin() {
	if p.table == nil {
		p.table = tabwriter.NewWriter(p.out, 0, 4, 2, ' ', 0)
		fmt.Fprintf(p.table, "RESOURCE\tTOKEN\tHOLDER\tREGION\tPARTITION\tWAITERS\n")
	}
}

func (p *leasePrinter) end() error {
	if p.asJSON {
		return nil
	}
	p.begin()
	return p.table.Flush()
}
