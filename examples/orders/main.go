// Command orders is an example of a service on Headlease: producers append the
// orders of users to Redis Streams, three workers handle them in each user's
// order, PostgreSQL has the outcome. Every write is fenced with the token of
// the shard's lease.
//
// "orders run" starts all that is needed (a cluster of two regions and three
// witnesses, redis-server, PostgreSQL), breaks workers, a producer, Redis and a region
// meanwhile, and checks in the stores what came out of it. work.go is the part
// that a service of your own would have.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const usage = `usage:
  orders run [flags]     play and check everything; see orders run -h
  orders work [flags]    one worker, as run starts it
  orders produce [flags] one producer, as run starts it
`

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if err := dispatch(ctx, os.Args[1:]); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "orders:", err)
		}
		cancel()
		os.Exit(1)
	}
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
		seed := f.Uint64("seed", 1, "of the choice of users")
		count := f.Int("count", 1000, "orders to produce")
		over := f.Duration("over", 0, "spread them over this time")
		if err := f.Parse(args[1:]); err != nil {
			return err
		}
		s, err := readStage(*path)
		if err != nil {
			return err
		}
		return produce(ctx, s, *seed, *count, *over)
	}
	return fmt.Errorf("%q is no command\n%s", args[0], usage)
}

// stage is where everything is; run writes it for the processes it starts.
type stage struct {
	ClusterFile string        `json:"cluster_file"`
	Certs       string        `json:"certs"`
	Redis       string        `json:"redis"`    // socket
	Postgres    string        `json:"postgres"` // DSN
	Users       int           `json:"users"`
	TTL         time.Duration `json:"ttl"`
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
	N       int    `json:"n,omitempty"`
}

// Events.
const (
	eventJoined   = "joined"
	eventFreezing = "freezing"
	eventLate     = "late"
	eventSent     = "sent"
)
