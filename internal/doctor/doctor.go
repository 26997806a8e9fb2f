// Package doctor measures whether a process of the cluster can do on this host
// what the design's numbers say: the disk, the clock, the system's limits, and
// the way to every other process. It changes nothing but for files of its own
// beside or in the data directory, which it removes.
//
// Goroutines: Run owns all that it starts; none outlives it.
package doctor

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
)

// Verdict of a check.
type Verdict string

// Verdicts.
const (
	OK   Verdict = "ok"
	Warn Verdict = "warn"
	Fail Verdict = "fail"
)

// Check is one thing that was looked at.
type Check struct {
	// Name says what, such as "disk: sync of 4 KiB".
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	// Found is what was measured, in words.
	Found string `json:"found"`
	// Needed is what the number is needed for, and how much.
	Needed string `json:"needed,omitempty"`
	// Remedy is what to do about a warning or a failure.
	Remedy string `json:"remedy,omitempty"`
}

// Config of an examination.
type Config struct {
	File clusterfile.File
	// Self is this process, if it is one of the file: its addresses, and its
	// region's timing, are looked at. Without, the host is examined for any role.
	Self clusterfile.Process
	// DataDir need not exist.
	DataDir string
	// Links prove this process, or the admin, to the others.
	Links *link.Links
	// GossipKey encrypts gossip; nil only without TLS, then or without one gossip
	// is not asked.
	GossipKey []byte
	// Certificate ends at this time; zero: there is none.
	CertificateEnds time.Time
	Logger          *slog.Logger
}

// Limit bounds a whole examination.
const Limit = 15 * time.Second

// Run examines the host within Limit, or until ctx ends; what could not be
// measured by then is a failure.
func Run(ctx context.Context, c Config) []Check {
	ctx, cancel := context.WithTimeout(ctx, Limit)
	defer cancel()
	// The disk first and alone: its work would show in the timers.
	raft := paceOf(c.File.Timing)
	disk, speed := examineDisk(ctx, c.DataDir, raft)
	var host, clocks, network []Check
	var wg sync.WaitGroup
	wg.Go(func() { clocks = examineClocks(ctx, raft) })
	wg.Go(func() { network = examineNetwork(ctx, c, speed) })
	host = append(examineHost(c.DataDir), examineCertificate(c)...)
	wg.Wait()
	out := append(disk, host...)
	out = append(out, clocks...)
	return append(out, network...)
}

// Failed reports whether a check failed.
func Failed(checks []Check) bool {
	for _, c := range checks {
		if c.Verdict == Fail {
			return true
		}
	}
	return false
}

// level is ok up to good, a warning up to bad, and a failure beyond.
func level(d, good, bad time.Duration) Verdict {
	switch {
	case d <= good:
		return OK
	case d <= bad:
		return Warn
	}
	return Fail
}

// pace of a region's Raft group, as package region/replica has it: what of a
// leader's lease may go for the disk, a timer or a round trip.
type pace struct {
	name   string
	lease  time.Duration
	remedy string
}

func paceOf(t clusterfile.Timing) pace {
	if t == clusterfile.TimingCalm {
		return pace{"calm: 500/500/250 ms", 250 * time.Millisecond, ""}
	}
	return pace{"lan: 150/150/100 ms", 100 * time.Millisecond, ", or set 'timing: calm' in the cluster file (slower elections)"}
}

func ms(d time.Duration) string {
	if d < 10*time.Millisecond {
		return fmt.Sprintf("%.2f ms", float64(d)/1e6)
	}
	return fmt.Sprintf("%.0f ms", float64(d)/1e6)
}

func examineCertificate(c Config) []Check {
	if c.CertificateEnds.IsZero() {
		return nil
	}
	left := time.Until(c.CertificateEnds)
	check := Check{
		Name: "certificate: validity", Verdict: OK, Found: fmt.Sprintf("ends %s, in %d days", c.CertificateEnds.UTC().Format(time.DateOnly), int(left.Hours()/24)),
		Needed: "no connection can be made after its end",
	}
	if left < 30*24*time.Hour {
		check.Verdict, check.Remedy = Warn, "make a new one with 'headlease certs' and restart the process with it"
	}
	return []Check{check}
}
