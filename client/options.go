package client

import (
	"fmt"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/shard"
)

// Bounds of what a request may ask for.
const (
	MaxValue     = 64 << 10
	MaxLockDelay = 60 * time.Second
	// MaxWait of WaitAtMost; Wait knows no bound.
	MaxWait = 24 * time.Hour
	// MaxSlots of a semaphore.
	MaxSlots = 10_000
)

// Option of Acquire, AcquireSlot and Campaign.
type Option func(*acquireOptions)

type acquireOptions struct {
	resource  string
	slots     int // 0: the resource itself
	wait      bool
	atMost    time.Duration // 0: until ctx ends
	value     []byte
	lockDelay time.Duration
}

// Wait takes a place in the queue when the resource is held, until ctx ends.
func Wait() Option { return func(o *acquireOptions) { o.wait = true } }

// WaitAtMost is Wait for so long at most, up to MaxWait; then Acquire fails with ErrWaitEnded.
// The region counts the time, so that it keeps no place for a client that is
// not there any more.
func WaitAtMost(d time.Duration) Option {
	return func(o *acquireOptions) { o.wait, o.atMost = true, d }
}

// WithValue keeps a value beside the lease, for others to read: at most MaxValue
// bytes. [Lease.SetValue] replaces it.
func WithValue(value []byte) Option { return func(o *acquireOptions) { o.value = value } }

// WithLockDelay has the resource granted to nobody for so long, at most
// MaxLockDelay, when the lease ends otherwise than by a release.
func WithLockDelay(d time.Duration) Option { return func(o *acquireOptions) { o.lockDelay = d } }

func newAcquireOptions(resource string, slots int, options []Option) (acquireOptions, error) {
	o := acquireOptions{resource: resource, slots: slots}
	for _, f := range options {
		f(&o)
	}
	parsed, err := shard.Parse(resource)
	switch {
	case err != nil:
		return o, invalidResource(err)
	case slots != 0 && (parsed.Kind != shard.KindLock || parsed.Slot >= 0):
		return o, invalidField("resource", fmt.Sprintf("%q has no slots; name a semaphore without a slot's number, for example lock/x", resource))
	case slots < 0 || slots > MaxSlots:
		return o, invalidField("slots", fmt.Sprintf("%d is out of range; choose 1 to %d", slots, MaxSlots))
	case len(o.value) > MaxValue:
		return o, invalidField("value", fmt.Sprintf("has %d bytes; at most %d are kept", len(o.value), MaxValue))
	case o.lockDelay < 0 || o.lockDelay > MaxLockDelay:
		return o, invalidField("lock delay", fmt.Sprintf("%v is out of range; choose 0 to %v", o.lockDelay, MaxLockDelay))
	case o.atMost < 0 || o.atMost > MaxWait:
		return o, invalidField("wait", fmt.Sprintf("%v is out of range; choose up to %v, or use Wait", o.atMost, MaxWait))
	}
	return o, nil
}

// checkPrefix: what no message can carry would look like a region that does not
// answer, and be tried for ever.
func checkPrefix(prefix string) error {
	if !utf8.ValidString(prefix) {
		return invalidField("prefix", fmt.Sprintf("%q begins no resource's name; write for example lock/ or shard/", prefix))
	}
	return nil
}

// checkLabels likewise.
func checkLabels(labels map[string]string) error {
	for k, v := range labels {
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			return fmt.Errorf("labels: %q=%q is not UTF-8", k, v)
		}
	}
	return nil
}

func invalidField(field, remedy string) *Error {
	return &Error{Code: codes.InvalidArgument, Text: field + ": " + remedy, Detail: &pb.ErrorDetail{
		Kind: &pb.ErrorDetail_Invalid{Invalid: &pb.Invalid{Field: field, Remedy: remedy}},
	}}
}

// milliseconds rounds up, so that a short time is not none.
func milliseconds(d time.Duration) int64 {
	return int64((d + time.Millisecond - 1) / time.Millisecond)
}
