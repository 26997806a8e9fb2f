package main

import (
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// progress shows how far something is: on a terminal in one line that is written
// over, elsewhere a line for each new step. Safe for concurrent use.
type progress struct {
	w   io.Writer
	tty bool

	mu    sync.Mutex
	last  map[string]string // by subject: the step that was written last
	dirty bool
}

// newProgress writes to w, as to a terminal if it is one.
func newProgress(w io.Writer) *progress {
	p := &progress{w: w, last: map[string]string{}}
	if f, ok := w.(*os.File); ok {
		_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
		p.tty = err == nil
	}
	return p
}

// show tells the step that a subject is at, and what changes all the time
// within it.
func (p *progress) show(subject, step, detail string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	line := subject + ": " + step
	if detail != "" {
		line += ", " + detail
	}
	if p.tty {
		_, _ = fmt.Fprintf(p.w, "\r\x1b[K%s", line) // nobody is harmed by a line that is not seen
		p.dirty = true
		return
	}
	if p.last[subject] == step {
		return
	}
	p.last[subject] = step
	_, _ = fmt.Fprintln(p.w, line)
}

// end leaves the line.
func (p *progress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dirty {
		_, _ = fmt.Fprint(p.w, "\r\x1b[K")
		p.dirty = false
	}
}
