package campaign

import (
	"slices"
	"time"

	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

// Defaults of a Failback.
const (
	// DefaultSteady is how long a region must have been healthy.
	DefaultSteady = time.Minute
	// maxFailbackPause bounds the doubling pauses after transfers that came to
	// nothing.
	maxFailbackPause = time.Hour
)

// Failback decides when an owner hands partitions back to regions that their
// lists prefer to it. It is hysteresis over hints: a region counts as back only
// after it was healthy without a break for Steady, and the partition must have
// been here that long; a transfer that comes to nothing doubles the pause until
// the next one. The zero value is not for use; not safe for concurrent use.
type Failback struct {
	steady  time.Duration
	healthy map[string]instant.Instant // since when, for healthy ones
	parts   map[string]failback
}

type failback struct {
	epoch uint32
	// since is when this leader first saw the partition under the epoch.
	since instant.Instant
	// pause is what the next failure costs, notBefore the end of the present one.
	pause     time.Duration
	notBefore instant.Instant
}

// NewFailback returns a Failback of one leader's term; steady 0: the default.
func NewFailback(steady time.Duration) *Failback {
	if steady == 0 {
		steady = DefaultSteady
	}
	return &Failback{steady: steady, healthy: map[string]instant.Instant{}, parts: map[string]failback{}}
}

// Suspicion reports what the detector says of a region now; only healthy
// counts as steady.
func (f *Failback) Suspicion(now instant.Instant, region string, verdict register.Verdict) {
	since, was := f.healthy[region]
	switch {
	case verdict != register.VerdictHealthy:
		delete(f.healthy, region)
	case !was || since > now:
		f.healthy[region] = now
	}
}

// Restart forgets how long regions were healthy: the own clock stood still.
func (f *Failback) Restart() { clear(f.healthy) }

// FailbackInput is a partition that the region owns.
type FailbackInput struct {
	Partition string
	Value     register.Value
	// Self is the own region, Prefer the list.
	Self   string
	Prefer []string
	// Reachable reports whether the region's voter answers.
	Reachable func(region string) bool
}

// Due returns the region to hand the partition to now, if any, and counts that
// as an attempt. Partitions that came by a planned transfer stay: an operator
// wanted them here.
func (f *Failback) Due(now instant.Instant, in FailbackInput) (successor string, ok bool) {
	p, known := f.parts[in.Partition]
	if epoch := uint32(in.Value.Epoch); !known || p.epoch != epoch {
		p = failback{epoch: epoch, since: now, pause: f.steady}
		f.parts[in.Partition] = p
	}
	if in.Value.Owner.Name != in.Self || in.Value.Reason == register.ReasonTransferred ||
		now.Sub(p.since) < f.steady || now < p.notBefore {
		return "", false
	}
	self := slices.Index(in.Prefer, in.Self)
	for i, region := range in.Prefer {
		if i == self {
			break
		}
		since, healthy := f.healthy[region]
		if !healthy || now.Sub(since) < f.steady || !in.Reachable(region) {
			continue
		}
		p.notBefore, p.pause = now.Add(p.pause), min(2*p.pause, maxFailbackPause)
		f.parts[in.Partition] = p
		return region, true
	}
	return "", false
}
