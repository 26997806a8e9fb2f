package main

import (
	"github.com/spf13/cobra"

	"github.com/headlease/headlease/witness/command"
)

func newWitnessCmd(a *app) *cobra.Command {
	return command.New(command.Env{
		File:     a.clusterFile,
		Insecure: func() bool { return a.insecure },
		Logger:   a.logger,
		Args:     usage,
	})
}
