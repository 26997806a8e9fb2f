package agent

import (
	"context"
	"slices"
	"syscall"

	"github.com/headlease/headlease/internal/devcluster"
)

// DevHost is the processes of a development cluster.
type DevHost struct{ Cluster *devcluster.Cluster }

// Names of all processes.
func (h DevHost) Names() []string {
	var out []string
	for _, p := range h.Cluster.State().Processes {
		out = append(out, p.Name)
	}
	slices.Sort(out)
	return out
}

// PID of a process.
func (h DevHost) PID(_ context.Context, name string) (int, error) {
	p, _ := h.Cluster.Process(name)
	return p.PID, nil
}

// Signal signals a process.
func (h DevHost) Signal(_ context.Context, name string, sig syscall.Signal) error {
	return h.Cluster.Signal(name, sig)
}

// Start starts a process.
func (h DevHost) Start(_ context.Context, name string) error { return h.Cluster.StartProcess(name) }
