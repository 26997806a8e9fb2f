package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a host of one process, eu-1.
type fake struct {
	mu   sync.Mutex
	runs bool
	done []string
}

func (f *fake) Names() []string { return []string{"eu-1"} }

func (f *fake) PID(context.Context, string) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.runs {
		return 77, nil
	}
	return 0, nil
}

func (f *fake) Signal(_ context.Context, _ string, sig syscall.Signal) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.runs {
		return errors.New("it does not run")
	}
	f.done = append(f.done, sig.String())
	if sig == syscall.SIGKILL || sig == syscall.SIGTERM {
		f.runs = false
	}
	return nil
}

func (f *fake) Start(context.Context, string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.runs = true
	f.done = append(f.done, "start")
	return nil
}

func (f *fake) did() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return strings.Join(f.done, ", ")
}

func admins(context.Context) error { return nil }

func signal(sig pb.DrillSignal, heals time.Duration) *pb.SignalDrillProcessRequest {
	return &pb.SignalDrillProcessRequest{Name: "eu-1", Signal: sig, HealsMs: heals.Milliseconds()}
}

const (
	kill = pb.DrillSignal_DRILL_SIGNAL_KILL
	stop = pb.DrillSignal_DRILL_SIGNAL_STOP
	cont = pb.DrillSignal_DRILL_SIGNAL_CONTINUE

	watch = pb.DrillSignal_DRILL_SIGNAL_WATCH
)

// end has the process end by itself.
func (f *fake) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.runs = false
	f.done = append(f.done, "end")
}

// What a drill breaks heals by itself when nobody ends it.
func TestWhatADrillBreaksHealsByItself(t *testing.T) {
	for name, c := range map[string]struct {
		play func(s *Service) error
		want string
		ends bool // by itself, after a second
	}{
		"killed": {func(s *Service) error {
			_, err := s.SignalDrillProcess(t.Context(), signal(kill, 5*time.Second))
			return err
		}, "killed, start", false},
		"its disk broken": {func(s *Service) error {
			_, err := s.SignalDrillProcess(t.Context(), signal(watch, 5*time.Second))
			return err
		}, "end, start", true},
		"its disk broken, and it lives": {func(s *Service) error {
			_, err := s.SignalDrillProcess(t.Context(), signal(watch, 5*time.Second))
			return err
		}, "continued", false},
		"its disk broken, ended by the drill": {func(s *Service) error {
			_, err := s.SignalDrillProcess(t.Context(), signal(watch, 5*time.Second))
			_, err2 := s.StartDrillProcess(t.Context(), &pb.StartDrillProcessRequest{Name: "eu-1"})
			return errors.Join(err, err2)
		}, "", false},
		"stopped": {func(s *Service) error {
			_, err := s.SignalDrillProcess(t.Context(), signal(stop, 5*time.Second))
			return err
		}, "stopped (signal), continued", false},
		"stopped, and then killed": {func(s *Service) error {
			_, err := s.SignalDrillProcess(t.Context(), signal(stop, 5*time.Second))
			_, err2 := s.SignalDrillProcess(t.Context(), signal(kill, 5*time.Second))
			return errors.Join(err, err2)
		}, "stopped (signal), killed, start", false},
		"continued by the drill": {func(s *Service) error {
			_, err := s.SignalDrillProcess(t.Context(), signal(stop, 5*time.Second))
			_, err2 := s.SignalDrillProcess(t.Context(), signal(cont, 0))
			return errors.Join(err, err2)
		}, "stopped (signal), continued", false},
		"started by the drill": {func(s *Service) error {
			_, err := s.SignalDrillProcess(t.Context(), signal(kill, 5*time.Second))
			_, err2 := s.StartDrillProcess(t.Context(), &pb.StartDrillProcessRequest{Name: "eu-1"})
			return errors.Join(err, err2)
		}, "killed, start", false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fake{runs: true}
				s := New(f, admins, slog.New(slog.DiscardHandler))
				defer s.Close()
				if err := c.play(s); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Second) // virtual
				if c.ends {
					f.end()
				}
				time.Sleep(3 * time.Second) // virtual
				synctest.Wait()
				before := f.did()
				time.Sleep(2 * time.Second) // virtual
				synctest.Wait()
				got := f.did()
				if got != c.want || !strings.Contains(name, "by the drill") && before == got {
					t.Errorf("did %q, before %q; want %q", got, before, c.want)
				}
			})
		})
	}
}

func TestAnAgentThatStopsHealsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{runs: true}
		s := New(f, admins, slog.New(slog.DiscardHandler))
		if _, err := s.SignalDrillProcess(t.Context(), signal(kill, time.Hour)); err != nil {
			t.Fatal(err)
		}
		s.Close()
		if got := f.did(); got != "killed, start" {
			t.Errorf("did %q", got)
		}
		if _, err := s.SignalDrillProcess(t.Context(), signal(stop, time.Hour)); status.Code(err) != codes.Unavailable {
			t.Errorf("a closed agent breaks things: %v, %q", err, f.did())
		}
	})
}

func TestRefusals(t *testing.T) {
	f := &fake{runs: true}
	s := New(f, admins, slog.New(slog.DiscardHandler))
	defer s.Close()
	for name, c := range map[string]struct {
		req  *pb.SignalDrillProcessRequest
		code codes.Code
	}{
		"no such process": {&pb.SignalDrillProcessRequest{Name: "us-1", Signal: kill, HealsMs: 1}, codes.NotFound},
		"for ever":        {signal(kill, 0), codes.InvalidArgument},
		"too long":        {signal(stop, 25*time.Hour), codes.InvalidArgument},
		"no signal":       {signal(0, time.Second), codes.InvalidArgument},
	} {
		if _, err := s.SignalDrillProcess(t.Context(), c.req); status.Code(err) != c.code {
			t.Errorf("%s: %v", name, err)
		}
	}
	denied := New(f, func(context.Context) error { return status.Error(codes.PermissionDenied, "no admin") }, slog.New(slog.DiscardHandler))
	defer denied.Close()
	_, err := denied.SignalDrillProcess(t.Context(), signal(kill, time.Second))
	_, err2 := denied.StartDrillProcess(t.Context(), &pb.StartDrillProcessRequest{Name: "eu-1"})
	_, err3 := denied.ListDrillProcesses(t.Context(), &pb.ListDrillProcessesRequest{})
	for _, err := range []error{err, err2, err3} {
		if status.Code(err) != codes.PermissionDenied {
			t.Errorf("%v", err)
		}
	}
	if f.did() != "" {
		t.Errorf("refused, and did %q", f.did())
	}
}

func TestCommands(t *testing.T) {
	for text, want := range map[string]string{
		"":                                     "processes: names none",
		"processes: {eu-1: {start: true}}":     "processes.eu-1.pid: missing",
		"processes: {eu-1: {pid: echo 5}}":     "processes.eu-1.start: missing",
		"processes: {eu-1: {pidd: echo 5}}":    "line 1: field pidd not found",
		"proceses: {eu-1: {pid: x, start: y}}": "field proceses not found",
	} {
		if _, err := ParseCommands([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
	dir := t.TempDir()
	pid := filepath.Join(dir, "pid")
	commands, err := ParseCommands([]byte("processes:\n  eu-1:\n    pid: cat " + pid + " 2>/dev/null || true\n    start: sleep 600 >/dev/null 2>&1 & echo $! >" + pid + "\n    keep_down: rm " + pid + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	h := CommandHost(commands)
	if got, err := h.PID(t.Context(), "eu-1"); got != 0 || err != nil {
		t.Fatalf("before the start: %d, %v", got, err)
	}
	if err := h.Start(t.Context(), "eu-1"); err != nil {
		t.Fatal(err)
	}
	got, err := h.PID(t.Context(), "eu-1")
	if err != nil || got < 2 || !slices.Equal(h.Names(), []string{"eu-1"}) {
		t.Fatalf("after the start: %d, %v", got, err)
	}
	if err := h.Signal(t.Context(), "eu-1", syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(pid); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("keep_down was not run: %v", err)
	}
	if err := h.Signal(t.Context(), "eu-1", syscall.SIGKILL); err == nil {
		t.Error("a process that does not run was signalled")
	}
	// One that has ended and that nobody has waited for runs no more.
	child := exec.Command("true")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = child.Wait() }()
	ended := CommandHost{"eu-1": {PID: fmt.Sprintf("while ! grep -q ') Z' /proc/%[1]d/stat; do :; done; echo %[1]d", child.Process.Pid)}}
	if got, err := ended.PID(t.Context(), "eu-1"); got != 0 || err != nil {
		t.Errorf("of a zombie: %d, %v", got, err)
	}
	bad := CommandHost{"eu-1": {PID: "echo five"}, "eu-2": {PID: "exit 3"}, "eu-3": {PID: "echo 1"}}
	for _, name := range bad.Names() {
		if got, err := bad.PID(t.Context(), name); err == nil {
			t.Errorf("%s: pid %d", name, got)
		}
	}
}
