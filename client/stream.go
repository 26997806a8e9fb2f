package client

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

type attachStream = grpc.BidiStreamingClient[pb.AttachRequest, pb.AttachResponse]

const (
	// minHung is the least time in which a server must answer a keepalive.
	minHung = 250 * time.Millisecond
)

// run keeps the region's sessions alive, one stream at a time on one server
// after the other, until there is none.
func (r *region) run() {
	ctx, cancel := context.WithCancel(r.client.ctx)
	defer cancel()
	swept := make(chan struct{})
	if !r.client.spawn(func() {
		defer close(swept)
		r.sweeper(ctx)
	}) {
		return // closing, which ends all sessions
	}
	defer func() {
		cancel()
		<-swept
	}()
	for pause := minRetry; ; pause = min(2*pause, maxRetry) {
		r.mu.Lock()
		if len(r.sessions) == 0 || ctx.Err() != nil {
			r.running = false
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		if r.attach(ctx) {
			pause = minRetry
		}
		select {
		case <-ctx.Done():
		case <-time.After(r.client.cfg.random.about(pause)):
		}
	}
}

// attach runs one stream until it breaks, no session is left, or its server is
// found to hang. It reports whether the stream has answered anything.
func (r *region) attach(ctx context.Context) (useful bool) {
	conn, err := r.conns.current()
	if err != nil {
		return false
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the reader
	stream, err := openStream(ctx, conn.ClientConn, r.openWithin())
	if err != nil {
		if ctx.Err() == nil {
			if status.Code(err) != codes.Unavailable { // no server, or one that says so
				r.moved()
			}
			// One that is still being made is left to it: with ten thousand others that
			// takes longer, and would do so again.
			r.conns.leave(conn, conn.GetState() != connectivity.Connecting)
		}
		return false
	}
	id := r.streamOpened()
	defer r.streamBroken()
	conn.streams(true)
	defer conn.streams(false)
	var answered atomic.Bool
	broken := make(chan error, 1)
	if !r.client.spawn(func() {
		broken <- read(stream, func(messages []*pb.AttachResponse) {
			conn.heard()
			for _, msg := range messages {
				r.take(id, msg)
			}
			answered.Store(true)
		})
	}) {
		return false
	}
	told := false
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			_ = stream.CloseSend()
			return answered.Load()
		case err := <-broken:
			r.client.cfg.Logger.Debug("stream ended", "region", r.name, "error", err)
			r.conns.leave(conn, false)
			return answered.Load()
		case <-timer.C:
		case <-r.wake:
		}
		out := r.due()
		switch {
		case len(out.messages) == 1 && told:
			_ = stream.Send(out.messages[0])
		case len(out.messages) > 0:
			// An error is told to the reader, with its reason.
			_ = stream.Send(&pb.AttachRequest{Kind: &pb.AttachRequest_Batch{Batch: &pb.AttachRequests{Requests: out.messages}}})
			told = true // that batches are taken here too
		}
		if conn.hangs() {
			out.leave, out.hung = true, true
		}
		switch {
		case out.idle:
			_ = stream.CloseSend()
			return answered.Load()
		case out.leave:
			why := "server answers no keepalive; leaving it for another"
			if out.hung {
				why = "server hangs; leaving it for another"
			}
			r.client.cfg.Logger.Warn(why, "region", r.name, "server", r.conns.servers[conn.at].Name)
			r.moved()
			r.conns.leave(conn, out.hung)
			return answered.Load()
		}
		timer.Reset(out.wait)
	}
}

// openWithin is how long the opening of a stream may take.
func (r *region) openWithin() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, ttl, left := r.now(), MaxTTL, MaxTTL
	for _, s := range r.sessions {
		ttl = min(ttl, s.ttl)
		if s.soonest > now {
			left = min(left, s.soonest.Sub(now))
		}
	}
	// The doubled patience does not take the time in which another server could still
	// save the leases, or the session.
	within := min(max(ttl/8, min(minHung, ttl/4)), attemptTimeout)
	return min(within<<r.moves.lately(now), max(within, min(left/2, ttl/3)), attemptTimeout)
}

// moves from one server to the next because the first did not answer, of late: who
// moves again and again has found no fault of a server, but that all are slow, or
// the client is; and moves are what they are slow with.
type moves struct {
	count int
	last  instant.Instant
}

// maxMoves is how many of them count, each of which doubles the patience.
const maxMoves = 3

func (m *moves) lately(now instant.Instant) int {
	if now.Sub(m.last) > lagLasts {
		m.count = 0
	}
	return m.count
}

// moved notes a move.
func (r *region) moved() {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	r.moves = moves{min(r.moves.lately(now)+1, maxMoves), now}
}

// streamState is what the present stream has been asked and has answered.
type streamState struct {
	id validity.StreamID // 0: there is none
	// up: it has answered something.
	up bool
	// probed is when it was last asked whether it hangs.
	probed instant.Instant
	// asked are the keepalives sent after the newest that was acknowledged.
	asked []batch
	// alive is when the server last answered a keepalive or a ping.
	alive instant.Instant
	// pings sent, and when the last one was.
	pings  uint64
	pinged instant.Instant
	// look is when its owner is to look next; 0: whenever it comes to it.
	look instant.Instant
	// excused is when its owner last looked much later than that, so that the
	// server's silence of before says nothing; excuses counts how often that was
	// since anything was heard.
	excused instant.Instant
	excuses int
}

// maxExcuses: a process that has no processor for itself for so long must leave a
// hung server all the same.
const maxExcuses = 3

// looked notes that the owner looks now.
func (st *streamState) looked(now instant.Instant) {
	if st.look != 0 && now.Sub(st.look) > maxOverslept && st.excuses < maxExcuses {
		st.excused = now
		st.excuses++
	}
}

// batch is what was sent at one instant.
type batch struct {
	at instant.Instant
	// count of its sessions that may still be answered.
	count int
	wait  wait
}

// wait is how long a keepalive may go without an answer.
type wait struct {
	// hung: of a server that does not answer pings either.
	hung time.Duration
	// late: of one that does. What is behind it is slow, a region that elects a
	// leader, or has ten thousand sessions to greet, and it would be no better at
	// another server; but its way to the leader may be broken.
	late time.Duration
}

// maxBatches bounds the batches that are told apart.
const maxBatches = 512

func (st *streamState) sent(at instant.Instant, w wait) {
	if n := len(st.asked); n > 0 && (st.asked[n-1].at == at || n == maxBatches) {
		b := &st.asked[n-1]
		b.wait = wait{min(b.wait.hung, w.hung), min(b.wait.late, w.late)}
		b.count++
		return
	}
	st.asked = append(st.asked, batch{at, 1, w})
}

// answered: the server has taken all that was sent up to then. It takes
// keepalives in their order, and answers those that it has taken together.
func (st *streamState) answered(at instant.Instant) {
	n := 0
	for n < len(st.asked) && st.asked[n].at <= at {
		n++
	}
	st.asked = append(st.asked[:0], st.asked[n:]...)
}

// forget a keepalive of a session that has ended: it may never be answered.
func (st *streamState) forget(at instant.Instant) {
	for i := range st.asked {
		if b := &st.asked[i]; b.at == at {
			if b.count--; b.count == 0 {
				st.asked = append(st.asked[:i], st.asked[i+1:]...)
			}
			return
		}
	}
}

// leaveAt is when the server is to be left for another; 0: it has answered all.
// hung: because it does not answer pings either.
func (st *streamState) leaveAt() (at instant.Instant, hung bool) {
	for _, b := range st.asked {
		sent := instant.Max(b.at, st.excused)
		end := instant.Max(sent, st.alive).Add(b.wait.hung)
		late := sent.Add(b.wait.late)
		if first := instant.Min(end, late); at == 0 || first < at {
			at, hung = first, end <= late
		}
	}
	return at, hung
}

// pingAt is when the server is to be asked whether it hangs: half-way to the
// instant at which it counts as hung. 0: it has answered all.
func (st *streamState) pingAt() instant.Instant {
	if len(st.asked) == 0 {
		return 0
	}
	b := st.asked[0]
	return max(b.at, st.alive, st.pinged, st.excused).Add(b.wait.hung / 2)
}

// ping makes one.
func (st *streamState) ping(now instant.Instant) *pb.AttachRequest {
	st.pings++
	st.pinged = now
	return &pb.AttachRequest{Kind: &pb.AttachRequest_Ping{Ping: &pb.Ping{Sequence: st.pings}}}
}

// streamOpened: all sessions attach to the new stream.
func (r *region) streamOpened() validity.StreamID {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stream = streamState{id: r.table.StreamOpened()}
	r.detaching = nil // nothing of them is on it
	for _, s := range r.sessions {
		s.unanswered = nil
		r.schedule(s)
	}
	return r.stream.id
}

func (r *region) streamBroken() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.table.StreamBroken(r.stream.id)
	r.stream = streamState{}
}

// openStream opens Attach, for no longer than a hung server may take.
func openStream(ctx context.Context, cc *grpc.ClientConn, within time.Duration) (attachStream, error) {
	ctx, cancel := context.WithCancel(ctx)
	guard := time.AfterFunc(within, cancel)
	stream, err := pb.NewSessionServiceClient(cc).Attach(ctx)
	if !guard.Stop() || err != nil {
		cancel()
		if err == nil {
			err = context.DeadlineExceeded
		}
		return nil, err
	}
	context.AfterFunc(stream.Context(), cancel)
	return stream, nil
}

// read takes a stream's messages until it breaks. Whoever waits for one of them is
// woken by the goroutine that has read it.
func read(stream attachStream, take func([]*pb.AttachResponse)) error {
	for {
		msg, err := stream.Recv()
		if err != nil {
			return err
		}
		messages := msg.GetBatch().GetResponses()
		if messages == nil {
			messages = []*pb.AttachResponse{msg}
		}
		take(messages)
	}
}
