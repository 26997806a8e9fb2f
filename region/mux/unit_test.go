package mux

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor/run"
)

// recorder is an upstream that only notes who is ready.
type recorder struct {
	t     uint64
	asked int
}

func (r *recorder) term() uint64  { return r.t }
func (r *recorder) ready(*Client) { r.asked++ }

func client(t *testing.T) (*Edge, *Client) {
	t.Helper()
	e := NewEdge(Config{Server: "eu-1"})
	c, err := e.Open(policy.Caller{Role: policy.Client, Name: "client/a"})
	if err != nil {
		t.Fatal(err)
	}
	return e, c
}

func ka(session string, sequence uint64) *pb.AttachRequest {
	return &pb.AttachRequest{Kind: &pb.AttachRequest_Keepalive{Keepalive: &pb.Keepalive{SessionId: session, Sequence: sequence}}}
}

func off(session string) *pb.AttachRequest {
	return &pb.AttachRequest{Kind: &pb.AttachRequest_Detach{Detach: &pb.Detach{SessionId: session}}}
}

func say(t *testing.T, c *Client, reqs ...*pb.AttachRequest) {
	t.Helper()
	for _, r := range reqs {
		if err := c.Request(r); err != nil {
			t.Fatal(err)
		}
	}
}

// said is what the client would tell its upstream, in short.
func heard(c *Client, up upstream) (out string) {
	reqs, _ := c.take(up, nil, 1000)
	for _, r := range reqs {
		if d := r.GetDetach(); d != nil {
			out += " -" + d.GetSessionId()
			continue
		}
		out += fmt.Sprintf(" %s%d", r.GetKeepalive().GetSessionId(), r.GetKeepalive().GetSequence())
	}
	return out
}

func TestKeepalivesOfOneSessionReplaceEachOther(t *testing.T) {
	_, c := client(t)
	up := &recorder{t: 1}
	c.attach(up)
	say(t, c, ka("a", 1), ka("b", 1), ka("a", 2), ka("a", 3))
	if got := heard(c, up); got != " a3 b1" {
		t.Errorf("told%s", got)
	}
	if got := heard(c, up); got != "" {
		t.Errorf("told again%s", got)
	}
	say(t, c, ka("a", 4), off("a"), off("x"), ka("b", 2), off("b"), ka("b", 3))
	if got := heard(c, up); got != " -a -b b3" {
		t.Errorf("with detaching: told%s", got)
	}
	say(t, c, off("a")) // it is gone from here
	if got := heard(c, up); got != "" {
		t.Errorf("a detached session: told%s", got)
	}
	for i := range 10 {
		say(t, c, ka(fmt.Sprint(i), 1))
	}
	if reqs, more := c.take(up, nil, 4); len(reqs) != 4 || !more {
		t.Errorf("a turn of 4: %d, more %v", len(reqs), more)
	}
}

// TestABatchGoesOnAsOne: one word to the upstream, after all of it.
func TestABatchGoesOnAsOne(t *testing.T) {
	_, c := client(t)
	up := &recorder{t: 1}
	c.attach(up)
	up.asked = 0
	batch := func(reqs ...*pb.AttachRequest) *pb.AttachRequest {
		return &pb.AttachRequest{Kind: &pb.AttachRequest_Batch{Batch: &pb.AttachRequests{Requests: reqs}}}
	}
	say(t, c, batch(ka("a", 1), ka("b", 1), off("c"), ka("a", 2)))
	if got := heard(c, up); up.asked != 1 || got != " a2 b1" {
		t.Errorf("asked %d times, told%s", up.asked, got)
	}
	if err := c.Request(batch(ka("a", 3), batch(ka("b", 2)), ka("b", 3))); err == nil {
		t.Error("a batch in a batch is taken")
	}
	if got := heard(c, up); up.asked != 2 || got != " a3" {
		t.Errorf("what came before the fault: asked %d times, told%s", up.asked, got)
	}
	say(t, c, batch(), batch(off("x")))
	if up.asked != 2 {
		t.Error("asked about nothing")
	}
}

func TestF41ALaterTermHearsEverySessionAgain(t *testing.T) {
	_, c := client(t)
	say(t, c, ka("a", 1)) // there is no leader yet
	first := &recorder{t: 3}
	if c.attach(first) != moved || heard(c, first) != " a1" {
		t.Fatal("the first leader did not hear of the session")
	}
	c.deliver(first, &pb.AttachResponse{Term: 3})
	c.leave(first)
	say(t, c, ka("b", 1), off("a"), ka("a", 2))
	if got := heard(c, first); got != "" {
		t.Errorf("a leader of the past is told%s", got)
	}
	if got := c.attach(&recorder{t: 2}); got != stale {
		t.Errorf("an earlier term: %v", got)
	}
	later := &recorder{t: 4}
	if c.attach(later) != moved || later.asked != 1 {
		t.Fatal("not moved")
	}
	if got := heard(c, later); got != " b1 a2" && got != " a2 b1" { // a detach means nothing to it
		t.Errorf("told%s", got)
	}
	if !c.deliver(first, &pb.AttachResponse{Term: 3}) {
		t.Error("a message of the past is refused, not dropped")
	}
	c.deliver(later, &pb.AttachResponse{Term: 4})
	if ms, err := c.Next(t.Context()); err != nil || len(ms) != 2 || ms[1].GetTerm() != 4 {
		t.Errorf("passed on: %v %v", ms, err)
	}
}

// TestL5WithinATermAStreamDoesNotGoOn once something of the term was passed on;
// before that it may.
func TestL5WithinATermAStreamDoesNotGoOn(t *testing.T) {
	_, c := client(t)
	one, two, three := &recorder{t: 5}, &recorder{t: 5}, &recorder{t: 5}
	c.attach(one)
	c.leave(one)
	if got := c.attach(two); got != moved {
		t.Errorf("nothing was said in that term, and it is %v", got)
	}
	c.deliver(two, &pb.AttachResponse{Term: 5})
	c.leave(two)
	if got := c.attach(three); got != broken {
		t.Errorf("something may be lost, and it is %v", got)
	}
}

func TestAnEndedSessionIsNotRepeated(t *testing.T) {
	_, c := client(t)
	up := &recorder{t: 1}
	c.attach(up)
	say(t, c, ka("a", 1), ka("b", 1))
	heard(c, up)
	c.deliver(up, &pb.AttachResponse{Term: 1, Kind: &pb.AttachResponse_Ended{Ended: &pb.SessionEnded{SessionId: "a"}}})
	c.leave(up)
	up = &recorder{t: 2}
	c.attach(up)
	if got := heard(c, up); got != " b1" {
		t.Errorf("told%s", got)
	}
}

func TestSessionsPerStreamAreBounded(t *testing.T) {
	_, c := client(t)
	for i := range maxSessions {
		say(t, c, ka(fmt.Sprint(i), 1))
	}
	err := c.Request(ka("one more", 1))
	if e := (*Error)(nil); !errors.As(err, &e) || e.Detail.GetOverloaded().GetRetryNs() <= 0 {
		t.Errorf("one session more: %v", err)
	}
	say(t, c, ka("7", 2)) // those that are there go on
}

func TestClientStreamsAreBounded(t *testing.T) {
	e := NewEdge(Config{Server: "eu-1"})
	for range maxClients {
		if _, err := e.Open(policy.Caller{}); err != nil {
			t.Fatal(err)
		}
	}
	_, err := e.Open(policy.Caller{})
	if o := (*Error)(nil); !errors.As(err, &o) || o.Detail.GetOverloaded() == nil {
		t.Errorf("one stream more: %v", err)
	}
}

func virtuals(n int) (*outlet, []*virtual) {
	o := newOutlet()
	out := make([]*virtual, n)
	for i := range out {
		out[i] = &virtual{outlet: o, id: uint64(i + 1)}
	}
	return o, out
}

// TestF32OnePushForManyStreamsGoesOutOnce.
func TestF32OnePushForManyStreamsGoesOutOnce(t *testing.T) {
	o, v := virtuals(1000)
	push := &pb.AttachResponse{Term: 1, Kind: &pb.AttachResponse_Push{Push: &pb.PartitionPush{}}}
	for _, s := range v {
		s.Push(push)
	}
	resp, err := o.next(t.Context())
	if err != nil || len(resp.GetFrames()) != 1 || len(resp.GetFrames()[0].GetStreams()) != 1000 {
		t.Errorf("%d frames, %v", len(resp.GetFrames()), err)
	}
}

// TestL5EachStreamKeepsItsOrder, and none waits for another's flood.
func TestL5EachStreamKeepsItsOrder(t *testing.T) {
	o, v := virtuals(3)
	message := func(n int) *pb.AttachResponse {
		return &pb.AttachResponse{Term: 1, Kind: &pb.AttachResponse_Ack{Ack: &pb.Ack{Sequence: uint64(n)}}}
	}
	const flood = maxWaiting
	for n := range flood {
		if !v[0].Push(message(n + 1)) {
			t.Fatal("no room")
		}
	}
	if v[0].Push(message(0)) {
		t.Error("one too many is taken")
	}
	v[1].Push(message(1))
	v[1].End(run.ErrSlow)
	v[1].Push(message(2)) // after the end of the shell there is none, and it does no harm
	o.ping(7)
	last := map[uint64]uint64{}
	for round := 0; last[1] < flood; round++ {
		resp, err := o.next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if round == 0 && resp.GetPong() != 7 {
			t.Errorf("pong %d", resp.GetPong())
		}
		for _, f := range resp.GetFrames() {
			id := f.GetStreams()[0]
			if f.GetEnded() != nil {
				if id != 2 || last[2] != 2 || codes.Code(f.GetEnded().GetCode()) != codes.ResourceExhausted {
					t.Errorf("stream %d ended after %d: %v", id, last[id], f)
				}
				continue
			}
			if got := f.GetResponse().GetAck().GetSequence(); got != last[id]+1 {
				t.Fatalf("stream %d: %d after %d", id, got, last[id])
			}
			last[id]++
		}
		if round == 0 && last[2] == 0 {
			t.Error("the second stream waits for the first one's flood")
		}
	}
	if o.waiting != 0 {
		t.Errorf("%d messages are counted as waiting", o.waiting)
	}
}

func TestAMuxThatIsNotReadEnds(t *testing.T) {
	o, v := virtuals(maxWaitingInAll/maxWaiting + 1)
	m := &pb.AttachResponse{Term: 1}
	for _, s := range v {
		for range maxWaiting {
			s.Push(m)
		}
	}
	if _, err := o.next(t.Context()); !errors.Is(err, errMuxSlow) {
		t.Errorf("%v", err)
	}
}

func TestTheEndOfTheTermEndsTheMux(t *testing.T) {
	o, v := virtuals(1)
	v[0].Push(&pb.AttachResponse{Term: 1})
	v[0].End(run.ErrNotLeading)
	if _, err := o.next(t.Context()); !errors.Is(err, run.ErrNotLeading) {
		t.Errorf("%v", err)
	}
}

// TestTheEndOfAStreamComesThroughAsItWas.
func TestTheEndOfAStreamComesThroughAsItWas(t *testing.T) {
	for _, err := range []error{errSlow, errMoved, status.Error(codes.PermissionDenied, "no")} {
		if got := unpack(pack(err)); status.Code(got) != status.Code(err) || status.Convert(got).Message() != status.Convert(err).Message() {
			t.Errorf("%v came as %v", err, got)
		}
	}
	sent := &Error{Detail: &pb.ErrorDetail{Kind: &pb.ErrorDetail_Overloaded{Overloaded: &pb.Overloaded{RetryNs: 5, What: "x"}}}}
	if got := (*Error)(nil); !errors.As(unpack(pack(sent)), &got) || !proto.Equal(got.Detail, sent.Detail) {
		t.Errorf("came as %v", got)
	}
}

// TestManyEndsAreSpread: clients that must come back do not come all at once.
func TestManyEndsAreSpread(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := NewEdge(Config{Server: "eu-1"})
		var clients []*Client
		for range 1000 {
			c, err := e.Open(policy.Caller{})
			if err != nil {
				t.Fatal(err)
			}
			clients = append(clients, c)
		}
		begin := time.Now()
		e.endAll(t.Context(), clients, errBroken)
		e.work.Wait()
		if took := time.Since(begin); took < 50*time.Millisecond || took > time.Second {
			t.Errorf("1000 streams ended within %v", took)
		}
		for _, c := range clients {
			if _, err := c.Next(t.Context()); status.Code(err) != codes.Unavailable {
				t.Fatal(err)
			}
		}
	})
}
