package filemark

import (
	"errors"
	"maps"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/headlease/headlease/fence"
)

func tok(epoch fence.Epoch, seq fence.Seq) fence.Token {
	t, err := fence.NewToken(epoch, seq)
	if err != nil {
		panic(err)
	}
	return t
}

// history is a journal as it grows: after record i it is data[:ends[i]] and
// means marks[i].
type history struct {
	data  []byte
	ends  []int
	marks []map[string]fence.Token
}

func drawHistory(t *rapid.T) history {
	names := []string{"lock/a", "lock/b#3", "shard/68", "odd \"name\"\n\x00\xff", "ü"}
	h := history{data: []byte(header), ends: []int{len(header)}, marks: []map[string]fence.Token{{}}}
	now := map[string]fence.Token{}
	for range rapid.IntRange(0, 8).Draw(t, "records") {
		name := rapid.SampledFrom(names).Draw(t, "resource")
		now[name] += tok(1, 1) + fence.Token(rapid.Uint32Range(0, 1000).Draw(t, "rise"))
		h.data = appendRecord(h.data, name, now[name])
		h.ends = append(h.ends, len(h.data))
		h.marks = append(h.marks, maps.Clone(now))
	}
	return h
}

// at is the number of records that a journal cut at n bytes must keep, and how
// many it may keep (one more, if all but its newline is there).
func (h history) at(n int) (must, may int) {
	for i, end := range h.ends {
		if end <= n {
			must = i
		}
		if end-1 <= n {
			may = i
		}
	}
	return must, may
}

// A crash at any byte of a write, with or without the zeros of a block that
// was allocated and not written, loses no mark that was acknowledged.
func TestCrashAtAnyByteKeepsAcknowledgedMarks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHistory(t)
		for n := len(header); n <= len(h.data); n++ {
			for _, zeros := range []int{0, 1, 40} {
				cut := append(append([]byte{}, h.data[:n]...), make([]byte, zeros)...)
				marks, torn, err := decode("j", cut)
				if err != nil {
					t.Fatalf("cut at %d of %d, %d zeros: %v", n, len(h.data), zeros, err)
				}
				must, may := h.at(n)
				if !maps.Equal(marks, h.marks[must]) && !maps.Equal(marks, h.marks[may]) {
					t.Fatalf("cut at %d, %d zeros: marks %v, want %v", n, zeros, marks, h.marks[must])
				}
				if want := n + zeros - h.ends[must]; torn != want {
					t.Fatalf("cut at %d, %d zeros: torn is %d, want %d", n, zeros, torn, want)
				}
			}
		}
	})
}

// Damage to any one byte is an error, or changes nothing.
func TestDamageAtAnyByteIsNoticed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHistory(t)
		last := h.marks[len(h.marks)-1]
		for i := range h.data {
			damaged := append([]byte{}, h.data...)
			damaged[i] ^= byte(rapid.IntRange(1, 255).Draw(t, "damage"))
			marks, _, err := decode("j", damaged)
			if err == nil && !maps.Equal(marks, last) {
				t.Fatalf("byte %d of %d, %q for %q: read as %v without an error, was %v", i, len(h.data), damaged[i], h.data[i], marks, last)
			}
			var corrupt *CorruptError
			if err != nil && i >= len(header) && (!errors.As(err, &corrupt) || corrupt.Offset > i) {
				t.Fatalf("byte %d: %v does not point at the damage", i, err)
			}
		}
	})
}

// A record removed, doubled or moved within the journal is noticed where marks
// of that resource follow.
func TestMarksOnlyRiseInAJournal(t *testing.T) {
	data := appendRecord([]byte(header), "lock/a", tok(2, 1))
	data = appendRecord(data, "lock/a", tok(1, 9))
	var corrupt *CorruptError
	if _, _, err := decode("j", data); !errors.As(err, &corrupt) || corrupt.Line != 3 || !strings.Contains(err.Error(), "does not rise") {
		t.Fatalf("a falling mark reads as %v", err)
	}
}

func TestForeignFileIsNamed(t *testing.T) {
	for _, data := range []string{"", "headlease marks 2\n", "hello\n", header[:5]} {
		if _, _, err := decode("some/marks", []byte(data)); err == nil || !strings.Contains(err.Error(), "some/marks") {
			t.Errorf("%q: %v", data, err)
		}
	}
}

// Whatever the bytes, decode does not panic, and marks that it accepts are
// written and read back the same.
func FuzzDecode(f *testing.F) {
	f.Add([]byte(header))
	f.Add(appendRecord(appendRecord([]byte(header), "lock/a", tok(1, 1)), "lock/a", tok(1, 2)))
	f.Add(append([]byte(header), "00000000 4294967297 \"lock/a\"\n"...))
	f.Add(append(appendRecord([]byte(header), "lock/a", tok(1, 1)), 0, 0))
	f.Fuzz(func(t *testing.T, data []byte) {
		marks, torn, err := decode("j", data)
		if err != nil {
			return
		}
		if torn < 0 || torn > len(data)-len(header) {
			t.Fatalf("torn is %d of %d bytes", torn, len(data))
		}
		again, torn, err := decode("j", encode(marks))
		if err != nil || torn != 0 || !maps.Equal(again, marks) {
			t.Fatalf("%v is read back as %v, torn %d, %v", marks, again, torn, err)
		}
	})
}
