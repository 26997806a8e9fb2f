package cache

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// ErrDown is returned while the cache is not asked because it failed just now.
var ErrDown = errors.New("the lease cache is down")

// Defaults of a Reader.
const (
	DefaultReadTimeout = 50 * time.Millisecond
	// After failuresInARow the cache is not asked for downFor.
	failuresInARow = 3
	downFor        = time.Second
	// askEvery is how often the server's clock is asked for, beside a look-up.
	askEvery = time.Second
)

// ReaderConfig configures a Reader. Zero values stand for the defaults.
type ReaderConfig struct {
	// Cluster of the leases. Needed.
	Cluster string
	// Prefix of the keys; default DefaultPrefix.
	Prefix string
	// Timeout of a look-up; default DefaultReadTimeout.
	Timeout time.Duration
}

// Reader looks leases up in the cache.
type Reader struct {
	client  redis.UniversalClient
	key     keys
	timeout time.Duration
	// inARow counts failures since the last answer; downUntil is in nanoseconds since start.
	inARow    atomic.Int32
	downUntil atomic.Int64
	start     time.Time
	clock     atomic.Pointer[reading]
}

// reading is the server's clock, in milliseconds, when the local one was at.
type reading struct {
	server int64
	at     time.Time
}

// NewReader returns a reader that uses the client, which stays the caller's to
// close and should have ContextTimeoutEnabled; [ServerConfig.Client] makes one.
func NewReader(client redis.UniversalClient, cfg ReaderConfig) (*Reader, error) {
	switch {
	case client == nil:
		return nil, errors.New("reader of the lease cache: client: is nil")
	case cfg.Cluster == "":
		return nil, errors.New("reader of the lease cache: cluster: is empty; name the cluster that the region is of")
	case cfg.Timeout < 0:
		return nil, errors.New("reader of the lease cache: timeout: must not be negative")
	}
	if cfg.Prefix == "" {
		cfg.Prefix = DefaultPrefix
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = DefaultReadTimeout
	}
	return &Reader{client: client, key: keys{cfg.Prefix, cfg.Cluster}, timeout: cfg.Timeout, start: time.Now()}, nil
}

// Lookup returns the entry of a resource; false: there is none, which says
// nothing. After a few failures in a row it fails with ErrDown, at once, for a
// second.
func (r *Reader) Lookup(ctx context.Context, resource string) (Entry, bool, error) {
	now := time.Since(r.start).Nanoseconds()
	if until := r.downUntil.Load(); now < until {
		return Entry{}, false, ErrDown
	} else if until != 0 && !r.downUntil.CompareAndSwap(until, now+downFor.Nanoseconds()) {
		return Entry{}, false, ErrDown // another one tries
	}
	entry, found, err := r.lookup(ctx, resource)
	switch {
	case err == nil:
		r.inARow.Store(0)
		r.downUntil.Store(0)
	case ctx.Err() != nil: // the caller's own end says nothing of the cache
	case r.inARow.Add(1) >= failuresInARow:
		r.downUntil.Store(now + downFor.Nanoseconds())
	}
	return entry, found, err
}

func (r *Reader) lookup(ctx context.Context, resource string) (Entry, bool, error) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	key := r.key.of(resource)
	now, known := r.serverNow()
	var text string
	var err error
	if known {
		text, err = r.client.Get(ctx, key).Result()
	} else {
		sent := time.Now() // not the answer's time: an age is rather said to be too high
		pipe := r.client.Pipeline()
		get, at := pipe.Get(ctx, key), pipe.Time(ctx)
		_, execErr := pipe.Exec(ctx)
		text, err = get.Result()
		switch {
		case at.Err() == nil && at.Val().Unix() > 0:
			r.clock.Store(&reading{server: at.Val().UnixMilli(), at: sent})
			now = at.Val().UnixMilli() + time.Since(sent).Milliseconds()
		case err == nil || errors.Is(err, redis.Nil):
			// Without a connection the commands themselves may have no error.
			err = errors.Join(at.Err(), execErr)
		}
	}
	switch {
	case errors.Is(err, redis.Nil):
		return Entry{}, false, nil
	case err != nil:
		return Entry{}, false, fmt.Errorf("lease cache: %w", err)
	}
	entry, err := decode(resource, text, now)
	return entry, err == nil, err
}

// serverNow is the server's clock, in milliseconds, if it was asked within the last second; else
// one of the callers is told that it is not known, and asks.
func (r *Reader) serverNow() (now int64, known bool) {
	last := r.clock.Load()
	if last == nil {
		return 0, false
	}
	gone := time.Since(last.at)
	if gone > askEvery && r.clock.CompareAndSwap(last, &reading{last.server + askEvery.Milliseconds(), last.at.Add(askEvery)}) {
		return 0, false
	}
	return last.server + gone.Milliseconds(), true
}
