package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headlease/headlease/drill"
)

const (
	// plainEvery is the pause between two lines of state where no terminal
	// shows it.
	plainEvery = 5 * time.Second
	// clearBelow moves to the line's begin and clears from there down.
	clearBelow = "\r\x1b[J"
)

// liveView shows a drill's progress lines and, below them, its state: repainted
// in a terminal, as a plain line now and then elsewhere. Safe for concurrent
// use.
type liveView struct {
	mu    sync.Mutex
	out   io.Writer
	width int // of the terminal; 0: it is none
	shown int // lines of state on the screen
	last  time.Duration
}

// newLiveView shows a drill on a stream.
func newLiveView(out io.Writer) *liveView {
	v := &liveView{out: out}
	if f, ok := out.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil {
			v.width = max(int(size.Col), 20)
		}
	}
	return v
}

// Write prints a progress line above the state.
func (v *liveView) Write(p []byte) (int, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if err := v.erase(); err != nil {
		return 0, err
	}
	return v.out.Write(p)
}

func (v *liveView) erase() error {
	if v.shown == 0 {
		return nil
	}
	_, err := fmt.Fprintf(v.out, "\x1b[%dA%s", v.shown, clearBelow)
	v.shown = 0
	return err
}

// show paints a state. A terminal that is gone does not end a drill.
func (v *liveView) show(l drill.Live) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.width == 0 {
		if l.At < v.last {
			v.last = 0 // a control run begins anew
		}
		if l.At-v.last >= plainEvery {
			v.last = l.At
			_, _ = fmt.Fprintf(v.out, "  %s\n", strings.Join(liveLines(l), "; "))
		}
		return
	}
	var b bytes.Buffer
	lines := liveLines(l)
	if v.shown > 0 {
		fmt.Fprintf(&b, "\x1b[%dA%s", v.shown, clearBelow)
	}
	for _, line := range lines {
		b.WriteString(cut("  "+line, v.width-1) + "\n")
	}
	v.shown = len(lines)
	_, _ = v.out.Write(b.Bytes())
}

// close leaves the screen to what comes next.
func (v *liveView) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	_ = v.erase()
}

func liveLines(l drill.Live) []string {
	broken := "nothing is broken now"
	if len(l.Faults) > 0 {
		broken = "now: " + strings.Join(l.Faults, "; ")
	}
	latency := func(d time.Duration) string {
		if d == 0 {
			return "-"
		}
		return d.Round(100 * time.Microsecond).String()
	}
	return []string{
		fmt.Sprintf("%.1f s  %s", l.At.Seconds(), broken),
		strings.Join(l.Owners, " | "),
		fmt.Sprintf("%d grants, %d writes, %d refused, %d leases lost; p99 acquire %s, write %s",
			l.Grants, l.Writes, l.Refused, l.Lost, latency(l.Acquire), latency(l.Write)),
	}
}

// cut shortens a line to what a terminal shows on one.
func cut(s string, width int) string {
	if r := []rune(s); len(r) > width {
		return string(r[:width-1]) + "…"
	}
	return s
}
