package devcluster

import (
	"bytes"
	"sync"
)

// maxLine bounds what is kept of a line without an end.
const maxLine = 1 << 20

// Lines is a Spec.Stdout that hands on what a process prints line by line,
// without the newline. The function must not block and must not keep the slice.
// What stands behind the last newline is not handed on: the process was killed
// while it printed.
type Lines struct {
	each func(line []byte)

	mu   sync.Mutex
	part []byte
}

// NewLines makes a Lines.
func NewLines(each func(line []byte)) *Lines { return &Lines{each: each} }

// Write never fails. Of a line longer than 1 MiB the beginning is dropped.
func (l *Lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.part = append(l.part, b...)
	for {
		line, rest, ended := bytes.Cut(l.part, []byte{'\n'})
		if !ended {
			break
		}
		l.each(line)
		l.part = rest
	}
	if len(l.part) > maxLine {
		l.part = nil
	}
	l.part = bytes.Clone(l.part)
	return len(b), nil
}
