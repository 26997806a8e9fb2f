package client

import (
	"testing"
	"time"
)

// TestWhatSilenceAsksFor plays what calls of a server come to, and looks at what is
// done about it, in milliseconds.
func TestWhatSilenceAsksFor(t *testing.T) {
	const ms = time.Millisecond
	l := limits{ask: 100 * ms, silent: 250 * ms}
	type event struct {
		at   int
		what func(s *silence, now time.Time)
	}
	begun := (*silence).begun
	ended := func(s *silence, _ time.Time) { s.ended() }
	answered, alive, heard := (*silence).answered, (*silence).alive, (*silence).heard
	type act struct {
		at int
		do remedy
	}
	// Calls of 40 ms each, one after the other, that get no answer.
	var short []event
	for at := 0; at < 400; at += 40 {
		short = append(short, event{at, begun}, event{at + 39, ended})
	}
	for name, c := range map[string]struct {
		events []event
		// late is how much later than it asked for it is looked at.
		late int
		want []act
	}{
		"no call":                     {},
		"a quick answer":              {events: []event{{0, begun}, {99, answered}}},
		"frozen, one long call":       {events: []event{{0, begun}}, want: []act{{100, ask}, {350, passOver}}},
		"frozen, short calls":         {events: short[:18], want: []act{{100, ask}, {350, passOver}}},
		"frozen, one short call":      {events: []event{{0, begun}, {40, ended}}, want: []act{{100, ask}, {350, passOver}}},
		"frozen after an answer":      {events: []event{{0, begun}, {50, begun}, {60, answered}}, want: []act{{160, ask}, {410, passOver}}},
		"frozen, and it said so late": {events: []event{{0, begun}, {349, alive}}, want: []act{{100, ask}, {549, ask}, {799, passOver}}},
		"another chance": {
			events: []event{{0, begun}, {360, ended}, {1000, begun}},
			want:   []act{{100, ask}, {350, passOver}, {1100, ask}, {1350, passOver}},
		},
		"slow leader, a server that lives": {
			// It is asked less and less often.
			events: []event{{0, begun}, {101, alive}, {351, alive}, {752, alive}, {1553, alive}, {2554, alive}, {3555, answered}},
			want:   []act{{100, ask}, {350, ask}, {751, ask}, {1552, ask}, {2553, ask}, {3554, ask}},
		},
		"slow leader, its stream speaks": {events: []event{{0, begun}, {90, heard}, {180, heard}, {270, heard}, {300, answered}}},
		"short calls, a server that lives": {
			events: append(short[:6:6], event{120, alive}),
			want:   []act{{100, ask}},
		},
		"answers a bit late":   {events: []event{{0, begun}, {345, alive}, {346, answered}}, want: []act{{100, ask}}},
		"its end of the stick": {events: []event{{0, begun}, {150, answered}}, want: []act{{100, ask}}},
		// Who has no processor for itself cannot say that the server has none.
		"looked at late": {
			events: []event{{0, begun}, {900, answered}}, late: 60,
			want: []act{{160, ask}, {470, ask}, {780, ask}},
		},
		"looked at a bit late": {events: []event{{0, begun}}, late: 40, want: []act{{140, ask}, {430, passOver}}},
	} {
		epoch := time.Now()
		at := func(n int) time.Time { return epoch.Add(time.Duration(n) * ms) }
		var s silence
		var got []act
		looks := -1 // when it is looked at; -1: when a call begins
		for now, events := 0, c.events; now < 4000; now++ {
			for len(events) > 0 && events[0].at == now {
				events[0].what(&s, at(now))
				events = events[1:]
				if looks < 0 {
					looks = now + int(l.ask/ms) + c.late
				}
			}
			if looks != now {
				continue
			}
			do, again := s.next(at(now), l)
			if do != nothing {
				got = append(got, act{now, do})
			}
			if looks = -1; again > 0 {
				looks = now + int(again/ms) + c.late
			}
		}
		if len(got) != len(c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
			continue
		}
		for i := range got {
			if got[i] != c.want[i] {
				t.Errorf("%s: %v, want %v", name, got, c.want)
				break
			}
		}
	}
}

func TestSlownessIsRememberedForAWhile(t *testing.T) {
	const ms = time.Millisecond
	epoch := time.Now()
	c := &conns{}
	x := &connection{conns: c}
	silent := func(at time.Duration, want time.Duration) {
		t.Helper()
		if got := x.limits(epoch.Add(at), true).silent; got != want {
			t.Errorf("after %v a server is silent after %v, want %v", at, got, want)
		}
	}
	silent(0, attemptTimeout) // it may have to be connected to
	x.took(5 * ms)
	silent(0, 250*ms)
	c.lag.seen(epoch, 400*ms)
	c.lag.seen(epoch.Add(time.Second), 100*ms) // counts for less
	silent(5*time.Second, 550*ms)
	silent(10*time.Second, 450*ms)
	c.lag.seen(epoch.Add(10*time.Second), 300*ms)
	silent(10*time.Second, 550*ms)
	silent(25*time.Second, 325*ms)
	silent(30*time.Second, 250*ms)
	silent(time.Hour, 250*ms)
	c.lag.seen(epoch.Add(time.Hour), 3*time.Second)
	silent(time.Hour, attemptTimeout)
	// Far away: an answer takes as long as it takes.
	x.fastest = 0
	x.took(200 * ms)
	x.took(400 * ms)
	silent(2*time.Hour, 600*ms)
	if got := x.limits(epoch, false).silent; got != attemptTimeout {
		t.Errorf("while it is connected to it is silent after %v", got)
	}
	if got := x.limits(epoch, true).ask; got != 400*ms {
		t.Errorf("it is asked after %v", got)
	}
}

// What a server was given when it was asked counts, also if it would be given
// less by the time at which it is looked at: that is not to look late.
func TestSilenceIsJudgedByWhatWasAsked(t *testing.T) {
	const ms = time.Millisecond
	epoch := time.Now()
	c := &conns{}
	x := &connection{conns: c}
	x.took(5 * ms)
	c.lag.seen(epoch, 1500*ms)
	var s silence
	s.begun(epoch.Add(time.Second))
	at := epoch.Add(1100 * ms)
	do, in := s.next(at, x.limits(at, true))
	if do != ask {
		t.Fatalf("%v after %v", do, at.Sub(epoch))
	}
	at = at.Add(in)
	if do, _ := s.next(at, x.limits(at, true)); do != passOver {
		t.Errorf("%v after %v, want it passed over", do, at.Sub(epoch))
	}
}
