package client

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

const (
	// minSilent is the least time in which a server must say that it lives: on a
	// machine that is busy, but not hung, 100 ms are not rare.
	minSilent = 250 * time.Millisecond
	// askTimeout bounds the wait for that, once the server counts as silent: what
	// comes then was slow, and not hung. More than any limits.silent.
	askTimeout = attemptTimeout + laterTimeout
	// lagLasts: slowness is forgotten, little by little, in so long. Where it goes
	// on, servers are asked more often than that.
	lagLasts = 20 * time.Second
)

// connection to one server. What its calls say of the server's silence counts
// together; a server that neither answers calls nor, asked beside them, that it
// lives is passed over: its calls go to another server. That costs little if it
// was in vain, so the region's stream with all its sessions stays, until another
// server has answered in the place of this one.
type connection struct {
	*grpc.ClientConn
	conns *conns
	at    int

	// Under the conns' lock:

	silence  silence
	attempts map[*attempt]struct{}
	// timer looks at the silence; watched: it is running.
	timer   *time.Timer
	watched bool
	// asking: a question whether it lives is under way.
	asking bool
	// fastest answer to a call; 0: there was none.
	fastest time.Duration
	// doubted: passed over, and nothing was heard of it since. hung: and another
	// server has answered meanwhile, so that it was not in vain.
	doubted, hung bool
}

// lag is how long servers lately took to say that they live: a move that was in
// vain makes the next one slower.
type lag struct {
	most time.Duration
	at   time.Time
}

func (l *lag) seen(now time.Time, d time.Duration) {
	if d >= l.now(now) {
		*l = lag{d, now}
	}
}

func (l *lag) now(now time.Time) time.Duration {
	left := lagLasts - now.Sub(l.at)
	return time.Duration(float64(l.most) * max(0, left.Seconds()/lagLasts.Seconds()))
}

// limits of the server's silence; up: the connection is there, and need not be
// made first. conns' lock is held.
func (x *connection) limits(now time.Time, up bool) limits {
	if x.fastest == 0 || !up {
		return limits{askAfter, attemptTimeout}
	}
	return limits{
		ask:    max(askAfter, min(2*x.fastest, attemptTimeout)),
		silent: min(max(minSilent+x.conns.lag.now(now), 3*x.fastest), attemptTimeout),
	}
}

// attempt is one try of a call.
type attempt struct {
	on     *connection
	ctx    context.Context
	cancel context.CancelFunc
	begun  time.Time
	// passed: its server was passed over meanwhile. Under the conns' lock.
	passed bool
}

// begin a try on the connection in use. It is to be ended.
func (c *conns) begin(ctx context.Context, timeout time.Duration) (*attempt, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	x, err := c.currentLocked()
	if err != nil {
		return nil, err
	}
	a := &attempt{on: x, begun: time.Now()}
	a.ctx, a.cancel = context.WithTimeout(ctx, timeout)
	x.attempts[a] = struct{}{}
	x.silence.begun(a.begun)
	if !x.watched {
		x.watched = true
		x.look(askAfter)
	}
	return a, nil
}

// end takes what came of it; expired: its context ended before it did. It returns
// whether that is because the server was passed over.
func (a *attempt) end(err error, expired bool) (passed bool) {
	x, c := a.on, a.on.conns
	a.cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(x.attempts, a)
	decided := err == nil || len(status.Convert(err).Details()) > 0
	switch {
	case err != nil && errors.As(err, new(*Error)): // of this package, not of a server
		x.silence.ended()
		return false
	case expired && !decided:
		x.silence.ended()
		return a.passed
	}
	now := time.Now()
	x.silence.answered(now)
	if !decided {
		return false // mostly a connection that was refused or has broken
	}
	x.took(now.Sub(a.begun))
	x.doubted, x.hung = false, false
	for _, y := range c.open {
		if y == nil || !y.doubted || y.hung {
			continue
		}
		y.hung = true
		switch {
		case y != c.stream:
			c.leaveLocked(y, true)
		case c.found != nil:
			c.found()
		}
	}
	return false
}

// took notes how long an answer took. conns' lock is held.
func (x *connection) took(d time.Duration) {
	if x.fastest == 0 || d < x.fastest {
		x.fastest = max(d, 1)
	}
}

// heard anything of the server beside answers to calls.
func (x *connection) heard() {
	x.conns.mu.Lock()
	defer x.conns.mu.Unlock()
	if !x.silence.since.IsZero() {
		x.silence.heard(time.Now())
	}
	x.doubted, x.hung = false, false
}

// streams says that the region's stream is on this connection, or (false) not
// any more.
func (x *connection) streams(on bool) {
	x.conns.mu.Lock()
	defer x.conns.mu.Unlock()
	if on {
		x.conns.stream = x
		x.doubted, x.hung = false, false // it has another chance
	} else if x.conns.stream == x {
		x.conns.stream = nil
		if x.hung { // the stream has broken before it was left for that
			x.conns.leaveLocked(x, true)
		}
	}
}

// hangs reports whether another server answers in the place of this one.
func (x *connection) hangs() bool {
	x.conns.mu.Lock()
	defer x.conns.mu.Unlock()
	return x.hung
}

// look at the silence in a while. conns' lock is held.
func (x *connection) look(in time.Duration) {
	if x.timer == nil {
		x.timer = time.AfterFunc(in, x.watch)
		return
	}
	x.timer.Reset(in)
}

// watch is the timer's: it does what the silence asks for, and waits for
// nothing.
func (x *connection) watch() {
	c := x.conns
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open[x.at] != x {
		return // given up
	}
	now := time.Now()
	since := x.silence.since
	do, again := x.silence.next(now, x.limits(now, x.GetState() == connectivity.Ready))
	switch do {
	case nothing:
	case ask:
		if !x.asking {
			x.asking = true
			c.closing.Go(func() { x.ask(now) })
		}
	case passOver:
		if len(c.servers) == 1 {
			break // where to?
		}
		c.logger.Info("a server answers neither calls nor whether it lives; others are asked", "region", c.region,
			"server", c.servers[x.at].Name, "silent", now.Sub(since).Round(time.Millisecond))
		x.doubted = true
		if c.at == x.at {
			c.at = (x.at + 1) % len(c.servers)
		}
		for a := range x.attempts {
			a.passed = true
			a.cancel()
		}
	}
	// Something may be heard meanwhile, after which the next silence counts anew and
	// wants to be looked at sooner than this one.
	if x.watched = again > 0; x.watched {
		x.look(min(again, askAfter))
	}
}

// ask the server whether it lives. An answer counts whenever it comes, and any
// one does.
func (x *connection) ask(asked time.Time) {
	ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
	defer cancel() // the connection's end ends it, too
	_, err := grpc_health_v1.NewHealthClient(x).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	c := x.conns
	c.mu.Lock()
	defer c.mu.Unlock()
	x.asking = false
	now := time.Now()
	switch status.Code(err) {
	case codes.DeadlineExceeded:
		x.silence.asked = time.Time{} // what it is asked from now on is another question
		return
	case codes.Canceled: // with the connection
		return
	case codes.Unavailable: // mostly a connection that was refused or has broken
		x.silence.heard(now)
		return
	default:
	}
	if x.fastest != 0 && !x.hung {
		c.lag.seen(now, now.Sub(asked))
	}
	x.took(now.Sub(asked))
	x.doubted, x.hung = false, false
	x.silence.alive(now)
}

// giveUp the connection, whose calls end with it. conns' lock is held.
func (x *connection) giveUp() {
	if x.timer != nil {
		x.timer.Stop()
	}
}
