package devcluster

import (
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// However the bytes are cut, the lines are the same.
func TestLines(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringMatching(`([a-c]{0,3}\n?){0,8}`).Draw(t, "text")
		var got []string
		l := NewLines(func(line []byte) { got = append(got, string(line)) })
		for rest := text; rest != ""; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "cut")
			if written, err := l.Write([]byte(rest[:n])); written != n || err != nil {
				t.Fatal(written, err)
			}
			rest = rest[n:]
		}
		want := strings.Split(text, "\n")
		if want = want[:len(want)-1]; !slices.Equal(got, want) {
			t.Fatalf("%q: %q, want %q", text, got, want)
		}
	})
}
