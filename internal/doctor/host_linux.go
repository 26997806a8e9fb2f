package doctor

import (
	"fmt"
	"math"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

func datasync(f *os.File) error { return unix.Fdatasync(int(f.Fd())) }

func sameDevice(a, b string) bool {
	var sa, sb unix.Stat_t
	return unix.Stat(a, &sa) == nil && unix.Stat(b, &sb) == nil && sa.Dev == sb.Dev
}

// examineHost looks at the limits of this process, which are those of a server
// started the same way.
func examineHost(dataDir string) []Check {
	var out []Check
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err == nil {
		// Go raises its own soft limit to the hard one at the start.
		out = append(out, judgeFiles(files.Max))
	}
	if dataDir != "" {
		if dir, err := diskDir(dataDir); err == nil {
			var s unix.Statfs_t
			if err := unix.Statfs(dir, &s); err == nil {
				out = append(out, judgeSpace(s.Bavail*uint64(s.Bsize), s.Files, s.Ffree))
			}
		}
	}
	return out
}

// synchronised reports whether the kernel's clock is kept by a time service,
// and by how much it may be wrong.
func synchronised() (ok bool, off time.Duration, err error) {
	var t unix.Timex
	state, err := unix.Adjtimex(&t)
	if err != nil {
		return false, 0, err
	}
	return state != unix.TIME_ERROR && t.Status&unix.STA_UNSYNC == 0, time.Duration(min(t.Maxerror, math.MaxInt64/1000)) * time.Microsecond, nil
}

// suspends returns the time that this host has slept since it was started.
func suspends() (time.Duration, error) {
	var boot, mono unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &mono); err != nil {
		return 0, err
	}
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot); err != nil {
		return 0, fmt.Errorf("CLOCK_BOOTTIME: %w", err)
	}
	return time.Duration(boot.Nano() - mono.Nano()), nil
}
