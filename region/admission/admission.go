// Package admission decides which calls a region server takes on, before they
// cost anything: by lane, so that what makes room is never refused behind what
// takes it, and by identity, so that one client's flood is that client's.
//
// It bounds how much work is under way at once rather than how long it queues:
// with n calls inside and a region that commits r of them a second, none waits
// longer than about n/r, whatever is asked, and the time is back to normal as
// soon as the flood ends.
package admission

import (
	"fmt"
	"math"
	"sync"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"golang.org/x/time/rate"
)

// Lane groups calls by what they do to the load.
type Lane int

const (
	// Relief makes room or keeps what is there: releases, cancels, closings,
	// streams of keepalives. It is never refused.
	Relief Lane = iota
	// Work takes room: sessions, leases, values.
	Work
	// Read changes nothing.
	Read
	lanes
)

func (l Lane) String() string {
	switch l {
	case Relief:
		return "relief"
	case Work:
		return "work"
	case Read:
		return "read"
	}
	return "unknown"
}

// Lanes are all of them.
func Lanes() []Lane { return []Lane{Relief, Work, Read} }

// Limits of one server. Zero values take the documented defaults.
type Limits struct {
	// InFlight is how many calls of the lane may be inside at once; default 2048
	// each for Work and Read.
	InFlight int
	// Rate is how many calls of Work and Read together one identity may make in
	// a second; default 20000. Burst, by default as many, is what it may make at
	// once after a rest.
	Rate  float64
	Burst int
}

const (
	defaultInFlight = 2048
	defaultRate     = 20_000
	// maxIdentities bounds the memory. One that is forgotten begins with a full
	// bucket, so that the limit is a little loose with more active ones.
	maxIdentities = 10_000
	// share of a lane that one identity may fill.
	shareNum, shareDen = 3, 4
	// Of a full lane nobody knows when room comes; a call takes milliseconds.
	fullRetry = 100 * time.Millisecond
	maxRetry  = 5 * time.Second
)

func (l Limits) withDefaults() Limits {
	if l.InFlight == 0 {
		l.InFlight = defaultInFlight
	}
	if l.Rate == 0 {
		l.Rate = defaultRate
	}
	if l.Burst == 0 {
		l.Burst = int(math.Ceil(l.Rate))
	}
	return l
}

// Validate names the fields of the cluster file's limits.
func (l Limits) Validate() error {
	switch {
	case l.InFlight < 0:
		return fmt.Errorf("limits.in_flight: %d is negative; leave it out for the default of %d", l.InFlight, defaultInFlight)
	case l.Rate < 0 || math.IsNaN(l.Rate) || math.IsInf(l.Rate, 0):
		return fmt.Errorf("limits.rate: %v is not a rate; leave it out for the default of %d calls a second", l.Rate, defaultRate)
	case l.Burst < 0:
		return fmt.Errorf("limits.burst: %d is negative; leave it out for one second's worth of the rate", l.Burst)
	}
	return nil
}

// Refusal says why a call was not taken on, and when to ask again.
type Refusal struct {
	Retry time.Duration
	What  string
	// ByIdentity: the caller's own rate or share; else the server is full.
	ByIdentity bool
}

// Control admits calls. It is safe for concurrent use.
type Control struct {
	limits Limits

	mu         sync.Mutex
	inside     [lanes]int
	identities *lru.Cache[string, *identity]
}

type identity struct {
	bucket *rate.Limiter
	inside [lanes]int
}

// New returns a Control.
func New(limits Limits) (*Control, error) {
	if err := limits.Validate(); err != nil {
		return nil, err
	}
	cache, err := lru.New[string, *identity](maxIdentities)
	if err != nil {
		return nil, err
	}
	return &Control{limits: limits.withDefaults(), identities: cache}, nil
}

// Inside is how many calls of a lane are under way.
func (c *Control) Inside(l Lane) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inside[l]
}

// Admit takes a call on, or says why not. Of an admitted call, done must be
// called once, when it has been answered.
func (c *Control) Admit(now time.Time, l Lane, name string) (done func(), refused *Refusal) {
	if l == Relief {
		return func() {}, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	who, ok := c.identities.Get(name)
	if !ok {
		who = &identity{bucket: rate.NewLimiter(rate.Limit(c.limits.Rate), c.limits.Burst)}
		c.identities.Add(name, who)
	}
	full := c.limits.InFlight
	switch share := max(full*shareNum/shareDen, 1); {
	case c.inside[l] >= full:
		return nil, &Refusal{Retry: fullRetry, What: fmt.Sprintf("%d calls of lane %s are under way on this server", full, l)}
	case who.inside[l] >= share:
		return nil, &Refusal{Retry: fullRetry, ByIdentity: true, What: fmt.Sprintf("%s has %d calls of lane %s under way on this server", name, share, l)}
	}
	turn := who.bucket.ReserveN(now, 1)
	if wait := turn.DelayFrom(now); wait > 0 {
		turn.CancelAt(now)
		return nil, &Refusal{Retry: min(wait, maxRetry), ByIdentity: true, What: fmt.Sprintf("%s makes more than %g calls a second", name, c.limits.Rate)}
	}
	c.inside[l]++
	who.inside[l]++
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.inside[l]--
		who.inside[l]--
	}, nil
}
