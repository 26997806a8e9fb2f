package api

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor/run"
	"github.com/headlease/headlease/region/state"
)

// Bounds of a session.
const (
	DefaultTTL = 10 * time.Second
	MinTTL     = 500 * time.Millisecond
	MaxTTL     = 10 * time.Minute

	secretBytes    = 16
	maxLabels      = 32
	maxLabelLength = 256

	// maxProven bounds the sessions that a stream has remembered as proven; then
	// each shows its secret once more.
	maxProven = 10_000
	// sendGrace is how long a stream that has ended may take to send what was
	// queued before. A client that does not read holds a Send for ever.
	sendGrace = time.Second
)

// Raft is what the services need of the replica.
type Raft interface {
	Propose(ctx context.Context, cmd *pb.Command) (*pb.CommandResult, error)
	ProposeUrgent(ctx context.Context, cmd *pb.Command) (*pb.CommandResult, error)
	Check(ctx context.Context) (term uint64, err error)
	View() state.View
}

// Sessions is the SessionService on the leader.
type Sessions struct {
	pb.UnimplementedSessionServiceServer
	Region   string
	Raft     Raft
	Lessor   *run.Shell
	Identify func(context.Context) (policy.Caller, bool)
}

// OpenSession commits a new session.
func (s *Sessions) OpenSession(ctx context.Context, req *pb.OpenSessionRequest) (*pb.OpenSessionResponse, error) {
	ttl := time.Duration(req.GetTtlMs()) * time.Millisecond
	if ttl == 0 {
		ttl = DefaultTTL
	}
	if req.GetTtlMs() < 0 || req.GetTtlMs() > MaxTTL.Milliseconds() || ttl < MinTTL {
		return nil, invalid("ttl_ms", "%d is out of range; choose %d to %d, or 0 for the default of %d",
			req.GetTtlMs(), MinTTL.Milliseconds(), MaxTTL.Milliseconds(), DefaultTTL.Milliseconds())
	}
	if len(req.GetLabels()) > maxLabels {
		return nil, invalid("labels", "%d are given; at most %d are kept", len(req.GetLabels()), maxLabels)
	}
	for k, v := range req.GetLabels() {
		if k == "" || len(k) > maxLabelLength || len(v) > maxLabelLength {
			return nil, invalid("labels", "key and value must have at most %d bytes, and a key at least 1", maxLabelLength)
		}
	}
	caller, ok := s.Identify(ctx)
	if !ok {
		return nil, invalid("certificate", "carries no identity; connect with a certificate of this cluster")
	}
	id, secret := make([]byte, secretBytes), make([]byte, secretBytes)
	_, _ = rand.Read(id) // never fails
	_, _ = rand.Read(secret)
	hash := sha256.Sum256(secret)
	session := hex.EncodeToString(id)
	res, err := s.Raft.Propose(ctx, &pb.Command{Kind: &pb.Command_OpenSession{OpenSession: &pb.OpenSessionCommand{
		SessionId: session, SecretHash: hash[:], TtlMs: ttl.Milliseconds(), Identity: caller.Name, Labels: req.GetLabels(),
	}}})
	if err := resultError(res, err); err != nil {
		return nil, err
	}
	return &pb.OpenSessionResponse{SessionId: session, Secret: secret, TtlMs: ttl.Milliseconds(), Region: s.Region}, nil
}

// CloseSession ends a session and gives back all that it holds or waits for.
func (s *Sessions) CloseSession(ctx context.Context, req *pb.CloseSessionRequest) (*pb.CloseSessionResponse, error) {
	if err := authenticate(s.Raft.View(), req.GetSessionId(), req.GetSecret()); err != nil {
		return nil, err
	}
	res, err := s.Raft.Propose(ctx, &pb.Command{Kind: &pb.Command_CloseSession{CloseSession: &pb.CloseSessionCommand{SessionId: req.GetSessionId()}}})
	if err := resultError(res, err); err != nil {
		return nil, err
	}
	return &pb.CloseSessionResponse{}, nil
}

// Attach carries keepalives up, and validity, grants and withdrawals down.
func (s *Sessions) Attach(ss grpc.BidiStreamingServer[pb.AttachRequest, pb.AttachResponse]) error {
	stream, err := s.Lessor.Attach()
	if err != nil {
		return notLeader("")
	}
	defer stream.Close()
	// Both goroutines end with the stream, whose context this method's return
	// ends; that also frees a Send that waits for a client which does not read.
	received := make(chan error, 1)
	go func() { received <- s.receive(ss, stream) }()
	sent := make(chan error, 1)
	go func() { sent <- send(ss, stream) }()
	select {
	case err = <-received:
		stream.Close()
		_ = drain(sent) // why the client ended is the reason that counts
	case err = <-sent:
	case <-stream.Done():
		err = drain(sent)
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	switch {
	case errors.Is(err, run.ErrNotLeading):
		return notLeader("")
	case errors.Is(err, run.ErrSlow):
		return status.Error(codes.ResourceExhausted, err.Error())
	case errors.Is(err, run.ErrDetached):
		return status.Error(codes.Aborted, err.Error())
	}
	return err
}

// drain waits for the sender to finish, for a while.
func drain(sent <-chan error) error {
	timer := time.NewTimer(sendGrace)
	defer timer.Stop()
	select {
	case err := <-sent:
		return err
	case <-timer.C:
		return run.ErrSlow
	}
}

func send(ss grpc.BidiStreamingServer[pb.AttachRequest, pb.AttachResponse], stream *run.Stream) error {
	for {
		messages, err := stream.Next(ss.Context())
		if err != nil {
			return err
		}
		for _, m := range messages {
			if err := ss.Send(m); err != nil {
				return err
			}
		}
	}
}

func (s *Sessions) receive(ss grpc.BidiStreamingServer[pb.AttachRequest, pb.AttachResponse], stream *run.Stream) error {
	proven := map[string]bool{} // sessions whose secret this stream has shown
	for {
		req, err := ss.Recv()
		if err != nil {
			return err
		}
		switch k := req.GetKind().(type) {
		case *pb.AttachRequest_Keepalive:
			id := k.Keepalive.GetSessionId()
			if !proven[id] {
				// The lessor says, after a leadership check, that an unknown session
				// has ended; only a wrong secret is refused here.
				err := authenticate(s.Raft.View(), id, k.Keepalive.GetSecret())
				var detail *DetailError
				switch {
				case err == nil:
					if len(proven) >= maxProven {
						clear(proven)
					}
					proven[id] = true
				case errors.As(err, &detail) && detail.Detail.GetSessionExpired() != nil:
				default:
					return err
				}
			}
			stream.Keepalive(k.Keepalive)
		case *pb.AttachRequest_Detach:
			if proven[k.Detach.GetSessionId()] {
				stream.Detach(k.Detach.GetSessionId())
				delete(proven, k.Detach.GetSessionId())
			}
		default:
			return invalid("kind", "is missing; send a keepalive or a detach")
		}
	}
}

// authenticate checks a session's secret in constant time.
func authenticate(view state.View, id string, secret []byte) error {
	s, ok := view.Session(id)
	if !ok {
		return sessionExpired(id)
	}
	hash := sha256.Sum256(secret)
	if subtle.ConstantTimeCompare(hash[:], s.SecretHash) != 1 {
		return invalid("secret", "does not belong to session %s; use the one that OpenSession returned", id)
	}
	return nil
}
