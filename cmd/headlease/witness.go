package main

import (
	"github.com/spf13/cobra"

	"github.com/headlease/headlease/witness/command"
)

func newWitnessCmd(a *app) *cobra.Command {
	cmd := command.New(command.Env{
		File:     a.clusterFile,
		Path:     func() string { return a.config },
		Insecure: func() bool { return a.insecure },
		Logger:   a.logger,
		Args:     usage,
	})
	cmd.Short = "Run a witness, or change which ones vote"
	cmd.AddCommand(witnessMemberCmds(a)...)
	return cmd
}
