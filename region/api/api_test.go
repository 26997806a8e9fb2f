package api_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/policy"
	"github.com/headlease/headlease/internal/regiontest"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/api"
	"github.com/headlease/headlease/region/mux"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a region of three in memory, with connections to its leader and to
// a follower.
type world struct {
	network          *regiontest.Network
	region           *regiontest.Region
	leader, follower *grpc.ClientConn
}

func inWorld(t *testing.T, f func(t *testing.T, w *world)) {
	synctest.Test(t, func(t *testing.T) {
		n := regiontest.NewNetwork(t)
		w := &world{network: n, region: n.Region(regiontest.Config{Name: "eu"})}
		w.region.Own(1)
		w.leader, w.follower = dial(t, n, "eu-1"), dial(t, n, "eu-2")
		f(t, w)
	})
}

func dial(t *testing.T, n *regiontest.Network, server string) *grpc.ClientConn {
	t.Helper()
	c, err := n.Links("alice").DialGRPC(link.PlaneAPI, link.Peer{Address: server})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func dialAs(t *testing.T, w *world, name string, server int) *grpc.ClientConn {
	t.Helper()
	c, err := w.network.Links(name).DialGRPC(link.PlaneAPI, link.Peer{Address: w.region.Server(server).Name()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func (w *world) both() map[string]*grpc.ClientConn {
	return map[string]*grpc.ClientConn{"leader": w.leader, "follower": w.follower}
}

func open(t *testing.T, c *grpc.ClientConn) *pb.OpenSessionResponse {
	t.Helper()
	s, err := pb.NewSessionServiceClient(c).OpenSession(t.Context(), &pb.OpenSessionRequest{TtlMs: 10_000})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func acquire(s *pb.OpenSessionResponse, resource string, request uint64) *pb.AcquireRequest {
	return &pb.AcquireRequest{SessionId: s.GetSessionId(), Secret: s.GetSecret(), Resource: resource, RequestId: request, LowestOpenRequest: request}
}

// detail is the typed part of an error.
func detail(err error) *pb.ErrorDetail {
	for _, d := range status.Convert(err).Details() {
		if d, ok := d.(*pb.ErrorDetail); ok {
			return d
		}
	}
	return nil
}

// TestBadInput: code, text and detail are the same through the leader and
// through a follower.
func TestBadInput(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		s := open(t, w.leader)
		session := func(req *pb.OpenSessionRequest) func(context.Context, *grpc.ClientConn) error {
			return func(ctx context.Context, c *grpc.ClientConn) error {
				_, err := pb.NewSessionServiceClient(c).OpenSession(ctx, req)
				return err
			}
		}
		take := func(edit func(*pb.AcquireRequest)) func(context.Context, *grpc.ClientConn) error {
			return func(ctx context.Context, c *grpc.ClientConn) error {
				req := acquire(s, "lock/x", 1)
				edit(req)
				_, err := pb.NewLeaseServiceClient(c).Acquire(ctx, req)
				return err
			}
		}
		many := map[string]string{}
		for i := range 33 {
			many[fmt.Sprint(i)] = ""
		}
		for _, c := range []struct {
			call func(context.Context, *grpc.ClientConn) error
			code codes.Code
			text string
		}{
			{session(&pb.OpenSessionRequest{TtlMs: 499}), codes.InvalidArgument, "ttl_ms: 499 is out of range; choose 500 to 600000, or 0 for the default of 10000"},
			{session(&pb.OpenSessionRequest{TtlMs: -1}), codes.InvalidArgument, "ttl_ms: -1 is out of range; choose 500 to 600000, or 0 for the default of 10000"},
			{session(&pb.OpenSessionRequest{TtlMs: 1 << 62}), codes.InvalidArgument, "ttl_ms: 4611686018427387904 is out of range; choose 500 to 600000, or 0 for the default of 10000"},
			{session(&pb.OpenSessionRequest{Labels: many}), codes.InvalidArgument, "labels: 33 are given; at most 32 are kept"},
			{session(&pb.OpenSessionRequest{Labels: map[string]string{"": "x"}}), codes.InvalidArgument, "labels: key and value must have at most 256 bytes, and a key at least 1"},
			{take(func(r *pb.AcquireRequest) { r.RequestId = 0 }), codes.InvalidArgument, "request_id: is 0; number the session's requests from 1"},
			{take(func(r *pb.AcquireRequest) { r.LowestOpenRequest = 9 }), codes.InvalidArgument, "lowest_open_request: 9 is above this very request's id 1"},
			{take(func(r *pb.AcquireRequest) { r.Secret = []byte("guess") }), codes.InvalidArgument, "secret: does not belong to session " + s.GetSessionId() + "; use the one that OpenSession returned"},
			{take(func(r *pb.AcquireRequest) { r.SessionId = "gone" }), codes.NotFound, "session gone is unknown or has ended; open a new one"},
			{func(ctx context.Context, c *grpc.ClientConn) error {
				_, err := pb.NewLeaseServiceClient(c).ListLeases(ctx, &pb.ListLeasesRequest{Limit: 1001})
				return err
			}, codes.InvalidArgument, "limit: 1001 is above 1000; ask for pages"},
			{func(ctx context.Context, c *grpc.ClientConn) error {
				_, err := pb.NewLeaseServiceClient(c).CancelAcquire(ctx, &pb.CancelAcquireRequest{SessionId: s.GetSessionId(), Secret: s.GetSecret()})
				return err
			}, codes.InvalidArgument, "request_id: is 0; name the request to cancel"},
			{func(ctx context.Context, c *grpc.ClientConn) error {
				_, err := pb.NewLeaseServiceClient(c).Release(ctx, &pb.ReleaseRequest{SessionId: s.GetSessionId(), Secret: s.GetSecret(), Resource: "lock/x", Token: 5})
				return err
			}, codes.FailedPrecondition, "this session does not hold lock/x with token 5; the lease has ended, stop working on it"},
		} {
			for server, conn := range w.both() {
				err := c.call(t.Context(), conn)
				if status.Code(err) != c.code || status.Convert(err).Message() != c.text || detail(err) == nil {
					t.Errorf("%s: %v (detail %v)\nwant %v %s", server, err, detail(err), c.code, c.text)
				}
			}
		}
	})
}

func TestNotOwnerAndLapsedNameTheNextStep(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		s := open(t, w.follower)
		leases := pb.NewLeaseServiceClient(w.follower)
		if _, err := leases.Acquire(t.Context(), acquire(s, "lock/x", 1)); err != nil {
			t.Fatal(err)
		}
		w.region.Lapse(true)
		time.Sleep(5 * time.Second) // the bubble's time
		_, err := leases.Acquire(t.Context(), acquire(s, "lock/y", 2))
		if l := detail(err).GetLapsed(); status.Code(err) != codes.Unavailable || l.GetRetryNs() <= 0 || l.GetPartition() != regiontest.Partition {
			t.Errorf("lapsed: %v, %v", err, l)
		}
		w.region.Lose(1, "us")
		_, err = leases.Acquire(t.Context(), acquire(s, "lock/y", 2))
		if o := detail(err).GetNotOwner(); status.Code(err) != codes.FailedPrecondition || o.GetOwner() != "us" || o.GetEpoch() != 2 {
			t.Errorf("another owner: %v, %v", err, o)
		}
	})
}

// TestIdentify: a forwarded identity is believed from servers of the own
// region only, and a broken one is nobody's.
func TestIdentify(t *testing.T) {
	carried := func(kv ...string) context.Context {
		return metadata.NewIncomingContext(t.Context(), metadata.Pairs(kv...))
	}
	claim := []string{"headlease-forwarded-role", "admin", "headlease-forwarded-name", "admin"}
	server := func(name string) policy.Caller { return policy.Caller{Role: policy.Region, Name: name} }
	client := policy.Caller{Role: policy.Client, Name: "client/mallory"}
	for _, c := range []struct {
		what   string
		direct policy.Caller
		ctx    context.Context
		want   policy.Caller
		ok     bool
	}{
		{"own server forwards", server("region/eu/eu-2"), carried(claim...), policy.Caller{Role: policy.Admin, Name: "admin"}, true},
		{"own server calls itself", server("region/eu/eu-2"), carried(), server("region/eu/eu-2"), true},
		{"another region's server", server("region/us/us-1"), carried(claim...), server("region/us/us-1"), true},
		{"a region whose name begins alike", server("region/eu2/eu-1"), carried(claim...), server("region/eu2/eu-1"), true},
		{"a client", client, carried(claim...), client, true},
		{"a client named like a server", policy.Caller{Role: policy.Client, Name: "region/eu/eu-2"}, carried(claim...), policy.Caller{Role: policy.Client, Name: "region/eu/eu-2"}, true},
		{"half a claim", server("region/eu/eu-2"), carried(claim[:2]...), policy.Caller{}, false},
		{"two claims", server("region/eu/eu-2"), carried(append(claim, claim...)...), policy.Caller{}, false},
	} {
		got, ok := api.Identify("eu", func(context.Context) (policy.Caller, bool) { return c.direct, true })(c.ctx)
		if ok != c.ok || got != c.want {
			t.Errorf("%s: %+v %v, want %+v %v", c.what, got, ok, c.want, c.ok)
		}
	}
	if _, ok := api.Identify("eu", func(context.Context) (policy.Caller, bool) { return policy.Caller{}, false })(carried(claim...)); ok {
		t.Error("nobody is believed")
	}
}

// TestForwardedOnceOnly: a server that gets a forwarded call and does not lead
// refuses it, so that two servers which each think the other leads do not
// send it back and forth.
func TestForwardedOnceOnly(t *testing.T) {
	f := &api.Forwarder{
		Leader: func() (string, bool) { return "eu-3", false },
		Conn:   func(string) (*grpc.ClientConn, error) { t.Error("forwarded again"); return nil, errors.New("no") },
		Identify: func(context.Context) (policy.Caller, bool) {
			return policy.Caller{Role: policy.Client, Name: "client/a"}, true
		},
	}
	ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs("headlease-forwarded-role", "client", "headlease-forwarded-name", "client/a"))
	_, err := f.Unary(ctx, &pb.AcquireRequest{}, &grpc.UnaryServerInfo{FullMethod: pb.LeaseService_Acquire_FullMethodName}, nil)
	if status.Convert(errorStatus(err)).Code() != codes.Unavailable {
		t.Error(err)
	}
	f.Leader, f.Uninitialised = func() (string, bool) { return "", false }, func() string { return "eu-1" }
	_, err = f.Unary(t.Context(), &pb.AcquireRequest{}, &grpc.UnaryServerInfo{FullMethod: pb.LeaseService_Acquire_FullMethodName}, nil)
	if want := "server eu-1 is not initialised; run `headlease init`"; err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

func errorStatus(err error) error {
	if e := (*api.DetailError)(nil); errors.As(err, &e) {
		return e.GRPCStatus().Err()
	}
	return err
}

func TestPolicyIsClosedToClientsButForSessionsLeasesAndLooks(t *testing.T) {
	table := api.Policy()
	for method := range api.Local() {
		if _, ok := table[method]; !ok {
			t.Errorf("%s is answered here and has no rule", method)
		}
	}
	for method, r := range table {
		for _, service := range []string{"VoteService", "PeerService", "FaultService"} {
			if strings.HasPrefix(method, "/headlease.v1."+service+"/") && slices.Contains(r.Roles, policy.Client) {
				t.Errorf("%s is open to clients", method)
			}
		}
	}
}

type attachment = grpc.BidiStreamingClient[pb.AttachRequest, pb.AttachResponse]

func attach(t *testing.T, c *grpc.ClientConn) attachment {
	t.Helper()
	a, err := pb.NewSessionServiceClient(c).Attach(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func keepalive(s *pb.OpenSessionResponse, sequence uint64) *pb.AttachRequest {
	return &pb.AttachRequest{Kind: &pb.AttachRequest_Keepalive{Keepalive: &pb.Keepalive{SessionId: s.GetSessionId(), Secret: s.GetSecret(), Sequence: sequence}}}
}

// TestF41TheStreamOutlivesItsLeader, to whichever server it goes and whoever
// leads next: the new term begins with a complete ack, without a word from the
// client, and nothing of the old one follows.
func TestF41TheStreamOutlivesItsLeader(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for server, conn := range w.both() {
			s, a := open(t, conn), attach(t, conn)
			for i := range uint64(20) {
				if err := a.Send(keepalive(s, i+1)); err != nil {
					t.Fatal(err)
				}
			}
			var term uint64
			for last := uint64(0); last < 20; {
				m, err := a.Recv()
				if err != nil {
					t.Fatal(server, err)
				}
				term = m.GetTerm()
				if ack := m.GetAck(); ack != nil {
					if ack.GetSequence() <= last {
						t.Fatalf("%s: ack %d after %d", server, ack.GetSequence(), last)
					}
					last = ack.GetSequence()
				}
			}
			for _, leader := range []int{0, 1, 2, 2, 0} {
				w.region.Elect(leader)
				term++
				for {
					m, err := a.Recv()
					if err != nil {
						t.Fatalf("%s, leader %d: the stream ended with %v", server, leader, err)
					}
					if m.GetTerm() < term {
						continue
					}
					if ack := m.GetAck(); m.GetTerm() != term || !ack.GetComplete() || ack.GetSequence() != 20 {
						t.Errorf("%s, leader %d: the term began with %v", server, leader, m)
					}
					break
				}
			}
		}
	})
}

// TestF41WithoutALeaderTheStreamEndsByItself, so that its client tries another
// server.
func TestF41WithoutALeaderTheStreamEndsByItself(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for server, conn := range w.both() {
			s, a := open(t, conn), attach(t, conn)
			if err := a.Send(keepalive(s, 1)); err != nil {
				t.Fatal(err)
			}
			if _, err := a.Recv(); err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			w.region.Depose()
			for {
				_, err := a.Recv()
				if err == nil {
					continue
				}
				if d := detail(err); status.Code(err) != codes.Unavailable || d.GetNotLeader() == nil {
					t.Errorf("%s: the stream ended with %v", server, err)
				}
				break
			}
			if held := time.Since(begin); held < mux.DefaultHold || held > 2*mux.DefaultHold {
				t.Errorf("%s: the stream ended after %v", server, held)
			}
			w.region.Elect(0)
		}
	})
}

func batch(requests ...*pb.AttachRequest) *pb.AttachRequest {
	return &pb.AttachRequest{Kind: &pb.AttachRequest_Batch{Batch: &pb.AttachRequests{Requests: requests}}}
}

// TestBatches: who sends batches gets them, in order; who does not gets none.
func TestBatches(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for server, conn := range w.both() {
			var many []*pb.AttachRequest
			for range 700 {
				many = append(many, keepalive(open(t, w.leader), 1))
			}
			a := attach(t, conn)
			for part := range slices.Chunk(many, 300) {
				if err := a.Send(batch(append(part, &pb.AttachRequest{Kind: &pb.AttachRequest_Ping{Ping: &pb.Ping{Sequence: uint64(len(part))}}})...)); err != nil {
					t.Fatal(err)
				}
			}
			acks, pongs, messages := map[string]bool{}, []uint64{}, 0
			for len(acks) < len(many) || len(pongs) < 3 {
				m, err := a.Recv()
				if err != nil {
					t.Fatal(err)
				}
				messages++
				for _, r := range append(m.GetBatch().GetResponses(), m) {
					if r.GetAck() != nil {
						acks[r.GetAck().GetSessionId()] = true
					}
					if r.GetPong() != nil {
						pongs = append(pongs, r.GetPong().GetSequence())
					}
				}
			}
			if messages > 100 || !slices.Equal(pongs, []uint64{300, 300, 100}) {
				t.Errorf("%s: %d messages for %d acks; pongs %v", server, messages, len(many), pongs)
			}
			a = attach(t, conn)
			for _, k := range many[:50] {
				if err := a.Send(k); err != nil {
					t.Fatal(err)
				}
			}
			for n := 0; n < 50; {
				m, err := a.Recv()
				switch {
				case err != nil:
					t.Fatal(err)
				case m.GetBatch() != nil:
					t.Fatalf("%s: a batch to a client that has sent none", server)
				case m.GetAck() != nil:
					n++
				}
			}
		}
	})
}

// TestWhatAStreamRefuses is told as an error, through a follower too.
func TestWhatAStreamRefuses(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		s := open(t, w.leader)
		wrong := keepalive(s, 1)
		wrong.GetKeepalive().Secret = []byte("guess")
		large := keepalive(s, 1)
		large.GetKeepalive().Secret = make([]byte, 5000)
		for _, c := range []struct {
			what string
			req  *pb.AttachRequest
			code codes.Code
		}{{"a wrong secret", wrong, codes.InvalidArgument}, {"nothing", &pb.AttachRequest{}, codes.InvalidArgument}, {"too much", large, codes.ResourceExhausted},
			{"too much in a batch", batch(keepalive(s, 1), large), codes.ResourceExhausted}, {"a batch in a batch", batch(batch(keepalive(s, 1))), codes.InvalidArgument}} {
			for server, conn := range w.both() {
				a := attach(t, conn)
				if err := a.Send(c.req); err != nil {
					t.Fatal(err)
				}
				_, err := a.Recv()
				if c.req.GetBatch() != nil && err == nil {
					_, err = a.Recv() // what was before it in the batch may be answered
				}
				if status.Code(err) != c.code {
					t.Errorf("%s to the %s: %v, want %v", c.what, server, err, c.code)
				}
			}
		}
		for server, conn := range w.both() { // the end that a client wishes is none of these
			a := attach(t, conn)
			if err := a.CloseSend(); err != nil {
				t.Fatal(err)
			}
			if _, err := a.Recv(); !errors.Is(err, io.EOF) {
				t.Errorf("%s: a stream closed by its client ended with %v", server, err)
			}
		}
	})
}

// TestASessionThatAttachesElsewhereEndsItsOldStream, though its client reads
// nothing.
func TestASessionThatAttachesElsewhereEndsItsOldStream(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		s := open(t, w.leader)
		first, second := attach(t, w.leader), attach(t, w.follower)
		if err := first.Send(keepalive(s, 1)); err != nil {
			t.Fatal(err)
		}
		if _, err := first.Recv(); err != nil {
			t.Fatal(err)
		}
		if err := second.Send(keepalive(s, 1)); err != nil {
			t.Fatal(err)
		}
		if _, err := second.Recv(); err != nil {
			t.Fatal(err)
		}
		for {
			if _, err := first.Recv(); err != nil {
				if status.Code(err) != codes.Aborted {
					t.Errorf("the old stream ended with %v", err)
				}
				return
			}
		}
	})
}
