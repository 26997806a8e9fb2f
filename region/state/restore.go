package state

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"

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
	m      *Machine
	in     io.Reader
	buf    bytes.Buffer
	format uint32
	// The last session, resource and semaphore read: all come in rising order.
	lastSession, lastResource, lastSemaphore string

	waits, semaphores int
	// stage is the kind of the last chunk: header, sessions, resources,
	// semaphores, footer come in this order.
	stage int
}

const (
	stageStart = iota
	stageHeader
	stageSessions
	stageResources
	stageSemaphores
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
	case *pb.SnapshotChunk_Semaphores:
		stage = stageSemaphores
	case *pb.SnapshotChunk_Footer:
		stage = stageFooter
	}
	repeats := stage == l.stage && (stage == stageSessions || stage == stageResources || stage == stageSemaphores)
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
	case *pb.SnapshotChunk_Semaphores:
		for _, s := range k.Semaphores.GetSemaphores() {
			if err := l.semaphore(s); err != nil {
				return fmt.Errorf("semaphore %q: %w", s.GetName(), err)
			}
		}
	case *pb.SnapshotChunk_Footer:
		return l.footer(k.Footer)
	}
	return nil
}

func (l *loader) header(h *pb.SnapshotHeader) error {
	m := l.m
	if err := l.level(h); err != nil {
		return err
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
	if m.eraStop = h.GetEraStop(); m.eraStop != nil && (m.configuration == nil || m.level < 3) {
		return errors.New("header: stopped by an era, without a configuration or below feature level 3")
	}
	for name := range partitionNames(m.configuration) {
		m.partitions.Set(name, nil)
	}
	known := 0 // partitions of the configuration
	last := ""
	for _, p := range h.GetPartitions() {
		e := &partition{
			gen: m.gen, name: p.GetName(), record: register.RecordOf(p.GetRegister()), epoch: fence.Epoch(p.GetEpoch()),
			seq: fence.Seq(p.GetSeq()), phase: p.GetPhase(), dropped: fence.Epoch(p.GetDropped()),
			unsettled: p.GetUnsettled(), successor: p.GetSuccessor(),
		}
		_, configured := m.partitions.Get(e.name)
		if configured {
			known++
		}
		// A restored region knows partitions before it has a configuration.
		if !configured && (l.format < 2 || e.phase != phaseAbsent || m.incarnation == 0) || e.name <= last {
			return fmt.Errorf("partition %q: out of order or not in the configuration", e.name)
		}
		over := e.phase == phaseAbsent && e.dropped == e.epoch // or never adopted
		if !over && !(e.live() && e.epoch > e.dropped) || e.epoch > fence.MaxEpoch {
			return fmt.Errorf("partition %q: phase %v, epoch %d, dropped %d do not go together", e.name, e.phase, e.epoch, e.dropped)
		}
		if e.unsettled && (!e.live() || l.format < 2) || e.successor != "" && (e.phase != phaseDraining || l.format < 2) {
			return fmt.Errorf("partition %q: unsettled or with a successor at phase %v", e.name, e.phase)
		}
		last = e.name
		m.partitions.Set(e.name, e)
	}
	if known != len(partitionNames(m.configuration)) {
		return errors.New("header: other partitions than in the configuration")
	}
	for _, v := range h.GetVoters() {
		m.voters.Set(v.GetVoter().GetId(), VoterRecord{
			ID: v.GetVoter().GetId(), Incarnation: register.Incarnation(v.GetVoter().GetIncarnation()),
			Life: v.GetLife(), Writes: v.GetWrites(),
		})
	}
	return nil
}

// level takes the format, and what only format 2 has in the header.
func (l *loader) level(h *pb.SnapshotHeader) error {
	w := h.GetSweep()
	l.format = h.GetFormat()
	switch l.format {
	case 1:
		if h.GetLevel() != 0 || w != nil {
			return errors.New("header: fields that format 1 does not have")
		}
	case 2:
		if h.GetLevel() < 2 || h.GetLevel() > MaxLevel {
			return fmt.Errorf("header: feature level %d; this version knows 2 to %d in this format", h.GetLevel(), MaxLevel)
		}
		if w.GetPasses() > 2 || w != nil && w.GetPasses() == 0 {
			return fmt.Errorf("header: a sweep of %d passes", w.GetPasses())
		}
		l.m.level = h.GetLevel()
		l.m.sweep = sweep{passes: uint8(w.GetPasses()), semaphores: w.GetSemaphores(), at: w.GetAt()}
	default:
		return fmt.Errorf("format %d: this version reads formats 1 and 2", l.format)
	}
	return nil
}

func (l *loader) session(p *pb.SnapshotSession) error {
	m := l.m
	if len(p.GetSecretHash()) != sha256.Size {
		return fmt.Errorf("a secret's hash of %d bytes", len(p.GetSecretHash()))
	}
	s := &session{
		gen: m.gen, id: p.GetId(), secretHash: [sha256.Size]byte(p.GetSecretHash()), ttlMillis: p.GetTtlMs(), identity: p.GetIdentity(),
		labels: p.GetLabels(), lowest: p.GetLowestOpenRequest(), closing: p.GetClosing(), orderly: p.GetOrderly(),
	}
	if s.orderly && (!s.closing || l.format < 2) {
		return errors.New("closed in an orderly way, and not closed")
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
		r := request{resource: q.GetResource(), token: fence.Token(q.GetToken()), slots: q.GetSlots()}
		if _, _, slot := slotOf(r.resource); r.slots > 0 && (l.format < 2 || r.slots > MaxSlots || slot != (r.token != 0)) {
			return fmt.Errorf("request %d: %d slots of %q do not go together", end, r.slots, r.resource)
		}
		s.open.Set(end, r)
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
	if p.GetContinued() {
		return l.moreWaiters(p)
	}
	r := &resource{
		gen: m.gen, name: p.GetName(), partition: p.GetPartition(), session: p.GetSessionId(), token: fence.Token(p.GetToken()),
		request: p.GetRequestId(), offered: p.GetOffered(), revoked: p.GetRevoked(), revokeReason: p.GetRevokeReason(),
		value: string(p.GetValue()), lockDelay: p.GetLockDelayMs(), revision: p.GetRevision(), delay: p.GetDelayMs(),
		delayToken: fence.Token(p.GetDelayToken()), epoch: fence.Epoch(p.GetEpoch()), slot: -1,
	}
	if r.name <= l.lastResource {
		return errors.New("out of order")
	}
	l.lastResource = r.name
	if err := l.holder(r); err != nil {
		return err
	}
	if err := l.resourceWaiters(r, p.GetWaiters()); err != nil {
		return err
	}
	switch {
	case r.token != 0:
		m.leased++
	case r.delay > 0:
		m.delayed.Set(r.name, struct{}{})
	case r.queue.len() == 0:
		return errors.New("neither held nor waited for")
	default:
		m.stalled.Set(r.name, struct{}{})
	}
	m.valueBytes += int64(len(r.value))
	m.resources.Set(r.name, r)
	if base, slot, ok := slotOf(r.name); ok {
		r.slot = int32(slot)
		m.occupy(base, slot)
	}
	return nil
}

// moreWaiters goes on with the queue of the resource before.
func (l *loader) moreWaiters(p *pb.SnapshotResource) error {
	r, ok := l.m.resources.Get(p.GetName())
	only := &pb.SnapshotResource{Name: p.GetName(), Waiters: p.GetWaiters(), Continued: true}
	if !ok || r.name != l.lastResource || l.format < 2 || r.queue.len() == 0 || len(p.GetWaiters()) == 0 || !proto.Equal(p, only) {
		return errors.New("does not go on with the resource before it")
	}
	return l.resourceWaiters(r, p.GetWaiters())
}

func (l *loader) resourceWaiters(r *resource, waiters []*pb.SnapshotWaiter) error {
	if len(waiters) > 0 && r.queue == nil {
		r.queue = &queue{}
	}
	for _, w := range waiters {
		if w.GetSlots() > 0 {
			return fmt.Errorf("waiter of session %q: asks for slots, of no semaphore", w.GetSessionId())
		}
		if err := l.waiter(r.queue, r.name, w); err != nil {
			return err
		}
	}
	return nil
}

func (l *loader) semaphore(p *pb.SnapshotSemaphore) error {
	m := l.m
	if p.GetContinued() {
		s, ok := m.semaphores.Get(p.GetName())
		if !ok || s.name != l.lastSemaphore || p.GetPartition() != "" || p.GetEpoch() != 0 || len(p.GetWaiters()) == 0 {
			return errors.New("does not go on with the semaphore before it")
		}
		return l.slotWaiters(s, p.GetWaiters())
	}
	switch {
	case l.format < 2:
		return errors.New("format 1 has no semaphores")
	case p.GetName() <= l.lastSemaphore:
		return errors.New("out of order")
	case strings.ContainsRune(p.GetName(), '#'):
		return errors.New("the name has a slot's number")
	case len(p.GetWaiters()) == 0:
		return errors.New("nobody waits")
	}
	l.lastSemaphore = p.GetName()
	l.semaphores++
	if err := l.epoch(p.GetPartition(), fence.Epoch(p.GetEpoch())); err != nil {
		return err
	}
	s := m.editSemaphore(p.GetName())
	s.partition, s.epoch, s.queue = p.GetPartition(), fence.Epoch(p.GetEpoch()), &queue{}
	return l.slotWaiters(s, p.GetWaiters())
}

func (l *loader) slotWaiters(s *semaphore, waiters []*pb.SnapshotWaiter) error {
	for _, w := range waiters {
		if w.GetSlots() == 0 {
			return fmt.Errorf("waiter of session %q: asks for no slot", w.GetSessionId())
		}
		if err := l.waiter(s.queue, s.name, w); err != nil {
			return err
		}
	}
	return nil
}

// waiter takes a place of a queue.
func (l *loader) waiter(to *queue, name string, p *pb.SnapshotWaiter) error {
	s, ok := l.m.sessions.Get(p.GetSessionId())
	if !ok {
		return fmt.Errorf("waiter of session %q, which is not there", p.GetSessionId())
	}
	q, ok := s.open.Get(p.GetRequestId())
	if !ok || q.token != 0 || q.place != 0 || q.resource != name || q.slots != p.GetSlots() {
		return fmt.Errorf("waiter of session %q: its request %d does not wait here", s.id, p.GetRequestId())
	}
	t := terms{value: string(p.GetValue()), lockDelay: p.GetLockDelayMs(), waitMillis: p.GetWaitMs(), slots: p.GetSlots()}
	switch {
	case t == terms{}:
	case l.format < 2, len(t.value) > MaxValue, t.lockDelay > MaxLockDelayMillis, t.waitMillis < 0, t.waitMillis > MaxWaitMillis:
		return fmt.Errorf("waiter of session %q: its request %d names what no request may", s.id, p.GetRequestId())
	}
	w := waiter{session: s.id, request: p.GetRequestId()}
	if t != (terms{}) {
		w.terms = &t
	}
	q.place = to.push(w)
	s.open.Set(w.request, q)
	l.m.waiting++
	l.m.valueBytes += int64(len(t.value))
	return nil
}

// epoch checks that an entry's epoch is live, or dropped and being swept.
func (l *loader) epoch(partition string, epoch fence.Epoch) error {
	p, ok := l.m.partitions.Get(partition)
	switch {
	case !ok:
		return fmt.Errorf("partition %q is not in the configuration", partition)
	case epoch == 0 || epoch > p.epoch:
		return fmt.Errorf("epoch %d was never live in partition %q", epoch, partition)
	case (!p.live() || epoch <= p.dropped) && (l.m.sweep.passes == 0 || epoch > p.dropped):
		return fmt.Errorf("epoch %d of partition %q is not live", epoch, partition)
	}
	return nil
}

// holder checks a resource's partition, epoch, holder and delay.
func (l *loader) holder(r *resource) error {
	p, ok := l.m.partitions.Get(r.partition)
	if !ok {
		return fmt.Errorf("partition %q is not in the configuration", r.partition)
	}
	if l.format < 2 {
		if r.value != "" || r.lockDelay != 0 || r.revision != 0 || r.delay != 0 || r.delayToken != 0 || r.epoch != 0 {
			return errors.New("fields that format 1 does not have")
		}
		if r.epoch = p.epoch; r.token != 0 {
			r.epoch = r.token.Epoch()
		}
	}
	if err := l.epoch(r.partition, r.epoch); err != nil {
		return err
	}
	given := func(t fence.Token) bool {
		return t.Epoch() > 0 && t.Seq() > 0 && (t.Epoch() < p.epoch || t.Epoch() == p.epoch && t.Seq() <= p.seq)
	}
	switch {
	case len(r.value) > MaxValue, r.lockDelay > MaxLockDelayMillis, r.delay > MaxLockDelayMillis:
		return errors.New("a value or a delay above the bounds")
	case r.delay == 0 && r.delayToken != 0, r.delayToken != 0 && !given(r.delayToken):
		return fmt.Errorf("a lock delay of token %v, which does not run", r.delayToken)
	}
	if r.token == 0 {
		if r.session != "" || r.request != 0 || r.offered || r.revoked || r.revokeReason != "" || r.value != "" || r.lockDelay != 0 || r.revision != 0 {
			return errors.New("not held, and has a holder's marks")
		}
		return nil
	}
	if !given(r.token) || r.token.Epoch() != r.epoch || r.delay != 0 {
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
	if f.GetSemaphores() != uint64(l.semaphores) {
		return fmt.Errorf("%d semaphores where the footer says %d", l.semaphores, f.GetSemaphores())
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
	m.settleHashes()
	m.rehash()
	h := m.hash(m.sum)
	if l.format == 1 {
		h = m.format1Hash()
	}
	if h != f.GetStateHash() {
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
