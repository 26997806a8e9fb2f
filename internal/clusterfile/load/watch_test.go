package load

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headlease/headlease/internal/clusterfile"
)

// TestARunningProcessFollowsTheFile: a change is taken, by time, by a poke and by
// a signal; a broken file and one that is away change nothing; what is the
// process's own stays.
func TestARunningProcessFollowsTheFile(t *testing.T) {
	path := write(t, clusterfile.Example())
	put := func(text string) {
		t.Helper()
		tmp := path + ".new"
		if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(tmp, path); err != nil {
			t.Fatal(err)
		}
	}
	moved := strings.Replace(clusterfile.Example(), "host: 10.1.0.1}", "host: 10.1.0.77}", 1)
	if moved == clusterfile.Example() {
		t.Fatal("the example has no eu-1 at 10.1.0.1 any more")
	}
	was, _, err := File(path)
	if err != nil {
		t.Fatal(err)
	}
	was.Name, was.DataDir = "eu-2", "/data" // as flags say
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		var got []clusterfile.File
		hup := make(chan os.Signal, 1)
		w := NewWatcher(path, slog.New(slog.NewTextHandler(&log, nil)))
		w.Hup = hup
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- w.Run(ctx, was, func(f clusterfile.File) { got = append(got, f) }) }()
		api := func() string {
			s, _, _ := got[len(got)-1].Server("eu-1")
			return s.API
		}
		pass := func(d time.Duration) {
			time.Sleep(d) // virtual
			synctest.Wait()
		}
		pass(10 * DefaultEvery)
		if len(got) != 0 {
			t.Fatalf("told of a file that has not changed: %+v", got)
		}
		put(moved)
		pass(DefaultEvery)
		if len(got) != 1 || api() != "10.1.0.77:7600" || got[0].Name != "eu-2" || got[0].DataDir != "/data" {
			t.Fatalf("after a change: %+v", got)
		}
		put(moved + "\nd2: 1s\n")
		pass(10 * DefaultEvery)
		if n := strings.Count(log.String(), "did you mean d?"); len(got) != 1 || n != 1 {
			t.Errorf("a broken file: told %d times, logged %d times\n%s", len(got), n, log.String())
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		pass(10 * DefaultEvery)
		put(clusterfile.Example())
		w.Poke()
		synctest.Wait() // in no time
		if len(got) != 2 || api() != "10.1.0.1:7600" {
			t.Errorf("after a poke: %+v", got)
		}
		// A change that neither time nor size nor place shows.
		same := strings.Replace(clusterfile.Example(), "host: 10.1.0.1}", "host: 10.1.0.9}", 1)
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(same), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, info.ModTime(), info.ModTime()); err != nil {
			t.Fatal(err)
		}
		hup <- syscall.SIGHUP
		synctest.Wait()
		if len(got) != 3 || api() != "10.1.0.9:7600" {
			t.Errorf("after SIGHUP: %+v", got)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestNoWatcherWaitsAndHearsNothing(t *testing.T) {
	var w *Watcher
	w.Poke()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.Run(ctx, clusterfile.File{}, func(clusterfile.File) { t.Error("told") }); err != nil {
		t.Error(err)
	}
}
