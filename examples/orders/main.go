// Command orders is an example of a service on Headlease: producers append the
// orders of users to Redis Streams, three workers handle them in each user's
// order, PostgreSQL has the outcome. Every write is fenced with the token of
// the shard's lease.
//
// "orders run" starts all that is needed (a cluster of two regions and three
// witnesses, redis-server, PostgreSQL), breaks workers, a producer, Redis and
// regions meanwhile, and checks in the stores what came out of it. work.go is
// the part that a service of your own would have.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/headlease/headlease/fence"
)

const usage = `usage:
  orders run [flags]     play and check everything; see orders run -h
  orders work [flags]    one worker, as run starts it
  orders produce [flags] one producer, as run starts it

A run exits with 0 if all is well, 1 if it found a violation or failed, and 2 if
it was inconclusive: too little was broken to show anything.
`

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	code := exitCode(dispatch(ctx, os.Args[1:]))
	cancel()
	os.Exit(code)
}

// inconclusive is the error of a run that shows nothing.
type inconclusive string

func (e inconclusive) Error() string { return "inconclusive: " + string(e) }

// exitCode prints the error, if any.
func exitCode(err error) int {
	var nothing inconclusive
	switch {
	case err == nil:
		return 0
	case errors.Is(err, flag.ErrHelp):
		return 1
	}
	fmt.Fprintln(os.Stderr, "orders:", err)
	if errors.As(err, &nothing) && !errors.Is(err, errViolated) {
		return 2
	}
	return 1
}

func dispatch(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("no command is given\n%s", usage)
	}
	switch args[0] {
	case "run":
		o, err := parseRun(args[1:])
		if err != nil {
			return err
		}
		return run(ctx, o)
	case "work":
		f := flag.NewFlagSet("orders work", flag.ContinueOnError)
		path := f.String("stage", "", "file that says where everything is")
		name := f.String("name", "", "the worker's name, the same after a restart")
		if err := f.Parse(args[1:]); err != nil {
			return err
		}
		s, err := readStage(*path)
		if err != nil {
			return err
		}
		return work(ctx, s, *name)
	case "produce":
		f := flag.NewFlagSet("orders produce", flag.ContinueOnError)
		path := f.String("stage", "", "file that says where everything is")
		seed := f.Uint64("seed", 1, "of the choice of accounts")
		count := f.Int("count", 1000, "orders to produce")
		over := f.Duration("over", 0, "spread them over this time")
		each := f.Bool("each", false, "begin with an order of each account")
		if err := f.Parse(args[1:]); err != nil {
			return err
		}
		s, err := readStage(*path)
		if err != nil {
			return err
		}
		return produce(ctx, s, *seed, *count, *over, *each)
	case "help", "-h", "-help", "--help":
		fmt.Print(usage)
		return nil
	}
	return fmt.Errorf("%q is no command\n%s", args[0], usage)
}

// stage is where everything is; run writes it for the processes it starts.
type stage struct {
	ClusterFile string `json:"cluster_file"`
	Certs       string `json:"certs"`
	Redis       string `json:"redis"` // socket or address
	// Postgres is a DSN; empty: StandIn is used, the URL of one.
	Postgres string        `json:"postgres,omitempty"`
	StandIn  string        `json:"stand_in,omitempty"`
	Users    int           `json:"users"`
	TTL      time.Duration `json:"ttl"`
	// Poll as redisstream.Config's; 0 is its default.
	Poll time.Duration `json:"poll,omitempty"`
	// Unguarded is the control run: tokens are not compared.
	Unguarded bool `json:"unguarded"`
}

func readStage(path string) (s stage, err error) {
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return s, fmt.Errorf("--stage: %w", err)
	}
	return s, nil
}

// report is a line that a process prints.
type report struct {
	Event string `json:"event"`
	// Store and Refused of a late write.
	Store   string `json:"store,omitempty"`
	Refused bool   `json:"refused,omitempty"`
	// N orders that are sent for good.
	N int `json:"n,omitempty"`
	// Held are the shards with a write on its way when the process freezes.
	Held []heldShard `json:"held,omitempty"`
}

type heldShard struct {
	Resource string      `json:"resource"`
	Token    fence.Token `json:"token"`
}

// Events.
const (
	eventJoined   = "joined"
	eventFreezing = "freezing"
	eventLate     = "late"
	eventSent     = "sent"
)

// The stores, as reports name them.
const (
	inPostgres = "postgres"
	inRedis    = "redis"
)

var sayLock sync.Mutex

func say(r report) {
	sayLock.Lock()
	defer sayLock.Unlock()
	// It fails if the run has gone; then nobody needs it.
	_ = json.NewEncoder(os.Stdout).Encode(r)
}
