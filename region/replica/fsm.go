package replica

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// fsm applies entries to the state machine. Everything but view and applied
// belongs to the FSM goroutine.
type fsm struct {
	server   string
	observer Observer
	lead     *leadership
	// fatal is told once that this server can apply no more.
	fatal func(error)

	machine *state.Machine
	dead    error
	// restoreErr is the last failed Restore's.
	restoreErr error

	view    atomic.Pointer[state.View]
	applied atomic.Uint64
}

var _ raft.BatchingFSM = (*fsm)(nil)

func newFSM(server string, observer Observer, lead *leadership, fatal func(error)) *fsm {
	f := &fsm{server: server, observer: observer, lead: lead, fatal: fatal, machine: state.New()}
	f.publish()
	return f
}

func (f *fsm) publish() {
	v := f.machine.View()
	f.view.Store(&v)
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
	results := make([]*pb.CommandResult, len(entry.Commands))
	var events []state.Event
	begins := false
	for i, cmd := range entry.Commands {
		res, ev := f.machine.Apply(l.Index, l.Term, cmd)
		if err := f.machine.Poisoned(); err != nil {
			// The commands before it in this entry are applied; this server stops
			// here and its View stays at the entry before.
			return f.die(fmt.Errorf("entry %d, command %d: %w", l.Index, i, err))
		}
		results[i] = res
		events = append(events, ev...)
		begins = begins || beginsTerm(ev, f.server)
	}
	f.publish()
	f.applied.Store(l.Index)
	if begins {
		f.lead.begin(l.Term, func() { f.observer.Applied(l.Index, l.Term, events) })
	} else {
		f.observer.Applied(l.Index, l.Term, events)
	}
	return results
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
	return snapshot{f.machine.View()}, nil
}

// Restore replaces the machine.
func (f *fsm) Restore(in io.ReadCloser) error {
	m, err := state.ReadSnapshot(bufio.NewReaderSize(in, 1<<18))
	f.restoreErr = err
	if err != nil {
		return errors.Join(err, in.Close())
	}
	f.machine = m
	f.publish()
	f.applied.Store(m.View().AppliedIndex())
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
