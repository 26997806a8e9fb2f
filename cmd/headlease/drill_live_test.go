package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/drill"
)

func liveAt(at time.Duration) drill.Live {
	return drill.Live{
		At: at, Faults: []string{"cut eu and us"}, Owners: []string{"eu: eu-frankfurt, epoch 1"}, Grants: 7, Writes: 100,
		Refused: 1, Lost: 2, Acquire: 1234567 * time.Nanosecond,
	}
}

// Without a terminal there are plain lines, one in a while, and no escapes.
func TestLiveViewWithoutATerminal(t *testing.T) {
	var b bytes.Buffer
	v := newLiveView(&b)
	for at := time.Duration(0); at < 12*time.Second; at += 200 * time.Millisecond {
		v.show(liveAt(at))
	}
	v.show(liveAt(plainEvery)) // of the control run
	v.close()
	want := "  5.0 s  now: cut eu and us; eu: eu-frankfurt, epoch 1; 7 grants, 100 writes, 1 refused, 2 leases lost; p99 acquire 1.2ms, write -\n"
	if got := b.String(); !strings.HasPrefix(got, want) || strings.Count(got, "\n") != 3 || strings.Contains(got, "\x1b") {
		t.Errorf("%q", got)
	}
}

// In a terminal the state is painted over itself, below the progress lines, and
// no line is wider than the screen, or going up would miss.
func TestLiveViewInATerminal(t *testing.T) {
	var b bytes.Buffer
	v := &liveView{out: &b, width: 40}
	v.show(liveAt(time.Second))
	if strings.Contains(b.String(), "\x1b") {
		t.Errorf("it clears what is not its own: %q", b.String())
	}
	b.Reset()
	v.show(liveAt(2 * time.Second))
	if !strings.HasPrefix(b.String(), "\x1b[3A"+clearBelow) {
		t.Errorf("it does not go back: %q", b.String())
	}
	for line := range strings.SplitSeq(b.String(), "\n") {
		line = strings.TrimPrefix(line, "\x1b[3A"+clearBelow)
		if n := len([]rune(line)); n >= 40 {
			t.Errorf("%d wide: %q", n, line)
		}
	}
	b.Reset()
	if _, err := v.Write([]byte("  a step\n")); err != nil || b.String() != "\x1b[3A"+clearBelow+"  a step\n" {
		t.Errorf("%q, %v", b.String(), err)
	}
	b.Reset()
	v.close()
	if b.Len() != 0 {
		t.Errorf("nothing is shown, and cleared: %q", b.String())
	}
}
