// Package phi suspects a region that falls silent: the phi-accrual failure
// detector of Hayashibara, Défago, Yared and Katayama ("The φ Accrual Failure
// Detector", SRDS 2004), fed with a region leader's numbered heartbeats.
//
// Phi is -log10 of the probability that a heartbeat still comes, given the gaps
// seen so far (a normal distribution, moved by an acceptable pause). It is a
// suspicion and never authority: a wrong one costs a wait or a campaign that
// voters refuse, and leases decide.
//
// Rules of the design, §4 [F43]:
//   - a gap is elapsed / Δseq, so lost datagrams do not look like a slow sender;
//   - bursts (a gap under a quarter of the interval) are heard, but not sampled;
//   - so is the first heartbeat of a term, after an own pause, or after crashed;
//   - the observer's own pause empties the window (Resume);
//   - a region never heard is crashed after the acceptable pause;
//   - whatever the window holds, silence of D + 0.5 s is crashed.
package phi

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

// Numbers of the design, §4.
const (
	// Window is how many gaps are remembered.
	Window = 200
	// Threshold is the phi at which a region is suspected to have crashed.
	Threshold = 8
	// Interval is the time between a leader's heartbeats.
	Interval = 250 * time.Millisecond
	// CapMargin added to D is the silence that is always crashed.
	CapMargin = 500 * time.Millisecond

	// maxPhi stands for "certain": beyond it the tail underflows.
	maxPhi = 300
	// recovery is how many heartbeats on time make a slow region healthy.
	recovery = 8
)

// Params of a detector.
type Params struct {
	// D is the head lease's length: the largest among the region's partitions.
	D time.Duration
	// Interval between heartbeats; Interval if zero.
	Interval time.Duration
}

func (p Params) withDefaults() Params {
	if p.Interval == 0 {
		p.Interval = Interval
	}
	return p
}

// Validate reports all faults at once.
func (p Params) Validate() error {
	p = p.withDefaults()
	var errs []error
	if p.D <= 0 || p.D > register.MaxD {
		errs = append(errs, fmt.Errorf("d: %v is out of range; use more than 0 and at most %v", p.D, register.MaxD))
	}
	if p.Interval < 0 || (p.D > 0 && p.Interval > p.D/2) {
		errs = append(errs, fmt.Errorf("interval: %v is out of range; use more than 0 and at most half of d (%v)", p.Interval, p.D))
	}
	return errors.Join(errs...)
}

// Pause is the silence beyond the usual gap that is no ground for suspicion.
func (p Params) Pause() time.Duration { return p.D * 3 / 4 }

// MinSigma is the smallest spread assumed, so that a very regular sender is
// not suspected for a trifle.
func (p Params) MinSigma() time.Duration { return p.D / 20 }

// Cap is the silence that is crashed whatever the window holds.
func (p Params) Cap() time.Duration { return p.D + CapMargin }

// slowAfter is the silence from which a region is shown as slow.
func (p Params) slowAfter() time.Duration { return max(p.D/4, 3*p.Interval) }

// Suspicion is what an observer thinks of a region.
type Suspicion struct {
	// Verdict is unknown only while nothing has been heard for less than the
	// acceptable pause since the observer's start or own pause.
	Verdict register.Verdict
	Phi     float64
	// Silent is the time since the last heartbeat; negative: never heard.
	Silent time.Duration
}

// Detector judges one region. It is a plain value without lock: the caller
// serialises, and a copy is an independent detector. Instants must not go back.
type Detector struct {
	p Params

	term, seq uint64
	// last is when the region was last heard; since is from when silence is
	// judged: last, or the observer's start or own pause if that was later.
	last, since instant.Instant
	// heard: ever; fresh: since the observer's start or own pause.
	heard, fresh bool
	// slow and onTime are the hysteresis of the display.
	slow   bool
	onTime int

	// The window, in microseconds: integers, so that the running sums are
	// exact (200 gaps of under 61 s, squared, fit an int64).
	gaps     [Window]int64
	n, next  int
	sum, sqr int64
}

// New returns a detector that begins to listen at now.
func New(p Params, now instant.Instant) (*Detector, error) {
	if err := p.Validate(); err != nil {
		return nil, fmt.Errorf("phi: %w", err)
	}
	return &Detector{p: p.withDefaults(), since: now}, nil
}

// SetD changes D; the gaps seen stay.
func (d *Detector) SetD(length time.Duration) error {
	p := d.p
	p.D = length
	if err := p.Validate(); err != nil {
		return fmt.Errorf("phi: %w", err)
	}
	d.p = p
	return nil
}

// Heard takes a heartbeat and reports whether it was news: duplicates,
// overtaken ones and those of a leader deposed since are not. A lower term
// after a silence beyond the cap is a region begun anew and is news.
func (d *Detector) Heard(now instant.Instant, term, seq uint64) bool {
	begun := d.heard
	if begun {
		switch {
		case term == d.term && seq <= d.seq:
			return false
		case term < d.term && now.Sub(d.last) < d.p.Cap():
			return false
		}
	}
	alive := d.fresh && d.Judge(now).Verdict.Alive()
	elapsed := now.Sub(d.since)
	if alive && term == d.term {
		// Only the gap between two heartbeats of one leader, both heard in
		// one stretch of our own running, tells about the path and sender.
		gap := elapsed / time.Duration(min(seq-d.seq, math.MaxInt32))
		if gap >= d.p.Interval/4 {
			d.sample(gap)
		}
	}
	switch {
	case begun && (!alive || elapsed > d.p.slowAfter()):
		d.slow, d.onTime = true, 0
	case d.slow:
		if d.onTime++; d.onTime >= recovery {
			d.slow = false
		}
	}
	d.term, d.seq = term, seq
	d.last, d.since = now, now
	d.heard, d.fresh = true, true
	return true
}

// Resume tells that the observer itself was paused until now: gaps measured
// over the pause say nothing about the region, and the datagrams of the pause
// may still be on their way.
func (d *Detector) Resume(now instant.Instant) {
	d.n, d.next, d.sum, d.sqr = 0, 0, 0, 0
	d.since, d.fresh = now, false
	d.slow, d.onTime = false, 0
}

// Judge returns the suspicion at now.
func (d *Detector) Judge(now instant.Instant) Suspicion {
	s := Suspicion{Silent: -1}
	if d.heard {
		s.Silent = max(0, now.Sub(d.last))
	}
	silence := max(0, now.Sub(d.since))
	if !d.fresh {
		s.Verdict = register.VerdictUnknown
		if silence >= d.p.Pause() {
			s.Verdict, s.Phi = register.VerdictCrashed, maxPhi
		}
		return s
	}
	mean, sigma := d.distribution()
	s.Phi = tail((silence - d.p.Pause()).Seconds(), mean, sigma)
	switch {
	case s.Phi >= Threshold, silence >= d.p.Cap():
		s.Verdict = register.VerdictCrashed
	case d.slow, silence > d.p.slowAfter():
		s.Verdict = register.VerdictSlow
	default:
		s.Verdict = register.VerdictHealthy
	}
	return s
}

func (d *Detector) sample(gap time.Duration) {
	us := gap.Microseconds()
	if d.n == Window {
		old := d.gaps[d.next]
		d.sum -= old
		d.sqr -= old * old
	} else {
		d.n++
	}
	d.gaps[d.next] = us
	d.sum += us
	d.sqr += us * us
	d.next = (d.next + 1) % Window
}

// distribution returns mean and standard deviation of the gaps in seconds; the
// nominal interval while there are none.
func (d *Detector) distribution() (mean, sigma float64) {
	floor := d.p.MinSigma().Seconds()
	if d.n == 0 {
		return d.p.Interval.Seconds(), max(floor, d.p.Interval.Seconds()/4)
	}
	n := float64(d.n)
	mean = float64(d.sum) / n
	variance := float64(d.sqr)/n - mean*mean
	return mean / 1e6, max(floor, math.Sqrt(max(0, variance))/1e6)
}

// tail is -log10 of the probability that a normal variable exceeds x.
func tail(x, mean, sigma float64) float64 {
	p := math.Erfc((x-mean)/(sigma*math.Sqrt2)) / 2
	if p <= 0 {
		return maxPhi
	}
	return min(maxPhi, max(0, -math.Log10(p)))
}
