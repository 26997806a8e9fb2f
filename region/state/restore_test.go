package state

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// A field that the hash leaves out could differ from server to server unseen.
func TestStateHashCoversEveryField(t *testing.T) {
	part := func(m *Machine) *partition { p, _ := m.partitions.Get("p"); return p }
	sess := func(m *Machine) *session { s, _ := m.sessions.Get("b"); return s }
	res := func(m *Machine) *resource { r, _ := m.resources.Get("x"); return r }
	changes := map[string]func(*Machine){
		"region":      func(m *Machine) { m.region = "us" },
		"incarnation": func(m *Machine) { m.incarnation++ },
		"round":       func(m *Machine) { m.ballotRound++ },
		"applied":     func(m *Machine) { m.applied++ },
		"pulse":       func(m *Machine) { m.pulse++ },

		"cluster id":   func(m *Machine) { m.configuration.ClusterId = "c2" },
		"cluster name": func(m *Machine) { m.configuration.ClusterName = "other" },
		"version":      func(m *Machine) { m.configuration.Version++ },
		"shards":       func(m *Machine) { m.configuration.Shards++ },
		"d":            func(m *Machine) { m.configuration.DNs++ },
		"even":         func(m *Machine) { m.configuration.AllowEvenWitnesses = true },
		"voters":       func(m *Machine) { m.configuration.Voters = m.configuration.Voters[1:] },
		"voter":        func(m *Machine) { m.configuration.Voters[0].Id = "region/us" },
		"voter data":   func(m *Machine) { m.configuration.Voters[0].Incarnation++ },
		"spec":         func(m *Machine) { m.configuration.Partitions[0].Name = "r" },
		"range":        func(m *Machine) { m.configuration.Partitions[0].Shards[0].Last-- },
		"prefer":       func(m *Machine) { m.configuration.Partitions[0].Prefer[0] = "ap" },

		"epoch":       func(m *Machine) { part(m).epoch++ },
		"seq":         func(m *Machine) { part(m).seq++ },
		"phase":       func(m *Machine) { part(m).phase = phaseDraining },
		"dropped":     func(m *Machine) { part(m).dropped++ },
		"promised":    func(m *Machine) { part(m).record.Promised.Round++ },
		"accepted":    func(m *Machine) { part(m).record.Accepted.Region = "us" },
		"ballot data": func(m *Machine) { part(m).record.Accepted.Incarnation++ },
		"owner":       func(m *Machine) { part(m).record.Value.Owner.Name = "us" },
		"owner data":  func(m *Machine) { part(m).record.Value.Owner.Incarnation++ },
		"value epoch": func(m *Machine) { part(m).record.Value.Epoch++ },
		"value d":     func(m *Machine) { part(m).record.Value.D++ },
		"successor":   func(m *Machine) { part(m).record.Value.Successor = "us" },
		"reason":      func(m *Machine) { part(m).record.Value.Reason = "other" },
		"alarm":       func(m *Machine) { part(m).record.Alarm = "alarmed" },

		"voter record": func(m *Machine) { m.voters.Set("w", VoterRecord{ID: "w"}) },
		"life":         func(m *Machine) { v, _ := m.voters.Get("witness/w1"); v.Life++; m.voters.Set(v.ID, v) },
		"writes":       func(m *Machine) { v, _ := m.voters.Get("witness/w1"); v.Writes++; m.voters.Set(v.ID, v) },
		"record data":  func(m *Machine) { v, _ := m.voters.Get("witness/w1"); v.Incarnation++; m.voters.Set(v.ID, v) },

		"session":      func(m *Machine) { m.sessions.Delete("d") },
		"secret":       func(m *Machine) { sess(m).secretHash[3]++ },
		"ttl":          func(m *Machine) { sess(m).ttlMillis++ },
		"identity":     func(m *Machine) { sess(m).identity = "client/other" },
		"label":        func(m *Machine) { sess(m).labels["pod"] = "other" },
		"label key":    func(m *Machine) { delete(sess(m).labels, "pod"); sess(m).labels["p"] = "odb" },
		"closing":      func(m *Machine) { sess(m).closing = true },
		"lowest":       func(m *Machine) { sess(m).lowest++ },
		"seen":         func(m *Machine) { sess(m).seen.Set(1, 99) },
		"open":         func(m *Machine) { sess(m).open.Delete(2) },
		"open token":   func(m *Machine) { sess(m).open.Set(2, request{resource: "x", token: 7}) },
		"open name":    func(m *Machine) { sess(m).open.Set(2, request{resource: "y"}) },
		"resource":     func(m *Machine) { m.resources.Delete("y") },
		"partition":    func(m *Machine) { res(m).partition = "q" },
		"holder":       func(m *Machine) { res(m).session = "d" },
		"token":        func(m *Machine) { res(m).token++ },
		"request":      func(m *Machine) { res(m).request++ },
		"offered":      func(m *Machine) { res(m).offered = true },
		"revoked":      func(m *Machine) { res(m).revoked = false },
		"why":          func(m *Machine) { res(m).revokeReason = "other" },
		"waiter":       func(m *Machine) { res(m).queue.places.PopMax() },
		"order":        func(m *Machine) { p, w, _ := res(m).queue.places.PopMin(); res(m).queue.places.Set(p+100, w) },
		"waiter's id":  func(m *Machine) { res(m).queue.places.Set(1, waiter{session: "b", request: 3}) },
		"waiter whose": func(m *Machine) { res(m).queue.places.Set(1, waiter{session: "d", request: 2}) },
	}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			m := restore(t, busyMachine(t).m)
			full, format1 := m.fullHash(), m.format1Hash()
			m = restore(t, m) // nothing here is shared with a View
			change(m)
			if m.fullHash() == full {
				t.Error("the hash does not show the change")
			}
			if m.format1Hash() == format1 {
				t.Error("the hash of format 1 does not show the change")
			}
		})
	}
}

func TestStateHashCoversEveryFieldOfLevel2(t *testing.T) {
	part := func(m *Machine) *partition { p, _ := m.partitions.Get("q"); return p }
	res := func(m *Machine) *resource { r, _ := m.resources.Get("x"); return r }
	held := func(m *Machine) *resource { r, _ := m.resources.Get("y"); return r }
	sem := func(m *Machine) *semaphore { s, _ := m.semaphores.Get("s"); return s }
	// first changes what the first waiter of a queue names.
	first := func(q *queue, change func(*terms)) {
		place, w, _ := q.min()
		of := w.the()
		change(&of)
		w.terms = &of
		q.places.Set(place, w)
	}
	changes := map[string]func(*Machine){
		"level":           func(m *Machine) { m.level++ },
		"passes":          func(m *Machine) { m.sweep.passes++ },
		"sweep's stage":   func(m *Machine) { m.sweep.semaphores = true },
		"sweep's name":    func(m *Machine) { m.sweep.at += "x" },
		"config register": func(m *Machine) { m.configRegister.Promised.Round++ },
		"unsettled":       func(m *Machine) { part(m).unsettled = false },
		"successor":       func(m *Machine) { part(m).successor = "ap" },
		"orderly":         func(m *Machine) { s, _ := m.sessions.Get("c"); s.orderly = false },
		"slots": func(m *Machine) {
			s, _ := m.sessions.Get("a")
			q, _ := s.open.Get(2)
			q.slots++
			s.open.Set(2, q)
		},
		"value":           func(m *Machine) { res(m).value = "other" },
		"no value":        func(m *Machine) { res(m).value = "" },
		"lock delay":      func(m *Machine) { res(m).lockDelay++ },
		"revision":        func(m *Machine) { res(m).revision++ },
		"epoch":           func(m *Machine) { res(m).epoch++ },
		"delay":           func(m *Machine) { held(m).delay++ },
		"delay's token":   func(m *Machine) { held(m).delayToken = 0 },
		"waiter's value":  func(m *Machine) { first(res(m).queue, func(t *terms) { t.value = "" }) },
		"waiter's delay":  func(m *Machine) { first(res(m).queue, func(t *terms) { t.lockDelay++ }) },
		"waiter's wait":   func(m *Machine) { first(res(m).queue, func(t *terms) { t.waitMillis++ }) },
		"waiter's slots":  func(m *Machine) { first(sem(m).queue, func(t *terms) { t.slots++ }) },
		"semaphore":       func(m *Machine) { m.semaphores.Delete("s") },
		"semaphore's":     func(m *Machine) { sem(m).partition = "q" },
		"semaphore epoch": func(m *Machine) { sem(m).epoch++ },
		"slot's waiter":   func(m *Machine) { sem(m).queue.places.PopMax() },
		"order of slots":  func(m *Machine) { p, w, _ := sem(m).queue.places.PopMin(); sem(m).queue.places.Set(p+100, w) },
	}
	data := write(t, richMachine(t).m)
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			m := readBack(t, data)
			full := m.fullHash()
			change(m)
			if m.fullHash() == full {
				t.Error("the hash does not show the change")
			}
		})
	}
}

// The places of a queue count, their numbers do not: a restore renumbers them.
func TestStateHashIgnoresPlaceNumbers(t *testing.T) {
	h := newOwner(t, "a", "b", "c")
	h.grant("a", 1, "x")
	h.wait("b", 1, "x")
	h.ok(cmdCancel("b", 1))
	h.wait("c", 1, "x") // place 2 here, place 1 after a restore
	got := &harness{t: t, m: restore(t, h.m), index: h.index}
	h.wait("b", 2, "x")
	got.wait("b", 2, "x")
	if got.m.View().StateHash() != h.m.View().StateHash() {
		t.Fatal("the restored machine differs")
	}
}

// rightFooter fits what has been loaded.
func rightFooter(l *loader) *pb.SnapshotFooter {
	l.m.settleHashes()
	l.m.rehash()
	return l.m.footer()
}

// content of a snapshot, to be changed.
type content struct {
	header    *pb.SnapshotHeader
	sessions  []*pb.SnapshotSession
	resources []*pb.SnapshotResource
}

// Content that no machine writes is refused, even with every checksum right:
// commands on it could break the guarantees.
func TestRestoreRefusesInconsistentContent(t *testing.T) {
	changes := map[string]func(content){
		"format":           func(c content) { c.header.Format = 3 },
		"format 1":         func(c content) { c.header.Format = 1 },
		"level":            func(c content) { c.header.Level = MaxLevel + 1 },
		"no level":         func(c content) { c.header.Level = 1 },
		"no incarnation":   func(c content) { c.header.Incarnation = 0 },
		"no configuration": func(c content) { c.header.Configuration = nil },
		"partition missing": func(c content) {
			c.header.Partitions = c.header.Partitions[1:]
		},
		"partition twice": func(c content) {
			c.header.Partitions[1].Name = "p"
		},
		"phase": func(c content) {
			c.header.Partitions[0].Phase = 9
		},
		"live and dropped": func(c content) {
			c.header.Partitions[0].Dropped = 1
		},
		"live without epoch": func(c content) {
			c.header.Partitions[0].Epoch = 0
		},
		"epoch out of range": func(c content) {
			c.header.Partitions[0].Epoch = 1 << 21
		},
		"token never given":     func(c content) { c.header.Partitions[0].Seq = 1 },
		"sessions out of order": func(c content) { c.sessions[0].Id = "z" },
		"no lowest": func(c content) {
			c.sessions[0].LowestOpenRequest = 0
		},
		"seen below lowest": func(c content) {
			c.sessions[1].LowestOpenRequest = 3
		},
		"seen backwards":    func(c content) { c.sessions[1].Seen[0].Last = 0 },
		"open and not seen": func(c content) { c.sessions[1].Seen = nil },
		"seen ranges touch": func(c content) {
			c.sessions[1].Seen = append(c.sessions[1].Seen, &pb.RequestRange{First: c.sessions[1].Seen[0].Last + 1, Last: 99})
		},
		"open without lease": func(c content) {
			c.sessions[1].Requests[0].Token++
		},
		"waits for nothing": func(c content) {
			c.sessions[1].Requests[0].Token = 0
		},
		"closing and waits": func(c content) { c.sessions[1].Closing = true },
		"closing and empty": func(c content) {
			c.sessions[3].Closing, c.sessions[3].Requests, c.resources[0].Waiters = true, nil, c.resources[0].Waiters[:2]
		},
		"resources in disorder": func(c content) { c.resources[0].Name = "z" },
		"unknown partition":     func(c content) { c.resources[0].Partition = "r" },
		"partition not live":    func(c content) { c.resources[0].Partition = "q" },
		"unknown holder": func(c content) {
			c.resources[0].SessionId = "nobody"
		},
		"free with marks": func(c content) { c.resources[0].Token = 0 },
		"unknown waiter": func(c content) {
			c.resources[0].Waiters[0].SessionId = "nobody"
		},
		"waiter twice": func(c content) {
			c.resources[0].Waiters[1] = c.resources[0].Waiters[0]
		},
		"waiter lost": func(c content) {
			c.resources[0].Waiters = c.resources[0].Waiters[1:]
		},
		"neither held nor waited": func(c content) {
			proto.Reset(c.resources[1])
			c.resources[1].Name, c.resources[1].Partition = "y", "p"
		},
		"field of a newer server": func(c content) {
			c.resources[0].ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 2000, protowire.VarintType), 1))
		},
	}
	load := func(cs []*pb.SnapshotChunk) error {
		l := loader{m: New()}
		for _, c := range cs[:len(cs)-1] {
			if err := l.take(c); err != nil {
				return err
			}
		}
		return l.take(&pb.SnapshotChunk{Kind: &pb.SnapshotChunk_Footer{Footer: rightFooter(&l)}})
	}
	if err := load(snapshotChunks(t)); err != nil {
		t.Fatalf("unchanged: %v", err)
	}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			cs := snapshotChunks(t)
			change(content{cs[0].GetHeader(), cs[1].GetSessions().GetSessions(), cs[2].GetResources().GetResources()})
			if load(cs) == nil {
				t.Fatal("taken")
			}
		})
	}
	t.Run("order of chunks", func(t *testing.T) {
		cs := snapshotChunks(t)
		for _, order := range [][]int{{1, 0, 2, 3}, {0, 2, 1, 3}, {0, 0, 1, 3}, {3, 3, 3, 3}, {1, 2, 2, 3}} {
			var mixed []*pb.SnapshotChunk
			for _, i := range order {
				mixed = append(mixed, cs[i])
			}
			if load(mixed) == nil {
				t.Fatalf("order %v taken", order)
			}
		}
		if load([]*pb.SnapshotChunk{cs[0], {}, cs[3]}) == nil {
			t.Fatal("a chunk of no kind taken")
		}
	})
}

func TestRestoreRefusesInconsistentContentOfLevel2(t *testing.T) {
	type parts struct {
		content
		semaphores []*pb.SnapshotSemaphore
	}
	resource := func(c parts, name string) *pb.SnapshotResource {
		for _, r := range c.resources {
			if r.GetName() == name {
				return r
			}
		}
		panic(name)
	}
	changes := map[string]func(parts){
		"passes":               func(c parts) { c.header.Sweep.Passes = 3 },
		"no pass":              func(c parts) { c.header.Sweep.Passes = 0 },
		"remains and no sweep": func(c parts) { c.header.Sweep = nil },
		"unsettled and absent": func(c parts) {
			c.header.Partitions[1].Phase, c.header.Partitions[1].Dropped, c.header.Partitions[1].Successor = phaseAbsent, 7, ""
		},
		"successor, no drain":   func(c parts) { c.header.Partitions[0].Successor = "us" },
		"orderly, not closed":   func(c parts) { c.sessions[0].Orderly = true },
		"slots of a lock":       func(c parts) { c.sessions[0].Requests[0].Slots = 1 },
		"slots above the bound": func(c parts) { c.sessions[0].Requests[1].Slots = MaxSlots + 1 },
		"other slots":           func(c parts) { c.semaphores[0].Waiters[0].Slots++ },
		"no slots":              func(c parts) { c.semaphores[0].Waiters[0].Slots = 0 },
		"slots in a lock's queue": func(c parts) {
			resource(c, "x").Waiters[0].Slots = 1
		},
		"long value":           func(c parts) { resource(c, "x").Value = make([]byte, MaxValue+1) },
		"waiter's long value":  func(c parts) { resource(c, "x").Waiters[0].Value = make([]byte, MaxValue+1) },
		"lock delay":           func(c parts) { resource(c, "x").LockDelayMs = MaxLockDelayMillis + 1 },
		"waiter's delay":       func(c parts) { resource(c, "x").Waiters[0].LockDelayMs = MaxLockDelayMillis + 1 },
		"waiter's wait":        func(c parts) { resource(c, "x").Waiters[0].WaitMs = -1 },
		"held and delayed":     func(c parts) { resource(c, "x").DelayMs = 1 },
		"delayed with a value": func(c parts) { resource(c, "y").Value = []byte("v") },
		"delay's token alone":  func(c parts) { resource(c, "y").DelayMs = 0 },
		"delay's token":        func(c parts) { resource(c, "y").DelayToken = uint64(token(1, 1<<30)) },
		"delay":                func(c parts) { resource(c, "y").DelayMs = MaxLockDelayMillis + 1 },
		"no epoch":             func(c parts) { resource(c, "x").Epoch = 0 },
		"epoch to come":        func(c parts) { resource(c, "y").Epoch = 2 },
		"epoch of another token": func(c parts) {
			c.header.Partitions[0].Epoch = 2
			resource(c, "x").Epoch = 2
		},
		"continues nothing":      func(c parts) { resource(c, "y").Continued = true },
		"semaphores in disorder": func(c parts) { c.semaphores[0].Name = "" },
		"semaphore of a slot":    func(c parts) { c.semaphores[0].Name = "s#1" },
		"nobody waits":           func(c parts) { c.semaphores[0].Waiters = nil },
		"semaphore's partition":  func(c parts) { c.semaphores[0].Partition = "r" },
		"semaphore's epoch":      func(c parts) { c.semaphores[0].Epoch = 2 },
		"semaphore continues":    func(c parts) { c.semaphores[0].Continued = true },
		"format 1":               func(c parts) { c.header.Format, c.header.Level, c.header.Sweep = 1, 0, nil },
	}
	data := write(t, richMachine(t).m)
	load := func(change func(parts)) error {
		cs := chunks(t, data)
		change(parts{content{cs[0].GetHeader(), cs[1].GetSessions().GetSessions(), cs[2].GetResources().GetResources()}, cs[3].GetSemaphores().GetSemaphores()})
		l := loader{m: New()}
		for _, c := range cs[:len(cs)-1] {
			if err := l.take(c); err != nil {
				return err
			}
		}
		return l.take(&pb.SnapshotChunk{Kind: &pb.SnapshotChunk_Footer{Footer: rightFooter(&l)}})
	}
	if err := load(func(parts) {}); err != nil {
		t.Fatalf("unchanged: %v", err)
	}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			if load(change) == nil {
				t.Fatal("taken")
			}
		})
	}
}

func TestRestoreChecksTheFooter(t *testing.T) {
	for name, change := range map[string]func(*pb.SnapshotFooter){
		"sessions":  func(f *pb.SnapshotFooter) { f.Sessions++ },
		"resources": func(f *pb.SnapshotFooter) { f.Resources-- },
		"hash":      func(f *pb.SnapshotFooter) { f.StateHash++ },
	} {
		t.Run(name, func(t *testing.T) {
			cs := snapshotChunks(t)
			change(cs[3].GetFooter())
			l := loader{m: New()}
			for i, c := range cs {
				if err := l.take(c); (err != nil) != (i == 3) {
					t.Fatalf("chunk %d: %v", i, err)
				}
			}
		})
	}
}

// snapshotChunks decodes the snapshot of a busy machine.
func snapshotChunks(t *testing.T) []*pb.SnapshotChunk {
	return chunks(t, write(t, restore(t, busyMachine(t).m)))
}

func chunks(t *testing.T, data []byte) []*pb.SnapshotChunk {
	l := loader{m: New(), in: bytes.NewReader(data[len(snapshotMagic):])}
	var cs []*pb.SnapshotChunk
	for len(cs) == 0 || cs[len(cs)-1].GetFooter() == nil {
		c, err := l.chunk()
		if err != nil {
			t.Fatal(err)
		}
		cs = append(cs, c)
	}
	return cs
}

func TestReadSnapshotOfOtherFiles(t *testing.T) {
	for _, text := range []string{"", "{}", "hlstate", "hlstate\n\xff\xff\xff\xff\x00\x00\x00\x00", strings.Repeat("x", 1000)} {
		if m, err := ReadSnapshot(strings.NewReader(text)); m != nil || !errors.Is(err, ErrSnapshot) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// The largest single parts stay under the bound of a chunk.
func TestLargestChunkFits(t *testing.T) {
	h := newOwner(t, "holder")
	long := func(b byte) string { return strings.Repeat(string(b), maxName) }
	open := cmdOpen(long('s'))
	open.GetOpenSession().Identity = long('i')
	h.ok(open)
	name := strings.Repeat("r", maxResource)
	h.grant("holder", 1, name)
	for i := range uint64(MaxQueue) {
		h.wait(long('s'), i+1, name)
	}
	p, _ := h.m.partitions.Get("p")
	p = h.m.editPartition(p)
	h.m.view = nil
	p.record.Value = register.Value{Owner: register.Region{Name: long('o')}, Successor: long('s'), Reason: long('r')}
	p.recordHash = recordHash(p.record)
	var w chunkCounter
	if err := h.m.View().WriteSnapshot(&w); err != nil || w.largest > chunkMax/4 {
		t.Fatalf("the largest chunk has %d bytes: %v", w.largest, err)
	}
	restore(t, h.m)
}
