package cache

import (
	"encoding/json"
	"fmt"
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

// pxDigits is the width of PX, so that a renewal overwrites it in place.
const pxDigits = 8

// payload is the part of an entry that scripts do not look at.
type payload struct {
	Holder string `json:"holder,omitempty"`
	Region string `json:"region"`
}

// encode returns what follows PX.
func (p payload) encode() (string, error) {
	raw, err := json.Marshal(p)
	return string(raw), err
}

// milliseconds of an expiry as the entry writes it: at least 1.
func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%0*d", pxDigits, min(max(d.Milliseconds(), 1), 99_999_999))
}

// decode reads an entry of which the server says that so much is left.
func decode(resource, text string, left time.Duration) (Entry, error) {
	bad := func(why string) (Entry, error) {
		return Entry{}, fmt.Errorf("cache entry of %s: %s in %.64q", resource, why, text)
	}
	head, rest, ok := strings.Cut(text, " ")
	if !ok || len(rest) < 2+pxDigits+1 || rest[1] != ' ' || rest[2+pxDigits] != ' ' {
		return bad("no TOKEN STATE PX")
	}
	token, err := fence.ParseToken(head)
	if err != nil {
		return bad("no token")
	}
	px, err := strconv.ParseUint(rest[2:2+pxDigits], 10, 32)
	if err != nil {
		return bad("no PX")
	}
	var p payload
	if err := json.Unmarshal([]byte(rest[2+pxDigits+1:]), &p); err != nil {
		return bad("no JSON")
	}
	e := Entry{
		Resource: resource, Token: token, Region: p.Region,
		Age: max(0, time.Duration(px)*time.Millisecond-left), Left: left,
	}
	switch state(rest[0]) {
	case live:
		e.Held, e.Holder = true, p.Holder
	case tomb:
	default:
		return bad("no STATE")
	}
	return e, nil
}
