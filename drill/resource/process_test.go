package resource

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/devcluster"
)

// roleVar makes this test binary a resource process or a worker.
const roleVar = "RESOURCE_TEST_ROLE"

func TestMain(m *testing.M) {
	var err error
	switch os.Getenv(roleVar) {
	case "":
		goleak.VerifyTestMain(m)
		return
	case "resource":
		err = resourceMain(os.Args[1:])
	case "worker":
		err = workerMain(os.Args[1], os.Args[2])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// resourceMain takes what DefaultArgs gives.
func resourceMain(args []string) error {
	flags := flag.NewFlagSet("resource", flag.ContinueOnError)
	dir := flags.String("dir", "", "")
	guard := flags.String("guard", "", "")
	address := flags.String("address", "", "")
	if err := flags.Parse(args[2:]); err != nil {
		return err
	}
	unguarded, err := ParseGuard(*guard)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return Run(ctx, Config{Dir: *dir, Address: *address, UnguardedForDrill: unguarded, Ready: PrintReady(os.Stdout), Logger: quiet})
}

// workerMain believes that it holds the lease of a token, stops itself, and
// sends its write when it is resumed.
func workerMain(address, token string) error {
	t, err := fence.ParseToken(token)
	if err != nil {
		return err
	}
	c := NewClient(address, "old worker")
	ctx := context.Background()
	if _, err := c.Claim(ctx, "lock/ledger", t); err != nil {
		return err
	}
	// To this thread: with a signal to the process, another one may take it, and
	// this one go on into the send.
	runtime.LockOSThread()
	if err := unix.Tgkill(os.Getpid(), unix.Gettid(), unix.SIGSTOP); err != nil {
		return err
	}
	_, err = c.Write(ctx, "lock/ledger", t, "late")
	var stale *fence.StaleError
	if errors.As(err, &stale) {
		fmt.Println("refused")
		return nil
	}
	if err == nil {
		fmt.Println("accepted")
	}
	return err
}

// With real processes: the old worker is frozen before its send, the resource
// is killed and started again meanwhile, a new worker takes over, and the late
// write is refused; with the guard off it is accepted.
func TestFrozenWorkersLateWrite(t *testing.T) {
	for _, unguarded := range []bool{false, true} {
		t.Run(fmt.Sprintf("unguarded=%v", unguarded), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			dir := t.TempDir()
			g := devcluster.NewGroup()
			defer g.Stop(ctx, 5*time.Second)
			o := ProcessOptions{
				Group: g, Binary: os.Args[0], Env: []string{roleVar + "=resource", "GORACE=atexit_sleep_ms=0"},
				Dir: filepath.Join(dir, "data"), Log: filepath.Join(dir, "resource.log"), UnguardedForDrill: unguarded,
			}
			r, err := StartProcess(ctx, o)
			if err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			worker, err := g.Start(devcluster.Spec{
				Name: "old worker", Binary: os.Args[0], Args: []string{r.Address, tok(1, 1).String()},
				Env: []string{roleVar + "=worker", "GORACE=atexit_sleep_ms=0"}, Log: filepath.Join(dir, "worker.log"), Stdout: &out,
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := worker.WaitStopped(ctx); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(r.Signal(syscall.SIGKILL), r.Wait(ctx)); err != nil {
				t.Fatal(err)
			}
			o.Address = r.Address // the worker knows no other
			if r, err = StartProcess(ctx, o); err != nil {
				t.Fatal(err)
			}
			c := NewClient(r.Address, "new worker")
			if _, err := c.Claim(ctx, "lock/ledger", tok(2, 1)); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Write(ctx, "lock/ledger", tok(2, 1), "current"); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(worker.Signal(syscall.SIGCONT), worker.Wait(ctx)); err != nil {
				t.Fatal(err)
			}
			journal, err := c.Journal(ctx)
			if err != nil || len(journal) != 4 {
				t.Fatalf("journal %+v, %v", journal, err)
			}
			last, found := journal[3], Violations(journal)
			if unguarded {
				if out.String() != "accepted\n" || last.Outcome != Accepted || len(found) != 1 {
					t.Errorf("guard off: worker %q, journal %+v, violations %q; log %s", out.String(), last, found, worker.LogTail())
				}
				return
			}
			if out.String() != "refused\n" || last.Outcome != Stale || last.Writer != "old worker" || last.Mark != tok(2, 1) || len(found) != 0 {
				t.Errorf("guard on: worker %q, journal %+v, violations %q; log %s", out.String(), last, found, worker.LogTail())
			}
		})
	}
}

func TestProcessThatDoesNotServeSaysWhy(t *testing.T) {
	g := devcluster.NewGroup()
	defer g.Stop(t.Context(), 5*time.Second)
	dir := t.TempDir()
	_, err := StartProcess(t.Context(), ProcessOptions{
		Group: g, Binary: os.Args[0], Env: []string{roleVar + "=resource"},
		Dir: filepath.Join(dir, "no", "parent"), Log: filepath.Join(dir, "log"),
	})
	if err == nil || !strings.Contains(err.Error(), "resource ended (exit status 1)") || !strings.Contains(err.Error(), "make its parent first") {
		t.Errorf("%v", err)
	}
}

func TestParseGuard(t *testing.T) {
	if off, err := ParseGuard("on"); off || err != nil {
		t.Error(off, err)
	}
	if off, err := ParseGuard("off"); !off || err != nil {
		t.Error(off, err)
	}
	if _, err := ParseGuard("no"); err == nil || !strings.Contains(err.Error(), `guard "no"`) {
		t.Error(err)
	}
}
