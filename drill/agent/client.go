package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	callLimit = 10 * time.Second
	// endedEvery is the pause between two questions whether a process has
	// ended.
	endedEvery = 50 * time.Millisecond
)

// Client is the agents of a cluster's hosts, as a drill's Processes. Safe for
// concurrent use; close it.
type Client struct {
	conns []*grpc.ClientConn
	peers []link.Peer

	mu sync.Mutex
	of map[string]int // processes by agent, once asked
}

// Dial connects to agents when they are first asked. A peer's name is that in
// the certificate that its agent uses: one of the processes of its host.
func Dial(links *link.Links, peers []link.Peer) (*Client, error) {
	c := &Client{peers: peers}
	for _, p := range peers {
		conn, err := links.DialGRPC(link.PlaneAPI, p)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("drill agent %s: %w", p.Name, err), c.Close())
		}
		c.conns = append(c.conns, conn)
	}
	return c, nil
}

// Close ends the connections.
func (c *Client) Close() error {
	var errs []error
	for _, conn := range c.conns {
		errs = append(errs, conn.Close())
	}
	return errors.Join(errs...)
}

// Reach says which of the processes no agent has.
func (c *Client) Reach(ctx context.Context, names []string) error {
	of := map[string]int{}
	for i := range c.conns {
		list, err := c.list(ctx, i)
		if err != nil {
			return fmt.Errorf("drill agent %s at %s: %w", c.peers[i].Name, c.peers[i].Address, err)
		}
		for name := range list {
			of[name] = i
		}
	}
	for _, name := range names {
		if _, ok := of[name]; !ok {
			return fmt.Errorf("%s: no drill agent has it; run 'headlease drill agent' on its host and name it by --agent", name)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.of = of
	return nil
}

func (c *Client) list(ctx context.Context, i int) (map[string]int64, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	res, err := pb.NewDrillAgentServiceClient(c.conns[i]).ListDrillProcesses(ctx, &pb.ListDrillProcessesRequest{})
	if err != nil {
		return nil, err
	}
	out := map[string]int64{}
	for _, p := range res.GetProcesses() {
		out[p.GetName()] = p.GetPid()
	}
	return out, nil
}

func (c *Client) agent(name string) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, ok := c.of[name]
	if !ok {
		return 0, fmt.Errorf("%s: no drill agent has it", name)
	}
	return i, nil
}

// Signal sends a signal, which heals by itself.
func (c *Client) Signal(ctx context.Context, name string, sig syscall.Signal, heals time.Duration) error {
	for wire, s := range signals {
		if s == sig {
			return c.signal(ctx, name, wire, heals)
		}
	}
	return fmt.Errorf("%s: %v is no signal of drills", name, sig)
}

// MayEnd has a process started after heals, should it have ended by itself.
func (c *Client) MayEnd(ctx context.Context, name string, heals time.Duration) error {
	return c.signal(ctx, name, pb.DrillSignal_DRILL_SIGNAL_WATCH, heals)
}

func (c *Client) signal(ctx context.Context, name string, sig pb.DrillSignal, heals time.Duration) error {
	i, err := c.agent(name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	_, err = pb.NewDrillAgentServiceClient(c.conns[i]).SignalDrillProcess(ctx, &pb.SignalDrillProcessRequest{
		Name: name, Signal: sig, HealsMs: heals.Milliseconds(),
	})
	return err
}

// Ended waits until a process runs no more.
func (c *Client) Ended(ctx context.Context, name string) error {
	i, err := c.agent(name)
	if err != nil {
		return err
	}
	for {
		list, err := c.list(ctx, i)
		if err == nil && list[name] == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the end of %s: %w", name, context.Cause(ctx))
		case <-time.After(endedEvery):
		}
	}
}

// Start starts a process that does not run.
func (c *Client) Start(ctx context.Context, name string) error {
	i, err := c.agent(name)
	if err != nil {
		return err
	}
	_, err = pb.NewDrillAgentServiceClient(c.conns[i]).StartDrillProcess(ctx, &pb.StartDrillProcessRequest{Name: name})
	return err
}
