// Package agent lets a drill signal and start the processes of a host that is
// not its own: `headlease dev` serves it for its children, and `headlease
// drill agent` for what an operator's commands start and stop.
//
// Whatever a drill did to a process is undone by itself after a while, and when
// the agent stops: a stopped process goes on, a killed one is started. So a
// drill whose machine or network dies leaves nothing broken.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	maxHeals = 24 * time.Hour
	// undoLimit bounds the undoing of one thing.
	undoLimit = 30 * time.Second
)

// Host is the processes of a machine. Safe for concurrent use.
type Host interface {
	// Names of all processes, sorted.
	Names() []string
	// PID of a process; 0: it does not run.
	PID(ctx context.Context, name string) (int, error)
	// Signal sends SIGKILL, SIGTERM, SIGSTOP or SIGCONT. After the first two
	// the process stays down until Start.
	Signal(ctx context.Context, name string, sig syscall.Signal) error
	// Start starts a process that does not run.
	Start(ctx context.Context, name string) error
}

// Service is DrillAgentService over a Host. Close it.
type Service struct {
	pb.UnimplementedDrillAgentServiceServer
	host      Host
	log       *slog.Logger
	authorize func(context.Context) error

	mu      sync.Mutex
	pending map[string]*undo // by process
	closed  bool
	undoing sync.WaitGroup
}

// undo is what ends a process's fault by itself.
type undo struct {
	timer *time.Timer
	// start it, or else let it go on.
	start bool
}

// New makes a service; authorize refuses, with a gRPC status, who is no admin.
func New(host Host, authorize func(context.Context) error, log *slog.Logger) *Service {
	return &Service{host: host, log: log, authorize: authorize, pending: map[string]*undo{}}
}

var signals = map[pb.DrillSignal]syscall.Signal{
	pb.DrillSignal_DRILL_SIGNAL_KILL:      syscall.SIGKILL,
	pb.DrillSignal_DRILL_SIGNAL_TERMINATE: syscall.SIGTERM,
	pb.DrillSignal_DRILL_SIGNAL_STOP:      syscall.SIGSTOP,
	pb.DrillSignal_DRILL_SIGNAL_CONTINUE:  syscall.SIGCONT,
}

func (s *Service) known(ctx context.Context, name string) error {
	if err := s.authorize(ctx); err != nil {
		return err
	}
	if !slices.Contains(s.host.Names(), name) {
		return status.Errorf(codes.NotFound, "process %q: not one of this host's; it has %v", name, s.host.Names())
	}
	return nil
}

// ListDrillProcesses lists the host's processes.
func (s *Service) ListDrillProcesses(ctx context.Context, _ *pb.ListDrillProcessesRequest) (*pb.ListDrillProcessesResponse, error) {
	if err := s.authorize(ctx); err != nil {
		return nil, err
	}
	out := &pb.ListDrillProcessesResponse{}
	for _, name := range s.host.Names() {
		pid, err := s.host.PID(ctx, name)
		if err != nil {
			return nil, status.Errorf(codes.Internal, "process %s: %v", name, err)
		}
		out.Processes = append(out.Processes, &pb.DrillProcess{Name: name, Pid: int64(pid)})
	}
	return out, nil
}

// SignalDrillProcess signals a process, and undoes it by itself in time.
func (s *Service) SignalDrillProcess(ctx context.Context, req *pb.SignalDrillProcessRequest) (*pb.SignalDrillProcessResponse, error) {
	name := req.GetName()
	if err := s.known(ctx, name); err != nil {
		return nil, err
	}
	sig, ok := signals[req.GetSignal()]
	watch := req.GetSignal() == pb.DrillSignal_DRILL_SIGNAL_WATCH
	if !ok && !watch {
		return nil, status.Errorf(codes.InvalidArgument, "signal: %v; use KILL, TERMINATE, STOP, CONTINUE or WATCH", req.GetSignal())
	}
	heals := time.Duration(req.GetHealsMs()) * time.Millisecond
	if sig != syscall.SIGCONT && (req.GetHealsMs() < 1 || req.GetHealsMs() > maxHeals.Milliseconds()) {
		return nil, status.Errorf(codes.InvalidArgument, "heals_ms: %d; use 1 to %d: what a drill breaks must heal by itself", req.GetHealsMs(), maxHeals.Milliseconds())
	}
	// First that it heals, then that it breaks.
	if sig == syscall.SIGCONT {
		s.forget(name)
	} else if err := s.arm(name, heals, sig != syscall.SIGSTOP); err != nil {
		return nil, err
	}
	if watch {
		return &pb.SignalDrillProcessResponse{}, nil
	}
	s.log.Warn("drill signals a process", "name", name, "signal", sig, "heals", heals)
	if err := s.host.Signal(ctx, name, sig); err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "%v to %s: %v", sig, name, err)
	}
	return &pb.SignalDrillProcessResponse{}, nil
}

// StartDrillProcess starts a process that does not run.
func (s *Service) StartDrillProcess(ctx context.Context, req *pb.StartDrillProcessRequest) (*pb.StartDrillProcessResponse, error) {
	name := req.GetName()
	if err := s.known(ctx, name); err != nil {
		return nil, err
	}
	already, err := s.start(ctx, name)
	if err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "start of %s: %v", name, err)
	}
	s.forget(name)
	return &pb.StartDrillProcessResponse{Already: already}, nil
}

func (s *Service) start(ctx context.Context, name string) (already bool, err error) {
	pid, err := s.host.PID(ctx, name)
	if err != nil || pid != 0 {
		return pid != 0, err
	}
	s.log.Warn("drill starts a process", "name", name)
	return false, s.host.Start(ctx, name)
}

// arm has a process healed after a while.
func (s *Service) arm(name string, heals time.Duration, start bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return status.Error(codes.Unavailable, "the agent is stopping")
	}
	if u := s.pending[name]; u != nil {
		u.timer.Stop()
		start = start || u.start
	}
	u := &undo{start: start}
	u.timer = time.AfterFunc(heals, func() {
		s.mu.Lock()
		mine := s.pending[name] == u && !s.closed
		if mine {
			delete(s.pending, name)
			s.undoing.Add(1)
		}
		s.mu.Unlock()
		if mine {
			defer s.undoing.Done()
			s.undo(name, u)
		}
	})
	s.pending[name] = u
	return nil
}

func (s *Service) forget(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if u := s.pending[name]; u != nil {
		u.timer.Stop()
		delete(s.pending, name)
	}
}

// undo makes a process run again.
func (s *Service) undo(name string, u *undo) {
	ctx, cancel := context.WithTimeout(context.Background(), undoLimit)
	defer cancel()
	s.log.Warn("a drill's fault heals by itself", "name", name)
	// One that was stopped hears nothing before it goes on; of one that was
	// killed the signal fails.
	err := s.host.Signal(ctx, name, syscall.SIGCONT)
	if u.start {
		_, err = s.start(ctx, name)
	}
	if err != nil {
		s.log.Error("it did not", "name", name, "error", err)
	}
}

// Close undoes at once what would be undone later.
func (s *Service) Close() {
	s.mu.Lock()
	s.closed = true
	pending := s.pending
	s.pending = nil
	s.mu.Unlock()
	for name, u := range pending {
		u.timer.Stop()
		s.undo(name, u)
	}
	s.undoing.Wait()
}

// Serve serves a host's processes on an address until ctx ends, and heals what
// is broken then. ready is told the address.
func Serve(ctx context.Context, links *link.Links, address string, host Host, log *slog.Logger, ready func(address string)) error {
	ln, err := links.Listen(link.PlaneAPI, address)
	if err != nil {
		return fmt.Errorf("drill agent: %w", err)
	}
	service := New(host, link.RequireAdmin, log)
	server := grpc.NewServer(links.ServerOptions(link.PlaneAPI)...)
	pb.RegisterDrillAgentServiceServer(server, service)
	ready(ln.Addr().String())
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(ln) }()
	select {
	case <-ctx.Done():
	case err = <-ended:
	}
	server.Stop()
	service.Close()
	if ctx.Err() == nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("drill agent: %w", err)
	}
	return nil
}
