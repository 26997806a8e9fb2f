package state

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// ReadSnapshot rebuilds the state that WriteSnapshot wrote, or returns an
// error that wraps ErrSnapshot and no machine: a snapshot that is empty, cut
// off, changed by a single bit, or inconsistent is used for nothing.
func ReadSnapshot(r io.Reader) (*Machine, error) {
	l := loader{m: New(), in: r}
	if err := l.load(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSnapshot, err)
	}
	return l.m, nil
}

type loader struct {
	m   *Machine
	in  io.Reader
	buf bytes.Buffer
	// The last session and resource read: both come in rising order.
	lastSession, lastResource string
	waits                     int
	// stage is the kind of the last chunk: header, sessions, resources,
	// footer come in this order.
	stage int
}

const (
	stageStart = iota
	stageHeader
	stageSessions
	stageResources
	stageFooter
)

func (l *loader) load() error {
	magic := make([]byte, len(snapshotMagic))
	if _, err := io.ReadFull(l.in, magic); err != nil {
		return fmt.Errorf("cut off before the first chunk: %w", err)
	}
	if string(magic) != snapshotMagic {
		return errors.New("not a snapshot of a region's state")
	}
	for l.stage != stageFooter {
		c, err := l.chunk()
		if err != nil {
			return err
		}
		if err := l.take(c); err != nil {
			return err
		}
	}
	if n, err := io.ReadFull(l.in, magic[:1]); n != 0 || !errors.Is(err, io.EOF) {
		return errors.New("bytes follow the footer")
	}
	return nil
}

func (l *loader) chunk() (*pb.SnapshotChunk, error) {
	var prefix [8]byte
	if _, err := io.ReadFull(l.in, prefix[:]); err != nil {
		return nil, fmt.Errorf("cut off between chunks: %w", noEOF(err))
	}
	n := binary.BigEndian.Uint32(prefix[:])
	if n > chunkMax {
		return nil, fmt.Errorf("a chunk of %d bytes is above %d", n, chunkMax)
	}
	l.buf.Reset()
	if _, err := io.CopyN(&l.buf, l.in, int64(n)); err != nil { // grows with what comes, not with what n says
		return nil, fmt.Errorf("cut off within a chunk: %w", noEOF(err))
	}
	if checksum(prefix[:4], l.buf.Bytes()) != binary.BigEndian.Uint32(prefix[4:]) {
		return nil, errors.New("a chunk's checksum does not match")
	}
	c := &pb.SnapshotChunk{}
	if err := proto.Unmarshal(l.buf.Bytes(), c); err != nil {
		return nil, fmt.Errorf("a chunk cannot be decoded: %w", err)
	}
	return c, nil
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (l *loader) take(c *pb.SnapshotChunk) error {
	stage := stageStart
	switch c.GetKind().(type) {
	case *pb.SnapshotChunk_Header:
		stage = stageHeader
	case *pb.SnapshotChunk_Sessions:
		stage = stageSessions
	case *pb.SnapshotChunk_Resources:
		stage = stageResources
	case *pb.SnapshotChunk_Footer:
		stage = stageFooter
	}
	repeats := stage == l.stage && (stage == stageSessions || stage == stageResources)
	if stage == stageStart || l.stage == stageStart && stage != stageHeader || stage <= l.stage && !repeats {
		return errors.New("chunks of an unknown kind or out of order")
	}
	if unknownWithin(c.ProtoReflect()) {
		return errors.New("a chunk has fields unknown here: a newer server wrote it")
	}
	l.stage = stage
	switch k := c.GetKind().(type) {
	case *pb.SnapshotChunk_Header:
		return l.header(k.Header)
	case *pb.SnapshotChunk_Sessions:
		for _, s := range k.Sessions.GetSessions() {
			if err := l.session(s); err != nil {
				return fmt.Errorf("session %q: %w", s.GetId(), err)
			}
		}
	case *pb.SnapshotChunk_Resources:
		for _, r := range k.Resources.GetResources() {
			if err := l.resource(r); err != nil {
				return fmt.Errorf("resource %q: %w", r.GetName(), err)
			}
		}
	case *pb.SnapshotChunk_Footer:
		return l.footer(k.Footer)
	}
	return nil
}

func (l *loader) header(h *pb.SnapshotHeader) error {
	m := l.m
	if h.GetFormat() != snapshotFormat {
		return fmt.Errorf("format %d: this version reads format %d", h.GetFormat(), snapshotFormat)
	}
	if (h.GetRegion() == "") != (h.GetIncarnation() == 0) || h.GetIncarnation() == 0 && h.GetConfiguration() != nil {
		return errors.New("header: region, incarnation and configuration do not go together")
	}
	m.region, m.incarnation = h.GetRegion(), register.Incarnation(h.GetIncarnation())
	m.configuration = h.GetConfiguration()
	m.ballotRound, m.applied, m.pulse = h.GetBallotRound(), h.GetAppliedIndex(), h.GetPulseIndex()
	m.configRegister = config.RegisterOf(h.GetConfigRegister())
	if err := checkConfigRegister(m.configuration, m.configRegister); err != nil {
		return err
	}
	for name := range partitionNames(m.configuration) {
		m.partitions.Set(name, nil)
	}
	if len(h.GetPartitions()) != m.partitions.Len() {
		return errors.New("header: other partitions than in the configuration")
	}
	last := ""
	for _, p := range h.GetPartitions() {
		e := &partition{
			gen: m.gen, name: p.GetName(), record: register.RecordOf(p.GetRegister()), epoch: fence.Epoch(p.GetEpoch()),
			seq: fence.Seq(p.GetSeq()), phase: p.GetPhase(), dropped: fence.Epoch(p.GetDropped()),
		}
		if _, ok := m.partitions.Get(e.name); !ok || e.name <= last {
			return fmt.Errorf("partition %q: out of order or not in the configuration", e.name)
		}
		over := e.phase == phaseAbsent && e.dropped == e.epoch // or never adopted
		if !over && !(e.live() && e.epoch > e.dropped) || e.epoch > fence.MaxEpoch {
			return fmt.Errorf("partition %q: phase %v, epoch %d, dropped %d do not go together", e.name, e.phase, e.epoch, e.dropped)
		}
		last = e.name
		m.partitions.Set(e.name, e)
	}
	for _, v := range h.GetVoters() {
		m.voters.Set(v.GetVoter().GetId(), VoterRecord{
			ID: v.GetVoter().GetId(), Incarnation: register.Incarnation(v.GetVoter().GetIncarnation()),
			Life: v.GetLife(), Writes: v.GetWrites(),
		})
	}
	return nil
}

func (l *loader) session(p *pb.SnapshotSession) error {
	m := l.m
	s := &session{
		gen: m.gen, id: p.GetId(), secretHash: p.GetSecretHash(), ttlMillis: p.GetTtlMs(), identity: p.GetIdentity(),
		labels: p.GetLabels(), lowest: p.GetLowestOpenRequest(), closing: p.GetClosing(),
	}
	if s.id <= l.lastSession || s.lowest == 0 {
		return errors.New("out of order or without its lowest open request")
	}
	l.lastSession = s.id
	end := s.lowest - 1 // ranges begin at lowest or above, with a gap between two
	for i, r := range p.GetSeen() {
		if r.GetFirst() <= end || i > 0 && r.GetFirst() == end+1 || r.GetLast() < r.GetFirst() {
			return fmt.Errorf("seen requests %d to %d: out of order", r.GetFirst(), r.GetLast())
		}
		end = r.GetLast()
		s.seen.Set(r.GetFirst(), r.GetLast())
	}
	end = 0
	for _, q := range p.GetRequests() {
		if q.GetRequestId() <= end || !s.sawRequest(q.GetRequestId()) {
			return fmt.Errorf("request %d: out of order or not seen", q.GetRequestId())
		}
		end = q.GetRequestId()
		s.open.Set(end, request{resource: q.GetResource(), token: fence.Token(q.GetToken())})
		if q.GetToken() == 0 {
			s.waits++
		}
	}
	if s.closing {
		if s.waits > 0 {
			return errors.New("closed, and waits")
		}
		m.closing.Set(s.id, struct{}{})
	}
	l.waits += s.waits
	m.sessions.Set(s.id, s)
	return nil
}

func (l *loader) resource(p *pb.SnapshotResource) error {
	m := l.m
	r := &resource{
		gen: m.gen, name: p.GetName(), partition: p.GetPartition(), session: p.GetSessionId(), token: fence.Token(p.GetToken()),
		request: p.GetRequestId(), offered: p.GetOffered(), revoked: p.GetRevoked(), revokeReason: p.GetRevokeReason(),
	}
	if r.name <= l.lastResource {
		return errors.New("out of order")
	}
	l.lastResource = r.name
	if err := l.holder(r); err != nil {
		return err
	}
	for _, w := range p.GetWaiters() {
		s, ok := m.sessions.Get(w.GetSessionId())
		if !ok {
			return fmt.Errorf("waiter of session %q, which is not there", w.GetSessionId())
		}
		q, ok := s.open.Get(w.GetRequestId())
		if !ok || q.token != 0 || q.place != 0 || q.resource != r.name {
			return fmt.Errorf("waiter of session %q: its request %d does not wait here", s.id, w.GetRequestId())
		}
		r.nextPlace++
		q.place = r.nextPlace
		s.open.Set(w.GetRequestId(), q)
		r.queue.Set(r.nextPlace, waiter{session: s.id, request: w.GetRequestId()})
		m.waiting++
	}
	switch {
	case r.token == 0 && r.queue.Len() == 0:
		return errors.New("neither held nor waited for")
	case r.token == 0:
		m.stalled.Set(r.name, struct{}{})
	default:
		m.leased++
	}
	m.resources.Set(r.name, r)
	return nil
}

// holder checks a resource's partition and holder.
func (l *loader) holder(r *resource) error {
	p, ok := l.m.partitions.Get(r.partition)
	if !ok || !p.live() {
		return fmt.Errorf("partition %q is not live", r.partition)
	}
	if r.token == 0 {
		if r.session != "" || r.request != 0 || r.offered || r.revoked || r.revokeReason != "" {
			return errors.New("not held, and has a holder's marks")
		}
		return nil
	}
	if r.token.Epoch() > p.epoch || r.token.Epoch() == p.epoch && r.token.Seq() > p.seq || r.token.Seq() == 0 || r.token.Epoch() == 0 {
		return fmt.Errorf("token %v was never given by partition %q at epoch %d, seq %d", r.token, p.name, p.epoch, p.seq)
	}
	s, ok := l.m.sessions.Get(r.session)
	if !ok {
		return fmt.Errorf("held by session %q, which is not there", r.session)
	}
	s.held.Set(r.name, struct{}{})
	return nil
}

func (l *loader) footer(f *pb.SnapshotFooter) error {
	m := l.m
	if f.GetSessions() != uint64(m.sessions.Len()) || f.GetResources() != uint64(m.resources.Len()) {
		return fmt.Errorf("%d sessions and %d resources where the footer says %d and %d",
			m.sessions.Len(), m.resources.Len(), f.GetSessions(), f.GetResources())
	}
	if l.waits != m.waiting {
		return fmt.Errorf("%d requests wait, with %d queue places", l.waits, m.waiting)
	}
	var err error
	m.sessions.Scan(func(_ string, s *session) bool {
		err = l.openRequests(s)
		return err == nil
	})
	if err != nil {
		return err
	}
	if h := m.View().StateHash(); h != f.GetStateHash() {
		return fmt.Errorf("the state's hash is %016x where the footer says %016x", h, f.GetStateHash())
	}
	return nil
}

// openRequests checks that a session's granted requests have their leases.
func (l *loader) openRequests(s *session) (err error) {
	if s.closing && s.held.Len() == 0 {
		return fmt.Errorf("session %q: closed and without leases", s.id)
	}
	s.open.Scan(func(id uint64, q request) bool {
		if q.token == 0 {
			return true
		}
		r, ok := l.m.resources.Get(q.resource)
		if !ok || r.session != s.id || r.token != q.token || r.request != id {
			err = fmt.Errorf("session %q: request %d names a lease that is not there", s.id, id)
		}
		return err == nil
	})
	return err
}
