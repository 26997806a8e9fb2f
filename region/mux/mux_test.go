package mux_test

import (
	"errors"
	"fmt"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/regiontest"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/mux"
)

type world struct {
	t       *testing.T
	network *regiontest.Network
	region  *regiontest.Region
}

func inWorld(t *testing.T, f func(t *testing.T, w *world)) {
	synctest.Test(t, func(t *testing.T) {
		n := regiontest.NewNetwork(t)
		w := &world{t: t, network: n, region: n.Region(regiontest.Config{Name: "eu"})}
		w.region.Own(1)
		f(t, w)
	})
}

func (w *world) dial(name string, server int) *grpc.ClientConn {
	w.t.Helper()
	c, err := w.network.Links(name).DialGRPC(link.PlaneAPI, link.Peer{Address: w.region.Server(server).Name()})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Close() })
	return c
}

// stream is a client's Attach stream with one session of its own.
type stream struct {
	t       *testing.T
	attach  grpc.BidiStreamingClient[pb.AttachRequest, pb.AttachResponse]
	session *pb.OpenSessionResponse
	seq     uint64
	// hash of what it says to hold.
	hash uint64
}

func (w *world) attach(conn *grpc.ClientConn) *stream {
	w.t.Helper()
	s, err := pb.NewSessionServiceClient(conn).OpenSession(w.t.Context(), &pb.OpenSessionRequest{TtlMs: 10_000})
	if err != nil {
		w.t.Fatal(err)
	}
	a, err := pb.NewSessionServiceClient(conn).Attach(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	out := &stream{t: w.t, attach: a, session: s}
	out.keepalive()
	out.ack(1)
	return out
}

func (s *stream) keepalive() {
	s.t.Helper()
	s.seq++
	if err := s.attach.Send(&pb.AttachRequest{Kind: &pb.AttachRequest_Keepalive{Keepalive: &pb.Keepalive{
		SessionId: s.session.GetSessionId(), Secret: s.session.GetSecret(), Sequence: s.seq, TokensHash: s.hash,
	}}}); err != nil && !errors.Is(err, io.EOF) {
		s.t.Fatal(err)
	}
}

// ack reads to the next ack of a sequence.
func (s *stream) ack(sequence uint64) *pb.AttachResponse {
	s.t.Helper()
	for {
		m, err := s.attach.Recv()
		if err != nil {
			s.t.Fatalf("the stream ended before the ack of %d: %v", sequence, err)
		}
		if m.GetAck().GetSequence() == sequence {
			return m
		}
	}
}

// end reads to the stream's end.
func (s *stream) end() error {
	for {
		if _, err := s.attach.Recv(); err != nil {
			return err
		}
	}
}

// TestF41AFrozenLeaderIsLeft for the next one, before any client has noticed.
func TestF41AFrozenLeaderIsLeft(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		s := w.attach(w.dial("a", 1))
		w.region.Server(0).Freeze()
		time.Sleep(300 * time.Millisecond) // virtual
		begin := time.Now()
		w.region.Elect(2)
		if m := s.ack(1); m.GetTerm() != 2 || !m.GetAck().GetComplete() {
			t.Errorf("the next leader begins with %v", m)
		}
		if took := time.Since(begin); took > 200*time.Millisecond {
			t.Errorf("it took %v", took)
		}
		s.keepalive()
		s.ack(2)
	})
}

// TestF41AFrozenLeaderWithoutASuccessor: the server ends its clients' streams by
// itself, when nothing is heard on the mux and then nobody leads for a while.
func TestF41AFrozenLeaderWithoutASuccessor(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		s := w.attach(w.dial("a", 1))
		begin := time.Now()
		w.region.Server(0).Freeze()
		err := s.end()
		if status.Code(err) != codes.Unavailable {
			t.Errorf("the stream ended with %v", err)
		}
		if took := time.Since(begin); took < mux.DefaultSilence || took > mux.DefaultSilence+mux.DefaultHold+time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

// TestL5AMuxThatBreaksWithinATermEndsTheStreams, and only those to which
// something of that term was passed on.
func TestL5AMuxThatBreaksWithinATermEndsTheStreams(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		conn := w.dial("a", 1)
		s := w.attach(conn)
		fresh, err := pb.NewSessionServiceClient(conn).Attach(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		direct := w.attach(w.dial("b", 2))
		w.region.Server(0).Kill() // its connections break
		w.region.Server(0).Start()
		for name, s := range map[string]*stream{"one follower": s, "another": direct} {
			if err := s.end(); status.Code(err) != codes.Unavailable {
				t.Errorf("%s: the stream ended with %v", name, err)
			}
		}
		// One that has heard nothing goes on, in the same term.
		next := &stream{t: t, attach: fresh, session: s.session, seq: 5}
		next.keepalive()
		if m := next.ack(6); m.GetTerm() != 1 || !m.GetAck().GetComplete() {
			t.Errorf("%v", m)
		}
	})
}

// TestF41ASlowClientIsEndedAlone: the others of its server go on meanwhile.
func TestF41ASlowClientIsEndedAlone(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		slow, quick := w.attach(w.dial("slow", 1)), w.attach(w.dial("quick", 1))
		sent := make(chan struct{})
		go func() { // slow reads nothing, and in the end nobody takes what it sends
			defer close(sent)
			slow.hash = 1 // which nobody holds: so that each one is answered at once
			for range 13_000 {
				slow.keepalive()
				time.Sleep(10 * time.Millisecond) // virtual
			}
		}()
		for range 150 {
			time.Sleep(time.Second) // virtual
			quick.keepalive()
			quick.ack(quick.seq)
		}
		if err := slow.end(); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("the slow client's stream ended with %v", err)
		}
		<-sent
		quick.keepalive()
		quick.ack(quick.seq)
	})
}

// TestOnlyServersOfTheRegionCarry.
func TestOnlyServersOfTheRegionCarry(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.network.Region(regiontest.Config{Name: "us"})
		hello := func(conn *grpc.ClientConn, kv ...string) (*pb.CarryResponse, error) {
			ctx := metadata.AppendToOutgoingContext(t.Context(), kv...)
			c, err := pb.NewMuxServiceClient(conn).Carry(ctx)
			if err != nil {
				return nil, err
			}
			return c.Recv()
		}
		claim := []string{"headlease-forwarded-role", "region", "headlease-forwarded-name", "region/eu/eu-2"}
		for name, kv := range map[string][]string{"a client": nil, "a client that claims to be a server": claim} {
			if _, err := hello(w.dial("mallory", 0), kv...); status.Code(err) != codes.PermissionDenied {
				t.Errorf("%s: %v", name, err)
			}
		}
		us, err := w.network.ServerLinks("us", "us-1").DialGRPC(link.PlaneAPI, link.Peer{Address: "eu-1"})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = us.Close() }()
		for name, kv := range map[string][]string{"another region": nil, "another region that claims": claim} {
			if _, err := hello(us, kv...); status.Code(err) != codes.PermissionDenied {
				t.Errorf("%s: %v", name, err)
			}
		}
		eu, err := w.network.ServerLinks("eu", "eu-2").DialGRPC(link.PlaneAPI, link.Peer{Address: "eu-1"})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = eu.Close() }()
		if h, err := hello(eu); err != nil || h.GetHello().GetTerm() != 1 {
			t.Errorf("a server of the region: %v %v", h, err)
		}
		follower, err := w.network.ServerLinks("eu", "eu-1").DialGRPC(link.PlaneAPI, link.Peer{Address: "eu-2"})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = follower.Close() }()
		w.region.Depose()
		if _, err := hello(eu); status.Code(err) != codes.Unavailable {
			t.Errorf("nobody leads: %v", err)
		}
	})
}

// TestALeaderTakesOnlyClientsStreams: a server vouches for clients and admins.
func TestALeaderTakesOnlyClientsStreams(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		eu, err := w.network.ServerLinks("eu", "eu-2").DialGRPC(link.PlaneAPI, link.Peer{Address: "eu-1"})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = eu.Close() }()
		c, err := pb.NewMuxServiceClient(eu).Carry(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Recv(); err != nil {
			t.Fatal(err)
		}
		open := func(id uint64, role string) *pb.MuxUp {
			return &pb.MuxUp{Stream: id, Kind: &pb.MuxUp_Open{Open: &pb.MuxOpen{Role: role, Name: role + "/x"}}}
		}
		if err := c.Send(&pb.CarryRequest{Frames: []*pb.MuxUp{open(1, "witness"), open(2, "client")}}); err != nil {
			t.Fatal(err)
		}
		m, err := c.Recv()
		if err != nil || len(m.GetFrames()) != 1 || m.GetFrames()[0].GetStreams()[0] != 1 ||
			codes.Code(m.GetFrames()[0].GetEnded().GetCode()) != codes.PermissionDenied {
			t.Errorf("%v %v", m, err)
		}
		for name, bad := range map[string]*pb.MuxUp{"a number used twice": open(2, "client"), "no kind": {Stream: 9}} {
			c, err := pb.NewMuxServiceClient(eu).Carry(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Recv(); err != nil {
				t.Fatal(err)
			}
			if err := c.Send(&pb.CarryRequest{Frames: []*pb.MuxUp{open(2, "client"), bad}}); err != nil {
				t.Fatal(err)
			}
			for err = nil; err == nil; {
				_, err = c.Recv()
			}
			if status.Code(err) != codes.InvalidArgument {
				t.Errorf("%s: the mux ended with %v", name, err)
			}
		}
	})
}

// TestF41ManyStreamsFollowManyLeaders: whatever leaders come and go, a stream
// lives, its terms rise, and each begins with a complete ack.
func TestF41ManyStreamsFollowManyLeaders(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		var streams []*stream
		for i := range 60 {
			streams = append(streams, w.attach(w.dial(fmt.Sprint("c", i), i%3)))
		}
		for k, leader := range []int{1, 2, 2, 0, 1, 0} {
			w.region.Elect(leader)
			if k%2 == 1 { // two in one moment
				w.region.Elect((leader + 1) % 3)
			}
			for i, s := range streams {
				s.keepalive()
				m := s.ack(s.seq)
				if got := m.GetTerm(); got < uint64(k+2) {
					t.Fatalf("stream %d: acknowledged in term %d after %d elections", i, got, k+1)
				}
			}
		}
	})
}
