package main

import (
	"bufio"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// gcPercent lets the heap grow by half between collections: it is small, and
	// what is promised is memory, not speed. GOGC overrides it.
	gcPercent = 50
	// memoryLimit is when the collector works harder. GOMEMLIMIT overrides it.
	memoryLimit = 10 << 20
	// settled is how long after the start what only the start needed is let go,
	// and every how often again what was looked at once.
	settled, again = 2 * time.Second, time.Minute
)

// stayLean keeps the process small. stop ends what it began.
func stayLean() (stop func()) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(memoryLimit)
	}
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for timer := time.NewTimer(settled); ; timer.Reset(again) {
			select {
			case <-done:
				timer.Stop()
				return
			case <-timer.C:
				debug.FreeOSMemory()
				letGoOfProgram()
			}
		}
	}()
	return func() { close(done); <-ended }
}

// letGoOfProgram unmaps the pages of the program's own file, code and constants
// alike. What is needed again comes back from the page cache; what only the
// start needed, which is most, does not. Failing costs memory and nothing else.
func letGoOfProgram() {
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return
	}
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return
	}
	defer func() { _ = maps.Close() }()
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		f := strings.Fields(lines.Text())
		if len(f) < 6 || f[5] != self || !strings.HasPrefix(f[1], "r") || strings.Contains(f[1], "w") {
			continue // only what can have been changed by nobody
		}
		from, to, _ := strings.Cut(f[0], "-")
		start, err1 := strconv.ParseUint(from, 16, 64)
		end, err2 := strconv.ParseUint(to, 16, 64)
		if err1 != nil || err2 != nil {
			continue
		}
		_, _, _ = unix.Syscall(unix.SYS_MADVISE, uintptr(start), uintptr(end-start), unix.MADV_DONTNEED)
	}
}
