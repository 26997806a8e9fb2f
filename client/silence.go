package client

import "time"

const (
	// askAfter is how long a call goes unanswered before its server is asked
	// whether it lives.
	askAfter = 100 * time.Millisecond
	// askAgainBy bounds the pause between two such questions to a server that
	// answers them, and not its calls: what is behind it is slow.
	askAgainBy = time.Second
	// maxOverslept: who looks so much later than it wanted to has no processor
	// for itself, and says nothing of the server.
	maxOverslept = 50 * time.Millisecond
)

// silence is what calls say of whether a server lives, which outlives each of
// them: calls of 50 ms that end one after the other without an answer count
// together. It is a value, driven under a lock of who has it.
type silence struct {
	// open calls.
	open int
	// since is when the first call was sent that is without an answer, if nothing
	// was heard of the server after that; zero: there is none.
	since time.Time
	// asked is when the server was asked whether it lives; zero: it was not. silent
	// is in how long it must answer that, as of then.
	asked  time.Time
	silent time.Duration
	// lives counts its answers to that in a row, while it answered no call.
	lives int
}

// limits of a server's silence.
type limits struct {
	// ask it whether it lives when a call is unanswered for so long.
	ask time.Duration
	// silent: it does not live if it has not answered that in so long.
	silent time.Duration
}

// remedy is what is to be done about a silent server.
type remedy int

const (
	nothing remedy = iota
	// ask it whether it lives.
	ask
	// passOver it: others are to be asked what it was asked.
	passOver
)

func (s *silence) begun(now time.Time) {
	s.open++
	if s.since.IsZero() {
		s.since = now
	}
}

// ended without an answer: nothing has been heard.
func (s *silence) ended() { s.open-- }

// answered a call.
func (s *silence) answered(now time.Time) {
	s.open--
	s.lives = 0
	s.heard(now)
}

// alive: the server has answered that it lives.
func (s *silence) alive(now time.Time) {
	s.lives++
	s.heard(now)
}

// heard anything of the server. The calls that it has not answered yet are
// waited for anew.
func (s *silence) heard(now time.Time) {
	s.since, s.asked = time.Time{}, time.Time{}
	if s.open > 0 {
		s.since = now
	}
}

// renew gives the server as much time as one of which nothing is known.
func (s *silence) renew() { *s = silence{open: s.open} }

// next returns what is to be done now, and how long until it is to be asked
// again; 0: when the next call has begun.
func (s *silence) next(now time.Time, l limits) (remedy, time.Duration) {
	switch {
	case s.since.IsZero():
		return nothing, 0
	case s.asked.IsZero():
		pause := max(l.ask, min(l.ask<<min(s.lives, 8), askAgainBy))
		if left := s.since.Add(pause).Sub(now); left > 0 {
			return nothing, left
		}
	default:
		overslept := now.Sub(s.asked) - s.silent
		if overslept < 0 {
			return nothing, -overslept
		}
		if overslept < maxOverslept {
			s.renew()
			return passOver, 0
		}
	}
	s.asked, s.silent = now, l.silent
	return ask, l.silent
}
