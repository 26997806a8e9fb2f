package devcluster

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

// What this test binary does when it is started as a child; the variables
// reach it through Options.Env.
const (
	modeVar  = "DEVCLUSTER_TEST_MODE"
	helloVar = "DEVCLUSTER_TEST_HELLO"
	// Names of processes, with commas between.
	failVar     = "DEVCLUSTER_TEST_FAIL"
	stubbornVar = "DEVCLUSTER_TEST_STUBBORN"
	dirVar      = "DEVCLUSTER_TEST_DIR"
)

func TestMain(m *testing.M) {
	switch os.Getenv(modeVar) {
	case "child":
		if err := childMain(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
			os.Exit(3)
		}
		return
	case "supervisor":
		if err := supervisorMain(); err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
			os.Exit(3)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

func listed(variable, name string) bool {
	for n := range strings.SplitSeq(os.Getenv(variable), ",") {
		if n == name {
			return true
		}
	}
	return false
}

// childMain is a server as far as the supervisor can tell: it reads its flags
// and the cluster file, binds all its addresses, says hello, and ends by
// SIGTERM.
func childMain(args []string) error {
	role := args[0]
	flags := flag.NewFlagSet(role, flag.ContinueOnError)
	config := flags.String("config", "", "")
	name := flags.String("name", "", "")
	dataDir := flags.String("data-dir", "", "")
	certs := flags.String("certs", "", "")
	faults := flags.String("faults", "", "")
	drills := flags.Bool("drills", false, "")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	if listed(failVar, *name) {
		return fmt.Errorf("no luck today for %s", *name)
	}
	for _, kv := range os.Environ() {
		if strings.HasPrefix(kv, "HEADLEASE_") {
			return fmt.Errorf("%s reached the child and would override the cluster file", kv)
		}
	}
	f, err := load(*config)
	if err != nil {
		return err
	}
	p, ok := f.Process(*name)
	if !ok || string(p.Role) != role || !*drills {
		return fmt.Errorf("bad arguments %q", args)
	}
	for _, path := range []string{*faults, *certs + "/" + *name + ".key", *certs + "/ca.crt"} {
		if _, err := os.Stat(path); err != nil {
			return err
		}
	}
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	for _, address := range []string{p.API, p.Votes, p.Raft, p.Gossip} {
		if address == "" {
			continue
		}
		l, err := net.Listen("tcp", address) // A child that stands in for a server.
		if err != nil {
			return err
		}
		defer l.Close()
	}
	if err := os.MkdirAll(*dataDir, 0o755); err != nil {
		return err
	}
	fmt.Println(*name, "is up")
	if hello := os.Getenv(helloVar); hello != "" {
		conn, err := net.Dial("tcp", hello) // As above.
		if err != nil {
			return err
		}
		if _, err := fmt.Fprint(conn, *name); err != nil {
			return err
		}
		if err := conn.Close(); err != nil {
			return err
		}
	}
	for range term {
		if !listed(stubbornVar, *name) {
			fmt.Println(*name, "ends")
			return nil
		}
		fmt.Println(*name, "does not listen")
	}
	return nil
}

// supervisorMain runs a cluster until it is killed.
func supervisorMain() error {
	h, err := newHello()
	if err != nil {
		return err
	}
	c, err := New(Options{
		Dir: os.Getenv(dirVar), Regions: 2, Servers: 1, Witnesses: 1, Logger: quiet,
		Env: h.env("child"), Ready: h.wait,
	})
	if err != nil {
		return err
	}
	if err := c.Start(context.Background()); err != nil {
		return err
	}
	fmt.Println("ready")
	select {}
}

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// hello is where children report that they are up.
type hello struct{ l net.Listener }

func newHello() (hello, error) {
	l, err := net.Listen("tcp", loopback+":0") // Between a test and its children.
	return hello{l}, err
}

func (h hello) env(mode string, more ...string) []string {
	// The race detector's runtime otherwise holds every exit up for a second.
	return append([]string{modeVar + "=" + mode, helloVar + "=" + h.l.Addr().String(), "GORACE=atexit_sleep_ms=0"}, more...)
}

// heard returns the names of the next n children.
func (h hello) heard(ctx context.Context, n int) (map[string]bool, error) {
	names := map[string]bool{}
	stop := context.AfterFunc(ctx, func() { h.l.Close() })
	defer stop()
	for len(names) < n {
		conn, err := h.l.Accept()
		if err != nil {
			return names, context.Cause(ctx)
		}
		name, err := io.ReadAll(conn)
		conn.Close()
		if err != nil {
			return names, err
		}
		names[string(name)] = true
	}
	return names, nil
}

// wait is an Options.Ready.
func (h hello) wait(ctx context.Context, c *Cluster) error {
	_, err := h.heard(ctx, len(c.File().Processes()))
	return err
}
