// Package fence is the fencing token and what a resource needs to refuse a
// late write: a guard keeps the highest token seen and refuses lower ones,
// atomically with the write. The guards themselves are in sub-packages.
package fence

import (
	"errors"
	"fmt"
	"strconv"
)

// Epoch counts a partition's changes of owner.
type Epoch uint32

// Seq counts the grants of a partition within an epoch.
type Seq uint32

// Token orders the holders of a resource: every grant has a higher one than
// all grants before it, over elections, restarts, restores and region moves.
// It is epoch<<32 | seq with epoch < 2^21 and so exact below 2^53, in JSON,
// JavaScript, Lua and SQL BIGINT. Zero is no token.
type Token uint64

// Bounds of a token's parts.
const (
	// MaxEpoch keeps tokens below 2^53.
	MaxEpoch Epoch = 1<<21 - 1
	// MaxSeq is the last grant of an epoch.
	MaxSeq Seq = 1<<32 - 1
	// RaiseSeq is where an owner asks for its own next epoch, long before
	// MaxSeq stops its grants.
	RaiseSeq Seq = 1<<32 - 1<<24
	// AlarmEpoch is where an operator is told that epochs are running out.
	AlarmEpoch Epoch = 1 << 20
)

// ErrTokenRange is returned for token parts out of range.
var ErrTokenRange = errors.New("fencing token out of range")

// NewToken makes the token of an epoch's seq-th grant. Both count from 1. It
// is the only constructor, so no token out of range exists.
func NewToken(epoch Epoch, seq Seq) (Token, error) {
	if epoch == 0 || epoch > MaxEpoch || seq == 0 {
		return 0, fmt.Errorf("%w: epoch %d, seq %d: epochs are 1 to %d, seqs from 1", ErrTokenRange, epoch, seq, MaxEpoch)
	}
	return Token(uint64(epoch)<<32 | uint64(seq)), nil
}

// ParseToken reads the decimal form that String writes and nothing else: no
// sign, no leading zero, so that equal tokens are equal texts.
func ParseToken(s string) (Token, error) {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil || strconv.FormatUint(n, 10) != s {
		return 0, fmt.Errorf("fencing token %q: not a plain decimal number below 2^53: %w", s, ErrTokenRange)
	}
	t, err := TokenOf(n)
	if err != nil {
		return 0, fmt.Errorf("fencing token %q: %w", s, err)
	}
	return t, nil
}

// Epoch returns the token's epoch.
func (t Token) Epoch() Epoch { return Epoch(t >> 32) }

// Seq returns the token's place within its epoch.
func (t Token) Seq() Seq { return Seq(t & 0xffffffff) }

// String returns the token in decimal.
func (t Token) String() string { return strconv.FormatUint(uint64(t), 10) }

// StaleError refuses a write whose token is lower than one seen before.
type StaleError struct {
	Resource    string
	Seen, Given Token
}

func (e *StaleError) Error() string {
	return fmt.Sprintf("stale write to %s refused: token %s is below %s, seen before; the lease has passed on, stop working on it",
		e.Resource, e.Given, e.Seen)
}

// UnclaimedError refuses a write to a resource on which no holder has made a
// mark yet.
type UnclaimedError struct {
	Resource string
}

func (e *UnclaimedError) Error() string {
	return fmt.Sprintf("write to %s refused: no token has claimed it; call Claim while the lease is valid", e.Resource)
}
