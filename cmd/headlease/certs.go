package main

import (
	"cmp"
	"time"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/pki"
)

func newCertsCmd(a *app) *cobra.Command {
	var (
		out      string
		clients  []string
		validity time.Duration
	)
	cmd := &cobra.Command{
		Use:   "certs [--out DIR]",
		Short: "Make the authority, certificates and gossip key of a cluster",
		Long: `Certs makes, in DIR, the cluster's certificate authority, its gossip key, and a
certificate for each server and witness of the cluster file, for the admin, and
for each client asked for. What is there already is checked and kept, never
overwritten: run it again to add a server or a client.

Give each process ca.crt, gossip.key and its own pair, and a client ca.crt and its
own pair. Keep DIR/ca away from them all: who has it can be anybody.`,
		Example: `  headlease certs -f cluster.yaml --out certs
  headlease certs -f cluster.yaml --out certs --client worker --client billing`,
		Args: usage(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			f, err := a.clusterFile()
			if err != nil {
				return err
			}
			if out == "" {
				// Elsewhere it would find no authority, and make another one.
				out = cmp.Or(f.Certs, "certs")
			}
			made, err := pki.Generate(pki.Config{
				Dir: out, Cluster: f.Cluster, Identities: identities(f, clients), Validity: validity,
			})
			if err != nil {
				return err
			}
			if err := a.printf("in %s:\n", out); err != nil {
				return err
			}
			for _, file := range made.New {
				if err := a.printf("made %s\n", file); err != nil {
					return err
				}
			}
			for _, file := range made.Kept {
				if err := a.printf("kept %s\n", file); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&out, "out", "", "directory to make them in (default that of --certs, HEADLEASE_CERTS or the cluster file, else certs)")
	cmd.Flags().StringArrayVar(&clients, "client", nil, "also make one for the client of this name; repeat for more")
	cmd.Flags().DurationVar(&validity, "validity", 0, "how long the new certificates are valid (default two years)")
	return cmd
}

// identities lists who gets a certificate.
func identities(f clusterfile.File, clients []string) []pki.Identity {
	ids := []pki.Identity{{Role: pki.RoleAdmin}}
	for _, p := range f.Processes() {
		ids = append(ids, pki.Identity{Role: pki.Role(p.Role), Region: p.Region, Name: p.Name})
	}
	for _, name := range clients {
		ids = append(ids, pki.Identity{Role: pki.RoleClient, Name: name})
	}
	return ids
}
