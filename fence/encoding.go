package fence

import (
	"fmt"
	"strconv"
)

// TokenOf checks a number that came over the wire or out of a database. It
// fails with ErrTokenRange.
func TokenOf(n uint64) (Token, error) {
	if n>>32 > uint64(MaxEpoch) {
		return 0, fmt.Errorf("%w: %d is not below 2^53", ErrTokenRange, n)
	}
	return NewToken(Epoch(n>>32), Seq(n&0xffffffff))
}

// MarshalText writes the decimal form.
func (t Token) MarshalText() ([]byte, error) { return t.append(nil), nil }

// UnmarshalText reads the decimal form, by the rules of ParseToken.
func (t *Token) UnmarshalText(b []byte) error {
	parsed, err := ParseToken(string(b))
	if err != nil {
		return err
	}
	*t = parsed
	return nil
}

// MarshalJSON writes a JSON number: tokens are below 2^53 and so exact in every
// JSON reader. Zero, which is no token, is written as 0.
func (t Token) MarshalJSON() ([]byte, error) { return t.append(nil), nil }

// UnmarshalJSON reads a JSON number, or the same digits in a string as some
// databases write them. 0 and null are no token.
func (t *Token) UnmarshalJSON(b []byte) error {
	s := string(b)
	if s == "0" || s == "null" {
		*t = 0
		return nil
	}
	if len(s) > 2 && s[0] == '"' && s[len(s)-1] == '"' {
		s = s[1 : len(s)-1]
	}
	return t.UnmarshalText([]byte(s))
}

func (t Token) append(b []byte) []byte { return strconv.AppendUint(b, uint64(t), 10) }
