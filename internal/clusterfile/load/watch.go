package load

import (
	"context"
	"log/slog"
	"os"
	"reflect"
	"time"

	"github.com/headlease/headlease/internal/clusterfile"
)

// DefaultEvery is how often a Watcher looks at the file.
const DefaultEvery = 2 * time.Second

// Watcher reads a cluster file again when it has changed, so that a running
// process learns of servers that are added. A file that is broken changes
// nothing: the one before stays in force, and the fault is logged once.
type Watcher struct {
	// Path of the file.
	Path string
	// Every is how often it is looked at; DefaultEvery if zero.
	Every time.Duration
	// Hup makes it read at once, changed or not (SIGHUP); may be nil.
	Hup <-chan os.Signal
	// Logger defaults to slog.Default.
	Logger *slog.Logger

	poke chan struct{}
}

// NewWatcher returns a watcher of the file at path.
func NewWatcher(path string, logger *slog.Logger) *Watcher {
	return &Watcher{Path: path, Logger: logger, poke: make(chan struct{}, 1)}
}

// Poke makes it look now, without waiting: a name was asked for that the file
// did not have. A nil Watcher does nothing.
func (w *Watcher) Poke() {
	if w == nil {
		return
	}
	select {
	case w.poke <- struct{}{}:
	default:
	}
}

// Run calls changed with each new content of the file, read under the process's
// environment, until ctx ends. was is the content that is in force, its Name this
// process, which must stay as it is.
func (w *Watcher) Run(ctx context.Context, was clusterfile.File, changed func(clusterfile.File)) error {
	if w == nil {
		<-ctx.Done()
		return nil
	}
	every, log := w.Every, w.Logger
	if every == 0 {
		every = DefaultEvery
	}
	if log == nil {
		log = slog.Default()
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	// Whether it changed between its reading at the start and now is not known.
	var seen os.FileInfo
	for {
		asked := false
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-w.poke:
		case <-w.Hup:
			asked = true
		}
		info, err := os.Stat(w.Path)
		if err == nil && same(info, seen) && !asked {
			continue
		}
		if err != nil && !asked {
			continue // between two of an editor's steps, or gone; a read would say no more
		}
		seen = info
		f, warnings, err := File(w.Path)
		if err == nil {
			err = clusterfile.CheckFollow(was, f)
		}
		if err != nil {
			log.Error("cluster file changed and cannot be used; the one before stays in force", "file", w.Path, "error", err)
			continue
		}
		// What differs from process to process is not the file's to change.
		f.Name, f.DataDir, f.Certs = was.Name, was.DataDir, was.Certs
		if reflect.DeepEqual(f, was) {
			if asked {
				log.Info("cluster file read again; nothing has changed", "file", w.Path)
			}
			continue
		}
		for _, warning := range warnings {
			log.Warn("cluster file", "file", w.Path, "warning", warning)
		}
		was = f
		changed(f)
	}
}

// same reports whether two looks at a file saw the same one, unchanged. An
// editor or a rename makes another file; a write changes time or size.
func same(a, b os.FileInfo) bool {
	return b != nil && os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}
