package cache

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/headlease/headlease/fence"
)

// DefaultPrefix begins the keys of all entries.
const DefaultPrefix = "headlease:lease:"

// Entry is what the cache says of a resource.
type Entry struct {
	Resource string
	// Token of the lease, or of the one that ended last.
	Token fence.Token
	// Held is false for the tombstone of a lease that ended.
	Held bool
	// Holder is the identity of the session's client; empty for a tombstone.
	Holder string
	// Region that wrote the entry.
	Region string
	// Age is how long ago the region said so.
	Age time.Duration
	// Left is until when the entry holds, if the region says nothing more: for a lease
	// at most until its session ends.
	Left time.Duration
}

// state of an entry.
type state byte

const (
	live state = 'L'
	tomb state = 'T'
)

// tail is the part of an entry that scripts do not look at. A region's name has no spaces.
func tail(region, holder string) string { return region + " " + holder }

// millis of an expiry: at least 1.
func millis(d time.Duration) int64 { return max(d.Milliseconds(), 1) }

// decode reads an entry at an instant of the server's clock.
func decode(resource, text string, now int64) (Entry, error) {
	bad := func(why string) (Entry, error) {
		return Entry{}, fmt.Errorf("cache entry of %s: %s in %.64q", resource, why, text)
	}
	part := func() (part string) {
		part, text, _ = strings.Cut(text, " ")
		return part
	}
	whole := text
	token, err := fence.ParseToken(part())
	if err != nil {
		text = whole
		return bad("no token")
	}
	st := part()
	written, err1 := strconv.ParseUint(part(), 10, 53)
	until, err2 := strconv.ParseUint(part(), 10, 53)
	region, holder := part(), text
	text = whole
	switch {
	case err1 != nil || err2 != nil:
		return bad("no WRITTEN and UNTIL")
	case region == "":
		return bad("no region")
	}
	// The server had written it by then, whatever a reader thinks what time it is there.
	now = max(now, int64(written))
	e := Entry{Resource: resource, Token: token, Region: region, Age: apart(now, int64(written)), Left: apart(int64(until), now)}
	switch {
	case st == string(rune(live)):
		e.Held, e.Holder = true, holder
	case st != string(rune(tomb)):
		return bad("no STATE")
	}
	return e, nil
}

// apart is the time from earlier to later, at least 0: clocks differ by a little.
func apart(later, earlier int64) time.Duration {
	return time.Duration(min(max(later-earlier, 0), math.MaxInt64/int64(time.Millisecond))) * time.Millisecond
}
