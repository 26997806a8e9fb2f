package mux_test

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/policy"
	"github.com/headlease/headlease/internal/regiontest"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	benchSessions = 20_000
	benchStreams  = 100
)

// talk is one client stream: as an Edge has it, or over gRPC.
type talk struct {
	send func(*pb.AttachRequest) error
	recv func() (acks int, err error)
	reqs []*pb.AttachRequest
}

// BenchmarkKeepalive is one keepalive of one of 20,000 sessions, each with a
// lease, on 100 streams, until its ack has come, in time and in processor time: taken by the Edge of the leader
// itself, over gRPC to the leader, and over gRPC to a follower that carries it to
// the leader. What the client does is in it; the network is memory. Each session
// sends its next one when the one before is acknowledged.
func BenchmarkKeepalive(b *testing.B) {
	for _, way := range []string{"edge", "leader", "follower"} {
		b.Run(way, func(b *testing.B) {
			n := regiontest.NewNetwork(b)
			r := n.Region(regiontest.Config{Name: "eu"})
			r.Own(1)
			ctx, cancel := context.WithCancel(b.Context())
			talks := make([]*talk, benchStreams)
			for i := range talks {
				talks[i] = newTalk(b, ctx, n, r, way)
			}
			for i := range benchSessions {
				addSession(b, r, talks[i%benchStreams], i)
			}
			round := func(total int) {
				var all sync.WaitGroup
				for i, t := range talks {
					all.Go(func() { t.round(b, total/benchStreams+min(1, max(0, total%benchStreams-i))) })
				}
				all.Wait()
			}
			round(benchSessions) // attached
			b.ReportAllocs()
			b.ResetTimer()
			began := cpu(b)
			for left := b.N; left > 0; left -= benchSessions {
				round(min(left, benchSessions))
			}
			b.StopTimer()
			b.ReportMetric(float64(cpu(b)-began)/float64(b.N), "cpu-ns/op")
			cancel()
		})
	}
}

// cpu is the processor time of this process so far.
func cpu(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// round sends one keepalive each of n sessions and waits for their acks.
func (t *talk) round(b *testing.B, n int) {
	got := make(chan error, 1)
	go func() {
		for acks := 0; acks < n; {
			k, err := t.recv()
			if err != nil {
				got <- err
				return
			}
			acks += k
		}
		got <- nil
	}()
	for _, req := range t.reqs[:n] {
		req.GetKeepalive().Sequence++
		if err := t.send(req); err != nil {
			b.Error(err)
			return
		}
	}
	if err := <-got; err != nil {
		b.Error(err)
	}
}

func newTalk(b *testing.B, ctx context.Context, n *regiontest.Network, r *regiontest.Region, way string) *talk {
	b.Helper()
	count := func(m *pb.AttachResponse) int {
		if m.GetAck() != nil {
			return 1
		}
		return 0
	}
	if way == "edge" {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for r.Server(0).Edge().Term() == 0 { // until the server has found itself to lead
			<-tick.C
		}
		c, err := r.Server(0).Edge().Open(policy.Caller{Role: policy.Client, Name: "client/a"})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(c.Close)
		return &talk{
			// The Edge keeps what it is given.
			send: func(m *pb.AttachRequest) error {
				k := m.GetKeepalive()
				return c.Request(&pb.AttachRequest{Kind: &pb.AttachRequest_Keepalive{Keepalive: &pb.Keepalive{
					SessionId: k.GetSessionId(), Sequence: k.GetSequence(), TokensHash: k.GetTokensHash(),
				}}})
			},
			recv: func() (acks int, err error) {
				messages, err := c.Next(ctx)
				for _, m := range messages {
					acks += count(m)
				}
				return acks, err
			},
		}
	}
	server := map[string]string{"leader": "eu-1", "follower": "eu-2"}[way]
	conn, err := n.Links("a").DialGRPC(link.PlaneAPI, link.Peer{Address: server})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = conn.Close() })
	var a grpc.BidiStreamingClient[pb.AttachRequest, pb.AttachResponse]
	if a, err = pb.NewSessionServiceClient(conn).Attach(ctx); err != nil {
		b.Fatal(err)
	}
	return &talk{send: a.Send, recv: func() (int, error) {
		m, err := a.Recv()
		return count(m), err
	}}
}

// addSession opens a session with one lease.
func addSession(b *testing.B, r *regiontest.Region, t *talk, i int) {
	b.Helper()
	id, lock := fmt.Sprintf("%032x", i), fmt.Sprintf("lock/%d", i)
	propose := func(c *pb.Command) *pb.CommandResult {
		res, err := r.Propose(b.Context(), c)
		if err != nil || res.GetError() != nil {
			b.Fatal(err, res)
		}
		return res
	}
	propose(&pb.Command{Kind: &pb.Command_OpenSession{OpenSession: &pb.OpenSessionCommand{
		SessionId: id, SecretHash: make([]byte, 32), TtlMs: 600_000, Identity: "client/a",
	}}})
	granted := propose(&pb.Command{Kind: &pb.Command_Acquire{Acquire: &pb.AcquireCommand{
		SessionId: id, RequestId: 1, Resource: lock, Partition: regiontest.Partition, Epoch: 1,
	}}}).GetAcquire().GetGranted()
	t.reqs = append(t.reqs, &pb.AttachRequest{Kind: &pb.AttachRequest_Keepalive{Keepalive: &pb.Keepalive{
		SessionId: id, TokensHash: validity.TokenHash(lock, fence.Token(granted.GetToken())),
	}}})
}
