// Package audit is a region server's record of what changed who owns what: an
// append-only file of JSON lines, derived from the entries that the server
// applies. It decides nothing.
//
// Every server of a region applies the same entries and so writes the same
// records, each with its own clock's time; together they have what one of them
// missed while it was down or was brought up to date by a snapshot. The file is
// bounded: when it is full it becomes the older one of two, and what was older is
// gone; export it before, if it must be kept.
package audit

import (
	"fmt"
	"time"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// Record is one line. Index and N order a region's records and name them: the log
// entry, and the place within it.
type Record struct {
	// Time of the server's wall clock, for people.
	Time   time.Time `json:"time"`
	Region string    `json:"region"`
	Server string    `json:"server"`
	Index  uint64    `json:"index"`
	N      int       `json:"n"`
	Term   uint64    `json:"term"`
	Kind   Kind      `json:"kind"`
	// Partition and the epoch that it is about.
	Partition string `json:"partition,omitempty"`
	Epoch     uint32 `json:"epoch,omitempty"`
	// Owner and Ballot of an accepted value; no owner: released.
	Owner  string `json:"owner,omitempty"`
	Ballot string `json:"ballot,omitempty"`
	// Successor of a transfer, Reason of a value, By whom it was asked for.
	Successor string `json:"successor,omitempty"`
	Reason    string `json:"reason,omitempty"`
	By        string `json:"by,omitempty"`
	// Version and Changes of a configuration.
	Version uint64   `json:"version,omitempty"`
	Changes []string `json:"changes,omitempty"`
	// Text says the rest.
	Text string `json:"text,omitempty"`
}

// Kind of a record.
type Kind string

// Kinds.
const (
	// Initialised: the region's data has its name.
	Initialised Kind = "initialised"
	// Leader: a server leads a term from here on.
	Leader Kind = "leader"
	// Accepted: the region has accepted, as a voter, a value with another owner,
	// epoch or release than before.
	Accepted Kind = "accepted"
	// Adopted: the region owns the partition under a new epoch.
	Adopted Kind = "adopted"
	// Resumed: it goes on under the live epoch.
	Resumed Kind = "resumed"
	// Dropped: the epoch is over here.
	Dropped Kind = "dropped"
	// Draining and Aborted are of planned transfers.
	Draining Kind = "draining"
	Aborted  Kind = "transfer aborted"
	// Configured: a configuration is in force.
	Configured Kind = "configured"
	// Era: force-quorum began one. EraStopped: the region met another one, and
	// votes no more.
	Era        Kind = "era begun by force-quorum"
	EraStopped Kind = "stopped: another era was met"
	// Level: the feature level was raised.
	Level Kind = "feature level"
	// Alarm: one ballot came with two values.
	Alarm Kind = "alarm"
	// Gap: records are missing in this file.
	Gap Kind = "gap"
)

// translator makes records of events. It remembers the configuration and each
// register's value, to tell what is new. Pure.
type translator struct {
	conf   *pb.ClusterConfiguration
	values map[string]seen
}

type seen struct {
	owner string
	epoch uint32
	alarm string
}

func newTranslator() *translator { return &translator{values: map[string]seen{}} }

// learn takes what is known without a record: the state that a server starts or
// goes on with.
func (t *translator) learn(view state.View) {
	t.conf = view.Configuration()
	for p := range view.Partitions() {
		t.values[p.Name] = seenOf(p.Register.Value.Owner.Name, uint32(p.Register.Value.Epoch), p.Register.Alarm)
	}
}

func seenOf(owner string, epoch uint32, alarm string) seen { return seen{owner, epoch, alarm} }

// records of one entry's events.
func (t *translator) records(index, term uint64, events []state.Event) (out []Record) {
	add := func(r Record) {
		r.Index, r.Term, r.N = index, term, len(out)
		out = append(out, r)
	}
	for _, e := range events {
		switch e := e.(type) {
		case state.Initialised:
			add(Record{Kind: Initialised, Text: fmt.Sprintf("incarnation %x", uint64(e.Incarnation))})
		case state.TermBegun:
			add(Record{Kind: Leader, Text: e.Server})
		case state.RegisterChanged:
			v := e.Record.Value
			now := seenOf(v.Owner.Name, uint32(v.Epoch), e.Record.Alarm)
			was := t.values[e.Partition]
			t.values[e.Partition] = now
			if e.Record.Alarm != "" && e.Record.Alarm != was.alarm {
				add(Record{Kind: Alarm, Partition: e.Partition, Text: e.Record.Alarm})
			}
			if !e.Record.Accepted.IsZero() && (now.owner != was.owner || now.epoch != was.epoch) {
				add(Record{
					Kind: Accepted, Partition: e.Partition, Epoch: now.epoch, Owner: now.owner, Ballot: e.Record.Accepted.String(),
					Successor: v.Successor, Reason: v.Reason,
				})
			}
		case state.PartitionAdopted:
			r := Record{Kind: Adopted, Partition: e.Partition, Epoch: uint32(e.Epoch)}
			switch {
			case e.Resumed:
				r.Kind = Resumed
			case e.Unsettled:
				r.Text = "without a release: lock delays are waited out"
			}
			add(r)
		case state.PartitionDropped:
			add(Record{Kind: Dropped, Partition: e.Partition, Epoch: uint32(e.Epoch)})
		case state.PartitionDraining:
			add(Record{Kind: Draining, Partition: e.Partition, Epoch: uint32(e.Epoch), Successor: e.Successor, By: e.By})
		case state.DrainAborted:
			add(Record{Kind: Aborted, Partition: e.Partition, Epoch: uint32(e.Epoch), By: e.By})
		case state.Configured:
			r := Record{Kind: Configured, Version: e.Configuration.GetVersion()}
			if t.conf != nil {
				r.Changes = config.Diff(t.conf, e.Configuration)
			}
			t.conf = e.Configuration
			add(r)
		case state.EraBegun:
			r := Record{Kind: Era, Version: e.Configuration.GetVersion(), Text: fmt.Sprintf("era %v, before it %v", config.EraOf(e.Configuration), e.Before)}
			for _, v := range e.Configuration.GetDestroyedVoters() {
				r.Changes = append(r.Changes, fmt.Sprintf("declared destroyed: %s (incarnation %x)", v.GetId(), v.GetIncarnation()))
			}
			add(r)
		case state.EraStopped:
			add(Record{Kind: EraStopped, By: e.Stop.GetBy(), Text: "era " + register.EraOf(e.Stop.GetEra()).String()})
		case state.LevelRaised:
			add(Record{Kind: Level, Text: fmt.Sprint(e.Level)})
		}
	}
	return out
}
