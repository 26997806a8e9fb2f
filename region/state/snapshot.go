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
// id, the resources by name, and the footer, which says how many there were
// and the state's hash. Nothing follows the footer.

const (
	snapshotMagic  = "hlstate\n"
	snapshotFormat = 1
	// chunkTarget is where a chunk is full, in bytes; chunkMax what a reader
	// takes. A session or a resource is never split: the bounds of the state
	// keep the largest under chunkMax.
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

	var sessions pb.SnapshotSessions
	size := 0
	v.r.sessions.Scan(func(_ string, s *session) bool {
		sessions.Sessions = recycled(sessions.Sessions)
		s.snapshot(sessions.Sessions[len(sessions.Sessions)-1])
		if size += s.size(); size >= chunkTarget {
			sw.put(&pb.SnapshotChunk{Kind: &pb.SnapshotChunk_Sessions{Sessions: &sessions}})
			sessions.Sessions, size = sessions.Sessions[:0], 0
		}
		return sw.err == nil
	})
	if len(sessions.Sessions) > 0 {
		sw.put(&pb.SnapshotChunk{Kind: &pb.SnapshotChunk_Sessions{Sessions: &sessions}})
	}

	var resources pb.SnapshotResources
	size = 0
	v.r.resources.Scan(func(_ string, r *resource) bool {
		resources.Resources = recycled(resources.Resources)
		r.snapshot(resources.Resources[len(resources.Resources)-1])
		if size += r.size(); size >= chunkTarget {
			sw.put(&pb.SnapshotChunk{Kind: &pb.SnapshotChunk_Resources{Resources: &resources}})
			resources.Resources, size = resources.Resources[:0], 0
		}
		return sw.err == nil
	})
	if len(resources.Resources) > 0 {
		sw.put(&pb.SnapshotChunk{Kind: &pb.SnapshotChunk_Resources{Resources: &resources}})
	}
	if sw.err == nil {
		sw.put(&pb.SnapshotChunk{Kind: &pb.SnapshotChunk_Footer{Footer: &pb.SnapshotFooter{
			Sessions: uint64(v.r.sessions.Len()), Resources: uint64(v.r.resources.Len()), StateHash: v.StateHash(),
		}}})
	}
	return sw.err
}

type snapshotWriter struct {
	w   io.Writer
	buf []byte
	err error
}

func (s *snapshotWriter) put(c *pb.SnapshotChunk) {
	if s.err != nil {
		return
	}
	const prefix = 8
	b, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(append(s.buf[:0], make([]byte, prefix)...), c)
	s.buf = b
	switch n := len(b) - prefix; {
	case err != nil:
		s.err = fmt.Errorf("snapshot: %w", err)
		return
	case n > chunkMax:
		s.err = fmt.Errorf("snapshot: a chunk of %d bytes is above %d", n, chunkMax)
		return
	default:
		binary.BigEndian.PutUint32(b, uint32(n))
	}
	binary.BigEndian.PutUint32(b[4:], checksum(b[:4], b[prefix:]))
	if _, err := s.w.Write(b); err != nil {
		s.err = fmt.Errorf("snapshot: %w", err)
	}
}

// checksum covers the length too: a flipped length must not pass for a shorter
// chunk.
func checksum(length, payload []byte) uint32 {
	return crc32.Update(crc32.Checksum(length, castagnoli), castagnoli, payload)
}

func (r *root) snapshotHeader() *pb.SnapshotHeader {
	h := &pb.SnapshotHeader{
		Format: snapshotFormat, Region: r.region, Incarnation: uint64(r.incarnation), Configuration: r.configuration,
		BallotRound: r.ballotRound, AppliedIndex: r.applied, PulseIndex: r.pulse,
	}
	if r.configRegister != (config.Register{}) {
		h.ConfigRegister = r.configRegister.Proto()
	}
	r.partitions.Scan(func(_ string, p *partition) bool {
		h.Partitions = append(h.Partitions, &pb.SnapshotPartition{
			Name: p.name, Register: p.record.Proto(), Epoch: uint32(p.epoch), Seq: uint32(p.seq),
			Phase: p.phase, Dropped: uint32(p.dropped),
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
	p.Id, p.SecretHash, p.TtlMs, p.Identity, p.Labels = s.id, s.secretHash, s.ttlMillis, s.identity, s.labels
	p.LowestOpenRequest, p.Closing = s.lowest, s.closing
	p.Requests, p.Seen = p.Requests[:0], p.Seen[:0]
	s.open.Scan(func(id uint64, q request) bool {
		p.Requests = recycled(p.Requests)
		r := p.Requests[len(p.Requests)-1]
		r.RequestId, r.Resource, r.Token = id, q.resource, uint64(q.token)
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

func (r *resource) snapshot(p *pb.SnapshotResource) {
	p.Name, p.Partition, p.SessionId, p.Token, p.RequestId = r.name, r.partition, r.session, uint64(r.token), r.request
	p.Offered, p.Revoked, p.RevokeReason = r.offered, r.revoked, r.revokeReason
	p.Waiters = p.Waiters[:0]
	r.queue.Scan(func(_ uint64, w waiter) bool {
		p.Waiters = recycled(p.Waiters)
		e := p.Waiters[len(p.Waiters)-1]
		e.SessionId, e.RequestId = w.session, w.request
		return true
	})
}

func (r *resource) size() int {
	return 64 + len(r.name) + len(r.partition) + len(r.session) + len(r.revokeReason) + 64*r.queue.Len()
}
