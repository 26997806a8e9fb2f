package state

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// A snapshot is the magic bytes and then chunks: the payload's length (4 bytes,
// big endian), the CRC32C of length and payload (4 bytes), the payload, one
// pb.SnapshotChunk. The first chunk is the header, then come the sessions by
// id, the resources by name, the semaphores that have a queue by name, and the
// footer, which says how many there were and the state's hash. Nothing follows
// the footer.
//
// At feature level 1 format 1 is written, byte by byte as the version before
// levels wrote it: its servers must be able to read it. Level 2 has format 2.

const (
	snapshotMagic = "hlstate\n"
	// chunkTarget is where a chunk is full, in bytes; chunkMax what a reader
	// takes. A session is never split: the bounds of the state keep the largest
	// under chunkMax. A queue may go on in the next chunk, from format 2 on:
	// its values would not fit.
	chunkTarget = 256 << 10
	chunkMax    = 32 << 20
)

// ErrSnapshot is returned for a snapshot that is damaged, cut off, or of
// another format. Nothing of it is used.
var ErrSnapshot = errors.New("snapshot cannot be read")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// WriteSnapshot streams the state to w in chunks, one Write for each, with
// memory bounded by the chunk. The same state gives the same bytes. Errors are
// those of w.
func (v View) WriteSnapshot(w io.Writer) error {
	sw := &snapshotWriter{w: w}
	if _, err := io.WriteString(w, snapshotMagic); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	sw.put(&pb.SnapshotChunk{Kind: &pb.SnapshotChunk_Header{Header: v.r.snapshotHeader()}})

	sw.sessions(v.r)
	sw.resources(v.r)
	sw.semaphores(v.r)
	if sw.err == nil {
		sw.put(&pb.SnapshotChunk{Kind: &pb.SnapshotChunk_Footer{Footer: v.r.footer()}})
	}
	return sw.err
}

// format of the snapshot that the feature level allows.
func (r *root) format() uint32 {
	if r.level < 2 {
		return 1
	}
	return 2
}

func (r *root) footer() *pb.SnapshotFooter {
	f := &pb.SnapshotFooter{Sessions: uint64(r.sessions.Len()), Resources: uint64(r.resources.Len())}
	if r.format() == 1 {
		f.StateHash = r.format1Hash()
		return f
	}
	f.StateHash, f.Semaphores = r.hash(r.sum), uint64(r.queuedSemaphores())
	return f
}

// queuedSemaphores counts the semaphores that have a queue.
func (r *root) queuedSemaphores() (n int) {
	r.semaphores.Scan(func(_ string, s *semaphore) bool {
		if s.queue.len() > 0 {
			n++
		}
		return true
	})
	return n
}

type snapshotWriter struct {
	w   io.Writer
	buf []byte
	err error
}

func (sw *snapshotWriter) sessions(r *root) {
	var chunk pb.SnapshotSessions
	size := 0
	flush := func() {
		if len(chunk.Sessions) > 0 {
			sw.put(&pb.SnapshotChunk{Kind: &pb.SnapshotChunk_Sessions{Sessions: &chunk}})
			chunk.Sessions, size = chunk.Sessions[:0], 0
		}
	}
	r.sessions.Scan(func(_ string, s *session) bool {
		chunk.Sessions = recycled(chunk.Sessions)
		s.snapshot(chunk.Sessions[len(chunk.Sessions)-1])
		if size += s.size(); size >= chunkTarget {
			flush()
		}
		return sw.err == nil
	})
	flush()
}

func (sw *snapshotWriter) resources(r *root) {
	var chunk pb.SnapshotResources
	size := 0
	flush := func() {
		if len(chunk.Resources) > 0 {
			sw.put(&pb.SnapshotChunk{Kind: &pb.SnapshotChunk_Resources{Resources: &chunk}})
			chunk.Resources, size = chunk.Resources[:0], 0
		}
	}
	add := func() *pb.SnapshotResource {
		chunk.Resources = recycled(chunk.Resources)
		return chunk.Resources[len(chunk.Resources)-1]
	}
	split := r.format() > 1
	r.resources.Scan(func(_ string, e *resource) bool {
		p := add()
		e.snapshot(p, split)
		size += e.size()
		e.queue.scan(func(_ uint64, w waiter) bool {
			if split && len(p.Waiters) > 0 && size >= chunkTarget {
				flush()
				p = add()
				(&resource{name: e.name}).snapshot(p, false)
				p.Continued = true
			}
			p.Waiters = w.snapshot(p.Waiters)
			size += w.size()
			return sw.err == nil
		})
		if size >= chunkTarget {
			flush()
		}
		return sw.err == nil
	})
	flush()
}

func (sw *snapshotWriter) semaphores(r *root) {
	var chunk pb.SnapshotSemaphores
	size := 0
	flush := func() {
		if len(chunk.Semaphores) > 0 {
			sw.put(&pb.SnapshotChunk{Kind: &pb.SnapshotChunk_Semaphores{Semaphores: &chunk}})
			chunk.Semaphores, size = chunk.Semaphores[:0], 0
		}
	}
	add := func() *pb.SnapshotSemaphore {
		chunk.Semaphores = recycled(chunk.Semaphores)
		return chunk.Semaphores[len(chunk.Semaphores)-1]
	}
	r.semaphores.Scan(func(_ string, e *semaphore) bool {
		if e.queue.len() == 0 {
			return true // known from the slots' resources
		}
		p := add()
		p.Name, p.Partition, p.Epoch, p.Waiters, p.Continued = e.name, e.partition, uint32(e.epoch), p.Waiters[:0], false
		size += 64 + len(e.name) + len(e.partition)
		e.queue.scan(func(_ uint64, w waiter) bool {
			if len(p.Waiters) > 0 && size >= chunkTarget {
				flush()
				p = add()
				p.Name, p.Partition, p.Epoch, p.Waiters, p.Continued = e.name, "", 0, p.Waiters[:0], true
			}
			p.Waiters = w.snapshot(p.Waiters)
			size += w.size()
			return sw.err == nil
		})
		if size >= chunkTarget {
			flush()
		}
		return sw.err == nil
	})
	flush()
}

func (sw *snapshotWriter) put(c *pb.SnapshotChunk) {
	if sw.err != nil {
		return
	}
	const prefix = 8
	b, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(append(sw.buf[:0], make([]byte, prefix)...), c)
	sw.buf = b
	switch n := len(b) - prefix; {
	case err != nil:
		sw.err = fmt.Errorf("snapshot: %w", err)
		return
	case n > chunkMax:
		sw.err = fmt.Errorf("snapshot: a chunk of %d bytes is above %d", n, chunkMax)
		return
	default:
		binary.BigEndian.PutUint32(b, uint32(n))
	}
	binary.BigEndian.PutUint32(b[4:], checksum(b[:4], b[prefix:]))
	if _, err := sw.w.Write(b); err != nil {
		sw.err = fmt.Errorf("snapshot: %w", err)
	}
}

// checksum covers the length too: a flipped length must not pass for a shorter
// chunk.
func checksum(length, payload []byte) uint32 {
	return crc32.Update(crc32.Checksum(length, castagnoli), castagnoli, payload)
}

func (r *root) snapshotHeader() *pb.SnapshotHeader {
	h := &pb.SnapshotHeader{
		Format: r.format(), Region: r.region, Incarnation: uint64(r.incarnation), Configuration: r.configuration,
		BallotRound: r.ballotRound, AppliedIndex: r.applied, PulseIndex: r.pulse,
	}
	if r.format() > 1 {
		h.Level = r.level
		if r.sweep.passes > 0 {
			h.Sweep = &pb.SnapshotSweep{Passes: uint32(r.sweep.passes), Semaphores: r.sweep.semaphores, At: r.sweep.at}
		}
	}
	if r.configRegister != (config.Register{}) {
		h.ConfigRegister = r.configRegister.Proto()
	}
	h.EraStop = r.eraStop
	r.partitions.Scan(func(_ string, p *partition) bool {
		h.Partitions = append(h.Partitions, &pb.SnapshotPartition{
			Name: p.name, Register: p.record.Proto(), Epoch: uint32(p.epoch), Seq: uint32(p.seq),
			Phase: p.phase, Dropped: uint32(p.dropped), Unsettled: p.unsettled, Successor: p.successor,
		})
		return true
	})
	r.voters.Scan(func(_ string, v VoterRecord) bool {
		h.Voters = append(h.Voters, &pb.VoterRecord{
			Voter: &pb.Voter{Id: v.ID, Incarnation: uint64(v.Incarnation)}, Life: v.Life, Writes: v.Writes,
		})
		return true
	})
	return h
}

// recycled appends a message, the one that a chunk before had in its place if
// there is one: every field of it is set anew.
func recycled[T any](msgs []*T) []*T {
	if n := len(msgs); n < cap(msgs) {
		if msgs = msgs[:n+1]; msgs[n] == nil {
			msgs[n] = new(T)
		}
		return msgs
	}
	return append(msgs, new(T))
}

func (s *session) snapshot(p *pb.SnapshotSession) {
	p.Id, p.SecretHash, p.TtlMs, p.Identity, p.Labels = s.id, s.secretHash[:], s.ttlMillis, s.identity, s.labels
	p.LowestOpenRequest, p.Closing, p.Orderly = s.lowest, s.closing, s.orderly
	p.Requests, p.Seen = p.Requests[:0], p.Seen[:0]
	s.open.Scan(func(id uint64, q request) bool {
		p.Requests = recycled(p.Requests)
		r := p.Requests[len(p.Requests)-1]
		r.RequestId, r.Resource, r.Token, r.Slots = id, q.resource, uint64(q.token), q.slots
		return true
	})
	s.seen.Scan(func(first, last uint64) bool {
		p.Seen = recycled(p.Seen)
		r := p.Seen[len(p.Seen)-1]
		r.First, r.Last = first, last
		return true
	})
}

// size is about how many bytes the session takes in a chunk.
func (s *session) size() int {
	n := 128 + len(s.identity) + 20*s.seen.Len() + 48*s.open.Len()
	for k, v := range s.labels { // a sum: the order does not show
		n += len(k) + len(v) + 8
	}
	return n
}

// snapshot sets all of p but the waiters. epoch is not part of format 1.
func (r *resource) snapshot(p *pb.SnapshotResource, epoch bool) {
	p.Name, p.Partition, p.SessionId, p.Token, p.RequestId = r.name, r.partition, r.session, uint64(r.token), r.request
	p.Offered, p.Revoked, p.RevokeReason = r.offered, r.revoked, r.revokeReason
	p.LockDelayMs, p.Revision, p.DelayMs, p.DelayToken = r.lockDelay, r.revision, r.delay, uint64(r.delayToken)
	p.Value, p.Epoch, p.Continued, p.Waiters = append(p.Value[:0], r.value...), 0, false, p.Waiters[:0]
	if epoch {
		p.Epoch = uint32(r.epoch)
	}
}

// size is about how many bytes the resource takes in a chunk, without waiters.
func (r *resource) size() int {
	return 64 + len(r.name) + len(r.partition) + len(r.session) + len(r.revokeReason) + len(r.value)
}

func (w waiter) snapshot(to []*pb.SnapshotWaiter) []*pb.SnapshotWaiter {
	to = recycled(to)
	p, t := to[len(to)-1], w.the()
	p.SessionId, p.RequestId, p.Value = w.session, w.request, append(p.Value[:0], t.value...)
	p.LockDelayMs, p.WaitMs, p.Slots = t.lockDelay, t.waitMillis, t.slots
	return to
}

func (w waiter) size() int { return 64 + len(w.the().value) }
