package replica

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// fsm applies entries to the state machine. The machine is changed by the FSM
// goroutine alone, under mu. Everything but view, asked and applied belongs to
// that goroutine, too.
type fsm struct {
	server   string
	observer Observer
	lead     *leadership
	// fatal is told once that this server can apply no more.
	fatal func(error)

	mu      sync.Mutex
	machine *state.Machine
	dead    error
	// restoreErr is the last failed Restore's.
	restoreErr error

	// view is the newest View; nil: whoever asks takes it. After a View the machine
	// copies what it changes, so that a server whose state nobody looks at, as a
	// follower's, makes none (docs/decisions/0179).
	view atomic.Pointer[state.View]
	// asked: somebody looked at the state since the last entry.
	asked   atomic.Bool
	applied atomic.Uint64
}

var _ raft.BatchingFSM = (*fsm)(nil)

func newFSM(server string, observer Observer, lead *leadership, fatal func(error)) *fsm {
	return &fsm{server: server, observer: observer, lead: lead, fatal: fatal, machine: state.New()}
}

// View is the state after the newest entry that is applied in full; of a server
// that can apply no more, after the newest command.
func (f *fsm) View() state.View {
	if !f.asked.Load() {
		f.asked.Store(true)
	}
	if v := f.view.Load(); v != nil {
		return *v
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.publish()
}

// publish makes the View that is asked for. mu is held.
func (f *fsm) publish() state.View {
	v := f.machine.View()
	f.view.Store(&v)
	return v
}

// changed: the machine is another one than the View is of. Where Views were asked
// for, whoever asks next need not wait for the entry that is applied then. mu is
// held.
func (f *fsm) changed() {
	if f.asked.Swap(false) {
		f.publish()
	} else {
		f.view.Store(nil)
	}
}

// Apply is ApplyBatch of one.
func (f *fsm) Apply(l *raft.Log) any { return f.ApplyBatch([]*raft.Log{l})[0] }

// ApplyBatch applies the entries in order. The response to a command entry is
// []*pb.CommandResult, one per command, or an error. hashicorp/raft passes
// configuration entries too, and panics unless there are as many responses as
// entries.
func (f *fsm) ApplyBatch(logs []*raft.Log) []any {
	out := make([]any, len(logs))
	for i, l := range logs {
		if l.Type != raft.LogCommand {
			if f.dead == nil {
				f.applied.Store(l.Index)
			}
			continue
		}
		out[i] = f.applyEntry(l)
	}
	return out
}

func (f *fsm) applyEntry(l *raft.Log) any {
	if f.dead != nil {
		return f.dead
	}
	var entry pb.Entry
	if err := proto.Unmarshal(l.Data, &entry); err != nil {
		return f.die(fmt.Errorf("entry %d cannot be decoded: %w", l.Index, err))
	}
	results, events, begins, err := f.applyCommands(l, entry.GetCommands())
	if err != nil {
		return f.die(err)
	}
	f.applied.Store(l.Index)
	if begins {
		f.lead.begin(l.Term, func() { f.observer.Applied(l.Index, l.Term, events) })
	} else {
		f.observer.Applied(l.Index, l.Term, events)
	}
	return results
}

// applyCommands changes the machine. On an error the commands before the bad one
// are applied.
func (f *fsm) applyCommands(l *raft.Log, commands []*pb.Command) (results []*pb.CommandResult, events []state.Event, begins bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.changed()
	results = make([]*pb.CommandResult, len(commands))
	for i, cmd := range commands {
		res, ev := f.machine.Apply(l.Index, l.Term, cmd)
		if err := f.machine.Poisoned(); err != nil {
			return nil, nil, false, fmt.Errorf("entry %d, command %d: %w", l.Index, i, err)
		}
		results[i] = res
		events = append(events, ev...)
		begins = begins || beginsTerm(ev, f.server)
	}
	return results, events, begins, nil
}

// beginsTerm looks at the events, not at the command: a BeginTerm that slipped
// into a later term than its own is refused by Apply and begins nothing.
func beginsTerm(events []state.Event, server string) bool {
	for _, e := range events {
		if b, ok := e.(state.TermBegun); ok && b.Server == server {
			return true
		}
	}
	return false
}

func (f *fsm) die(err error) error {
	f.dead = err
	f.fatal(err)
	return err
}

// Snapshot captures the state in constant time; writing it out goes on beside
// Apply.
func (f *fsm) Snapshot() (raft.FSMSnapshot, error) {
	if f.dead != nil {
		return nil, f.dead
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return snapshot{f.machine.View()}, nil
}

// Restore replaces the machine.
func (f *fsm) Restore(in io.ReadCloser) error {
	m, err := state.ReadSnapshot(bufio.NewReaderSize(in, 1<<18))
	f.restoreErr = err
	if err != nil {
		return errors.Join(err, in.Close())
	}
	f.mu.Lock()
	f.machine = m
	v := f.publish()
	f.mu.Unlock()
	f.applied.Store(v.AppliedIndex())
	f.observer.Restored()
	return in.Close()
}

// snapshot is a View on its way to disk.
type snapshot struct{ view state.View }

// Persist writes the View; hashicorp/raft closes or cancels the sink.
func (s snapshot) Persist(sink raft.SnapshotSink) error {
	if err := s.view.WriteSnapshot(&paced{w: sink, since: time.Now()}); err != nil {
		return fmt.Errorf("write snapshot %s: %w", sink.ID(), err)
	}
	return nil
}

// paced rests after each chunk as long as it took to make and write it: a
// snapshot must not keep a processor from the commands beside it.
type paced struct {
	w     io.Writer
	since time.Time
}

func (p *paced) Write(b []byte) (int, error) {
	n, err := p.w.Write(b)
	time.Sleep(min(time.Since(p.since), maxRest))
	p.since = time.Now()
	return n, err
}

const maxRest = 20 * time.Millisecond

func (s snapshot) Release() {}
