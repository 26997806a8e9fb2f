package fence_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/headlease/headlease/fence"
)

func drawEpoch(t *rapid.T, name string) fence.Epoch {
	return fence.Epoch(rapid.Uint32Range(1, uint32(fence.MaxEpoch)).Draw(t, name))
}

func drawSeq(t *rapid.T, name string) fence.Seq {
	return fence.Seq(rapid.Uint32Range(1, uint32(fence.MaxSeq)).Draw(t, name))
}

// [F47] A token exists only with both parts in range, whoever makes it.
func TestF47TokenPartsInRange(t *testing.T) {
	for _, c := range []struct {
		epoch fence.Epoch
		seq   fence.Seq
		ok    bool
	}{
		{0, 1, false},
		{1, 0, false},
		{0, 0, false},
		{1, 1, true},
		{fence.MaxEpoch, fence.MaxSeq, true},
		{fence.MaxEpoch + 1, 1, false},
		{1<<32 - 1, 1, false},
	} {
		token, err := fence.NewToken(c.epoch, c.seq)
		if c.ok != (err == nil) {
			t.Errorf("NewToken(%d, %d): %v, want ok %v", c.epoch, c.seq, err, c.ok)
		}
		if err != nil && (!errors.Is(err, fence.ErrTokenRange) || token != 0) {
			t.Errorf("NewToken(%d, %d) = %v, %v: want zero and ErrTokenRange", c.epoch, c.seq, token, err)
		}
		n := uint64(c.epoch)<<32 | uint64(c.seq)
		if _, err := fence.TokenOf(n); c.ok != (err == nil) {
			t.Errorf("TokenOf(%d): %v, want ok %v", n, err, c.ok)
		}
		if _, err := fence.ParseToken(strconv.FormatUint(n, 10)); c.ok != (err == nil) {
			t.Errorf("ParseToken(%d): %v, want ok %v", n, err, c.ok)
		}
	}
}

// Tokens order as the pairs (epoch, seq) do, and give both back.
func TestTokenOrderIsPairOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e1, s1 := drawEpoch(t, "e1"), drawSeq(t, "s1")
		e2, s2 := drawEpoch(t, "e2"), drawSeq(t, "s2")
		if rapid.Bool().Draw(t, "same epoch") {
			e2 = e1
		}
		a, err := fence.NewToken(e1, s1)
		if err != nil {
			t.Fatal(err)
		}
		b, err := fence.NewToken(e2, s2)
		if err != nil {
			t.Fatal(err)
		}
		less := e1 < e2 || e1 == e2 && s1 < s2
		if (a < b) != less {
			t.Fatalf("(%d,%d) < (%d,%d) is %v, but tokens %v < %v is %v", e1, s1, e2, s2, less, a, b, a < b)
		}
		if a.Epoch() != e1 || a.Seq() != s1 {
			t.Fatalf("token of (%d,%d) reads back as (%d,%d)", e1, s1, a.Epoch(), a.Seq())
		}
	})
}

// A reader that keeps JSON numbers in doubles, as JavaScript and Lua do, still
// sees every token exactly.
func TestTokenExactInJSONDoubles(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		token, err := fence.NewToken(drawEpoch(t, "epoch"), drawSeq(t, "seq"))
		if err != nil {
			t.Fatal(err)
		}
		encoded, err := json.Marshal(map[string]fence.Token{"token": token})
		if err != nil {
			t.Fatal(err)
		}
		var loose map[string]any
		if err := json.Unmarshal(encoded, &loose); err != nil {
			t.Fatal(err)
		}
		double, ok := loose["token"].(float64)
		if !ok || uint64(double) != uint64(token) || double+1 == double {
			t.Fatalf("%s read as a double is %v (%T)", encoded, loose["token"], loose["token"])
		}
		var back map[string]fence.Token
		if err := json.Unmarshal(encoded, &back); err != nil {
			t.Fatal(err)
		}
		if back["token"] != token {
			t.Fatalf("%s read back as %v", encoded, back["token"])
		}
	})
}

func TestTokenJSONForms(t *testing.T) {
	for in, want := range map[string]fence.Token{
		`4294967297`:       1<<32 | 1,
		`"4294967297"`:     1<<32 | 1,
		`9007199254740991`: 1<<53 - 1,
		`0`:                0,
		`null`:             0,
	} {
		var got fence.Token
		if err := json.Unmarshal([]byte(in), &got); err != nil || got != want {
			t.Errorf("%s: %v, %v; want %v", in, got, err, want)
		}
	}
	for _, in := range []string{`1`, `-1`, `1e10`, `4294967297.0`, `"0"`, `""`, `"04294967297"`, `9007199254740992`, `true`, `[1]`} {
		got := fence.Token(77)
		if err := json.Unmarshal([]byte(in), &got); err == nil || got != 77 {
			t.Errorf("%s: accepted as %v, or the target was changed", in, got)
		}
	}
	text, err := json.Marshal(map[fence.Token]int{1<<32 | 5: 1})
	if err != nil || string(text) != `{"4294967301":1}` {
		t.Errorf("as a map key: %s, %v", text, err)
	}
}

// What ParseToken takes is exactly what String writes.
func FuzzParseToken(f *testing.F) {
	for _, s := range []string{"", "0", "1", "4294967297", "04294967297", "+4294967297", "-1", "4294967296", "9007199254740991",
		"9007199254740992", "18446744073709551616", "4_294_967_297", " 4294967297", "4294967297\n", "0x100000001", "٤"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		token, err := fence.ParseToken(s)
		if err != nil {
			if token != 0 || !errors.Is(err, fence.ErrTokenRange) {
				t.Fatalf("ParseToken(%q) = %v, %v", s, token, err)
			}
			return
		}
		if token.String() != s {
			t.Fatalf("ParseToken(%q) prints as %q", s, token)
		}
		again, err := fence.NewToken(token.Epoch(), token.Seq())
		if err != nil || again != token {
			t.Fatalf("ParseToken(%q) has parts that make %v, %v", s, again, err)
		}
	})
}

func TestRefusalsSayWhatToDo(t *testing.T) {
	stale := fmt.Errorf("write: %w", &fence.StaleError{Resource: "lock/x", Seen: 1<<33 | 1, Given: 1<<32 | 1})
	var s *fence.StaleError
	if !errors.As(stale, &s) || !strings.Contains(stale.Error(), "stop working") || !strings.Contains(stale.Error(), "8589934593") {
		t.Errorf("stale error reads %q", stale)
	}
	unclaimed := fmt.Errorf("write: %w", &fence.UnclaimedError{Resource: "lock/x"})
	var u *fence.UnclaimedError
	if !errors.As(unclaimed, &u) || !strings.Contains(unclaimed.Error(), "Claim") {
		t.Errorf("unclaimed error reads %q", unclaimed)
	}
}
