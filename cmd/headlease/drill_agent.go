package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/headlease/headlease/drill"
	"github.com/headlease/headlease/drill/agent"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
)

// defaultAgentAddress is where a drill agent listens.
const defaultAgentAddress = "127.0.0.1:7605"

func newDrillAgentCmd(a *app) *cobra.Command {
	var name, listen, commands string
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Let drills signal and start the processes of this host",
		Long: `Agent serves drills that kill, stop and restart processes, to admins only. It runs
on each host, beside the processes, under a user that may signal them, with the
certificate of one of them (--name). How a process is found and started is in a
file of commands, which sh runs:

  processes:
    eu-1:
      pid: systemctl show --property MainPID --value headlease-region
      start: systemctl start headlease-region
      keep_down: systemctl stop headlease-region  # after a kill; may be left out

Whatever a drill did to a process is undone by itself after a while, and when the
agent stops. Stop it when no drill is due.`,
		Example: `  headlease drill agent --name eu-1 --listen 10.1.0.1:7605 --commands agent.yaml`,
		Args:    usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if name == "" || commands == "" {
				return &usageError{cmd.CommandPath(), errors.New("--name and --commands must be given")}
			}
			return runDrillAgent(cmd.Context(), a, name, listen, commands)
		},
	}
	f := cmd.Flags()
	f.StringVar(&name, "name", "", "process of this host whose certificate the agent uses")
	f.StringVar(&listen, "listen", defaultAgentAddress, "address for drills")
	f.StringVar(&commands, "commands", "", "file that says how each process is found and started")
	return cmd
}

func runDrillAgent(ctx context.Context, a *app, name, listen, commands string) (err error) {
	f, err := a.clusterFile()
	if err != nil {
		return err
	}
	p, ok := f.Process(name)
	if !ok {
		return fmt.Errorf("--name %s: the cluster file has no such process", name)
	}
	text, err := os.ReadFile(commands)
	if err != nil {
		return fmt.Errorf("--commands: %w", err)
	}
	if len(text) > agent.MaxSize {
		return fmt.Errorf("--commands %s: has %d bytes, over %d; is it the right file?", commands, len(text), agent.MaxSize)
	}
	host, err := agent.ParseCommands(text)
	if err != nil {
		return fmt.Errorf("--commands %s: %w", commands, err)
	}
	for of := range host {
		_, ok := f.Process(of)
		for _, r := range f.Regions {
			ok = ok || len(r.Cache.Addresses) > 0 && of == devcluster.RedisName(r.Name)
		}
		if !ok {
			return fmt.Errorf("--commands %s: processes.%s: the cluster file has no such process", commands, of)
		}
	}
	log, err := a.logger()
	if err != nil {
		return err
	}
	l, err := a.links(f, pki.Identity{Role: pki.Role(p.Role), Region: p.Region, Name: p.Name})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	return agent.Serve(ctx, l, listen, agent.CommandHost(host), log, func(address string) {
		log.Info("drill agent serves", "address", address, "processes", agent.CommandHost(host).Names())
	})
}

// running is the cluster of --config, which a drill may break if that was
// allowed by its name.
func (a *app) running(allowed, as string, agents []string) (_ *drill.Running, closeAgents func() error, err error) {
	closeAgents = func() error { return nil }
	f, err := a.clusterFile()
	if err != nil {
		return nil, closeAgents, err
	}
	if allowed != f.Cluster {
		return nil, closeAgents, fmt.Errorf("this drill breaks the running cluster %s; if you may do that, add --i-am-allowed-to-break %s", f.Cluster, f.Cluster)
	}
	config, err := filepath.Abs(a.config)
	if err != nil {
		return nil, closeAgents, err
	}
	r := &drill.Running{File: f, Config: config, Certs: f.Certs, Client: as}
	var peers []link.Peer
	for _, s := range agents {
		name, address, ok := strings.Cut(s, "=")
		p, known := f.Process(name)
		if !ok || !known {
			return nil, closeAgents, fmt.Errorf("--agent %q: write PROCESS=HOST:PORT with a process of the cluster file", s)
		}
		peers = append(peers, agentPeer(p, address))
	}
	// A development cluster of this machine serves an agent itself.
	if st, err := devcluster.ReadState(filepath.Dir(config)); err == nil {
		r.OneMachine = true
		if p, ok := f.Process(agentName(st)); ok && len(peers) == 0 {
			peers = append(peers, agentPeer(p, st.Agent.Address))
		}
	}
	if len(peers) == 0 {
		return r, closeAgents, nil
	}
	l, err := a.links(f, admin())
	if err != nil {
		return nil, closeAgents, err
	}
	c, err := agent.Dial(l, peers)
	if err != nil {
		return nil, closeAgents, errors.Join(err, l.Close())
	}
	r.Processes = c
	return r, func() error { return errors.Join(c.Close(), l.Close()) }, nil
}

func agentName(st devcluster.State) string {
	if st.Agent == nil {
		return ""
	}
	return st.Agent.Name
}

func agentPeer(p clusterfile.Process, address string) link.Peer {
	return link.Peer{Name: p.Name, Region: p.Region, Role: pki.Role(p.Role), Address: address}
}
