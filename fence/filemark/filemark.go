// Package filemark is a fence guard for effects of one process: the highest
// token seen of each resource is kept in a journal beside the data, and an
// effect with a lower token is refused.
//
// What it guarantees, whatever clocks, pauses and crashes do:
//   - a mark is on disk (file and directory fsynced) before Claim returns and
//     before an effect of its token begins;
//   - no effect of a lower token begins after that, and one that was running
//     has returned before Claim returns nil or an effect of the higher token
//     begins [F15];
//   - a journal that lost or changed a mark by anything but a crash in the
//     middle of a write does not open (CorruptError).
//
// It holds as long as the journal is kept as durably as the data it guards and
// all effects on the data go through one guard; a lock keeps a second guard
// out of the directory.
package filemark

import (
	"errors"
	"log/slog"

	"github.com/headlease/headlease/fence/inprocess"
)

// MaxResource bounds a resource's name, in bytes.
const MaxResource = inprocess.MaxResource

// ErrClosed is returned once Close was called, and is the cancellation cause
// of the effects that Close found running.
var ErrClosed = inprocess.ErrClosed

// Options of a guard.
type Options struct {
	// Dir holds the journal and its lock; made if its parent exists.
	Dir string
	// UnguardedForDrill lets every write pass, whatever its token: the
	// control run of a drill, which shows that the guard is what refuses.
	// Marks are still kept. Never set it on data that matters.
	UnguardedForDrill bool
	// Logger defaults to slog.Default().
	Logger *slog.Logger
}

// Validate reports all faults of the options at once.
func (o Options) Validate() error {
	if o.Dir == "" {
		return errors.New("dir of marks: empty; name a directory beside the data that is guarded")
	}
	return nil
}

func (o Options) withDefaults() Options {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	return o
}

// Guard is an inprocess.Guard whose marks are in the journal. It is safe for concurrent use.
type Guard struct {
	*inprocess.Guard
	journal *journal
}

// Open reads the journal in the options' directory, or begins one. It fails
// with ErrLocked while another guard has it open, and with a CorruptError if
// marks may be lost.
func Open(opts Options) (*Guard, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	opts = opts.withDefaults()
	j, err := openJournal(opts.Dir)
	if err != nil {
		return nil, err
	}
	if opts.UnguardedForDrill {
		opts.Logger.Warn("the guard is off: late writes are not refused; for drills only", "dir", opts.Dir)
	}
	return &Guard{inprocess.New(inprocess.Options{Marks: j, UnguardedForDrill: opts.UnguardedForDrill}), j}, nil
}

// Close cancels running effects, waits for them and gives the directory free.
func (g *Guard) Close() error {
	if !g.Guard.Close() {
		return nil
	}
	return g.journal.close()
}
