package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

const (
	block = 4 << 10
	// singleWrites one after the other, and parallelWrites in each of parallelFiles
	// at once, as Raft's log, its votes and a snapshot are; less if the time is
	// over.
	singleWrites   = 400
	parallelFiles  = 3
	parallelWrites = 150
	diskTime       = 2500 * time.Millisecond

	// A store call over storeLimit ends a process [F30].
	storeLimit = 1500 * time.Millisecond
)

// latencies of synced writes.
type latencies struct {
	n             int
	p50, p99, max time.Duration
}

func summarise(all []time.Duration) latencies {
	if len(all) == 0 {
		return latencies{}
	}
	all = slices.Sorted(slices.Values(all))
	at := func(share float64) time.Duration { return all[min(len(all)-1, int(share*float64(len(all))))] }
	return latencies{len(all), at(0.5), at(0.99), all[len(all)-1]}
}

// measureDisk appends and syncs blocks to files in dir.
func measureDisk(ctx context.Context, dir string) (single, parallel latencies, err error) {
	write := func(ctx context.Context, n int) (took []time.Duration, err error) {
		f, err := os.CreateTemp(dir, ".headlease-doctor-*")
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
		data := make([]byte, block)
		for range n {
			if ctx.Err() != nil {
				return took, nil
			}
			began := time.Now()
			if _, err := f.Write(data); err != nil {
				return took, err
			}
			if err := datasync(f); err != nil {
				return took, err
			}
			took = append(took, time.Since(began))
		}
		return took, nil
	}
	limited, cancel := context.WithTimeout(ctx, diskTime)
	defer cancel()
	took, err := write(limited, singleWrites)
	if err != nil {
		return single, parallel, err
	}
	limited, cancel = context.WithTimeout(ctx, diskTime)
	defer cancel()
	var all []time.Duration
	var errs []error
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range parallelFiles {
		wg.Go(func() {
			took, err := write(limited, parallelWrites)
			mu.Lock()
			defer mu.Unlock()
			all, errs = append(all, took...), append(errs, err)
		})
	}
	wg.Wait()
	return summarise(took), summarise(all), errors.Join(errs...)
}

// diskDir is where to measure the data directory's disk: in it if it is used
// already or is a file system's root, and else in the nearest directory above
// that exists, so that a directory that must be empty stays so whatever happens.
func diskDir(dataDir string) (string, error) {
	dir, err := filepath.Abs(dataDir)
	if err != nil {
		return "", err
	}
	for {
		list, err := os.ReadDir(dir)
		parent := filepath.Dir(dir)
		switch {
		case errors.Is(err, fs.ErrNotExist) && parent != dir:
			dir = parent
			continue
		case err != nil:
			return "", err
		case len(list) > 0 || parent == dir || !sameDevice(dir, parent):
			return dir, nil
		}
		dir = parent
	}
}

func examineDisk(ctx context.Context, dataDir string, raft pace) ([]Check, latencies) {
	if dataDir == "" {
		return []Check{{
			Name: "disk: sync of 4 KiB", Verdict: Warn, Found: "not measured", Remedy: "name the data directory with --data-dir",
		}}, latencies{}
	}
	dir, err := diskDir(dataDir)
	var single, parallel latencies
	if err == nil {
		// A disk that hangs must not hang this.
		type result struct {
			single, parallel latencies
			err              error
		}
		done := make(chan result, 1)
		go func() {
			s, p, err := measureDisk(ctx, dir)
			done <- result{s, p, err}
		}()
		select {
		case r := <-done:
			single, parallel, err = r.single, r.parallel, r.err
		case <-ctx.Done():
			err = errors.New("it did not answer in time: the disk hangs")
		}
	}
	if err != nil {
		return []Check{{
			Name: "disk: sync of 4 KiB", Verdict: Fail, Found: err.Error(), Needed: "every promise and every grant is on disk before it is answered",
			Remedy: "name a directory on a local disk that this user may write",
		}}, latencies{}
	}
	return judgeDisk(single, parallel, raft), single
}

func judgeDisk(single, parallel latencies, raft pace) []Check {
	show := func(l latencies) string {
		return fmt.Sprintf("p50 %s, p99 %s, worst %s of %d", ms(l.p50), ms(l.p99), ms(l.max), l.n)
	}
	const faster = "use a local SSD with power-loss protection, alone for this directory"
	one := Check{
		Name: "disk: sync of 4 KiB", Verdict: level(single.p50, 2*time.Millisecond, 10*time.Millisecond), Found: show(single),
		Needed: "p50 to 2 ms: a grant waits for two of them, the leader's and a follower's", Remedy: faster,
	}
	steady := Check{
		Name: "disk: worst syncs and Raft's timing", Verdict: level(max(single.p99, parallel.p99), raft.lease/2, raft.lease),
		Found:  "p99 " + ms(max(single.p99, parallel.p99)),
		Needed: fmt.Sprintf("p99 to %s: a leader that waits for its disk longer than %s loses its lease (timing %s)", ms(raft.lease/2), ms(raft.lease), raft.name),
		Remedy: faster + raft.remedy,
	}
	watchdog := Check{
		Name: "disk: watchdog", Verdict: level(max(single.max, parallel.max), storeLimit/5, storeLimit),
		Found:  "worst " + ms(max(single.max, parallel.max)),
		Needed: "under 1.5 s always: a store call that takes longer ends the process",
		Remedy: faster + "; look for what else writes to this disk",
	}
	together := Check{
		Name: "disk: three files at once", Verdict: level(parallel.p50, 4*time.Millisecond, 20*time.Millisecond), Found: show(parallel),
		Needed: "p50 to 4 ms: log, votes and snapshots are written at the same time", Remedy: faster,
	}
	out := []Check{one, together, steady, watchdog}
	for i := range out {
		if out[i].Verdict == OK {
			out[i].Remedy = ""
		}
	}
	return out
}
