package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"
)

// Errors every driver maps its own answers to.
var (
	ErrHeld        = errors.New("key is held by another client")
	ErrLost        = errors.New("lease or session is lost")
	ErrUnsupported = errors.New("not supported by this driver")
)

// Driver is ONE client of a system under test, with its own connection(s).
// The harness opens one Driver per concurrent client, so equal client
// concurrency means an equal number of connections for every peer.
type Driver interface {
	// Acquire tries once and never queues. It returns a fencing token (0 if the
	// peer has none) or ErrHeld.
	Acquire(ctx context.Context, key string, ttl time.Duration) (token uint64, err error)
	// AcquireWait queues until the key is granted, by the peer's own best
	// blocking recipe (watch, wait queue, pub/sub, polling).
	AcquireWait(ctx context.Context, key string, ttl time.Duration) (token uint64, err error)
	// Release gives back a key that this Driver acquired with that token.
	Release(ctx context.Context, key string, token uint64) error
	// OpenSession makes an independent TTL session (a lease, a ZooKeeper
	// session...). Several may share one Driver where the peer can multiplex.
	OpenSession(ctx context.Context, ttl time.Duration) (Session, error)
	// Notifications counts server->client messages that told a waiter something
	// (watch events, pub/sub messages, blocking grants), for W3.
	Notifications() uint64
	Close() error
}

// Session is one TTL lease that holds zero or more keys.
type Session interface {
	// Hold binds a key to the session: one try, ErrHeld when taken.
	Hold(ctx context.Context, key string) (token uint64, err error)
	// StartKeepAlive starts the peer's own background renewal.
	StartKeepAlive() error
	// KeepAlives counts renewals so far (an estimate where the client hides them).
	KeepAlives() uint64
	// Alive is what the peer's API tells the application right now.
	Alive() bool
	// Abandon dies without telling the server (client crash).
	Abandon()
	// Close ends the session politely.
	Close(ctx context.Context) error
}

// LenientSession is implemented where an application may read "alive" in a
// looser way than Alive does (ZooKeeper: not yet told Expired).
type LenientSession interface{ AliveLenient() bool }

// HeldCounter counts how many of the keys prefix+"0".."n-1" are held, cheaply.
type HeldCounter interface {
	CountHeld(ctx context.Context, prefix string, n int) (int, error)
}

// System is a cluster of server processes that one or more drivers talk to.
type System interface {
	Start(ctx context.Context, env *Env) error
	Stop()
	Procs() []*Proc
	// Leader is the index in Procs of the current leader, or 0 for a peer that
	// has no leader.
	Leader(ctx context.Context) (int, error)
	// Restart starts member i again on its old data.
	Restart(ctx context.Context, i int) error
	// Ready returns nil when every member serves.
	Ready(ctx context.Context) error
	Info() string
}

// LeaderMover can put the leader on a given member (W8).
type LeaderMover interface {
	MoveLeader(ctx context.Context, i int) error
}

// Opts says which members a client may talk to and from where.
type Opts struct {
	Nodes []int   // member indices; the client is given exactly these
	Dial  DialCtx // nil: ordinary dialing
}

// DialCtx dials a TCP address (W8 dials from inside a network namespace).
type DialCtx func(ctx context.Context, network, addr string) (net.Conn, error)

// Env places a system's members.
type Env struct {
	Root  string            // data root on the real disk
	Hosts []string          // per member host; empty: 127.0.0.1 for all
	NS    []string          // per member network namespace; empty: none
	Dials []DialCtx         // per member, dial from a place that reaches it
	Tune  map[string]string // per-workload tuning (W8: etcd timers)
	Tag   string            // distinguishes data dirs
}

func (e *Env) host(i int) string {
	if len(e.Hosts) == 0 {
		return "127.0.0.1"
	}
	return e.Hosts[i]
}

func (e *Env) ns(i int) string {
	if len(e.NS) == 0 {
		return ""
	}
	return e.NS[i]
}

func (e *Env) dial(i int) DialCtx {
	if len(e.Dials) == 0 {
		return nil
	}
	return e.Dials[i]
}

// Spec registers a driver.
type Spec struct {
	Name      string
	System    string // key in systems
	Open      func(ctx context.Context, s System, o Opts) (Driver, error)
	Workloads string // space-separated workload names it takes part in
	Share     int    // sessions that share one Driver in W4/W6 (1: none)
	LeaderPin bool   // clients talk to the leader only, in every workload
	Note      string
}

var (
	specs   = map[string]*Spec{}
	order   []string
	systems = map[string]func() System{}
)

func register(s *Spec) {
	if specs[s.Name] != nil {
		panic("driver registered twice: " + s.Name)
	}
	specs[s.Name] = s
	order = append(order, s.Name)
}

func registerSystem(name string, f func() System) { systems[name] = f }

// spread gives client i one member, round robin.
func spread(i, members int) []int { return []int{i % members} }

func allNodes(members int) []int {
	n := make([]int, members)
	for i := range n {
		n[i] = i
	}
	return n
}

func without(members, x int) []int {
	var n []int
	for i := 0; i < members; i++ {
		if i != x {
			n = append(n, i)
		}
	}
	if len(n) == 0 {
		n = []int{x}
	}
	return n
}

// percentile of a sorted slice, nearest rank.
func percentile(sorted []int64, p float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	i := int(p/100*float64(len(sorted))+0.9999999) - 1
	if i < 0 {
		i = 0
	}
	if i >= len(sorted) {
		i = len(sorted) - 1
	}
	return float64(sorted[i])
}

func sorted64(d []int64) []int64 {
	slices.Sort(d)
	return d
}

func sortedFloats(v []float64) []float64 { return slices.Sorted(slices.Values(v)) }

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := sortedFloats(v)
	if len(s)%2 == 1 {
		return s[len(s)/2]
	}
	return (s[len(s)/2-1] + s[len(s)/2]) / 2
}

// poll calls f until it returns nil or the time is over.
func poll(ctx context.Context, every, max time.Duration, f func(context.Context) error) error {
	end := time.Now().Add(max)
	var err error
	for {
		c, cancel := context.WithTimeout(ctx, 3*time.Second)
		err = f(c)
		cancel()
		if err == nil {
			return nil
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return fmt.Errorf("gave up after %v: %w", max, err)
		}
		time.Sleep(every)
	}
}
