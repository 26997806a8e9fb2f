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
	"github.com/headlease/headlease/region/mux"
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

// Sessions is the SessionService: Attach on every server, the rest on the
// leader.
type Sessions struct {
	pb.UnimplementedSessionServiceServer
	Region string
	Raft   Raft
	// Edge has the streams of this server's clients.
	Edge     *mux.Edge
	Identify func(context.Context) (policy.Caller, bool)
	// Uninitialised returns this server's name until it belongs to a region's
	// group, then ""; nil: it does.
	Uninitialised func() string
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
	if err := authorize(ctx, s.Identify, s.Raft, req.GetSessionId(), req.GetSecret()); err != nil {
		return nil, err
	}
	res, err := s.Raft.Propose(ctx, &pb.Command{Kind: &pb.Command_CloseSession{CloseSession: &pb.CloseSessionCommand{SessionId: req.GetSessionId()}}})
	if err := resultError(res, err); err != nil {
		return nil, err
	}
	return &pb.CloseSessionResponse{}, nil
}

// Attach carries keepalives up, and validity, grants and withdrawals down, to and
// from whichever server leads.
func (s *Sessions) Attach(ss grpc.BidiStreamingServer[pb.AttachRequest, pb.AttachResponse]) error {
	caller, ok := s.Identify(ss.Context())
	if !ok {
		return invalid("certificate", "carries no identity; connect with a certificate of this cluster")
	}
	if s.Uninitialised != nil {
		if server := s.Uninitialised(); server != "" {
			return uninitialised(server)
		}
	}
	c, err := s.Edge.Open(caller)
	if err != nil {
		return streamError(err)
	}
	defer c.Close()
	// Both goroutines end with the stream, whose context this method's return
	// ends; that also frees a Send that waits for a client which does not read.
	received := make(chan error, 1)
	go func() { received <- receive(ss, c) }()
	sent := make(chan error, 1)
	go func() { sent <- send(ss, c) }()
	select {
	case err = <-received:
		c.Close()
		_ = drain(sent) // why the client ended is the reason that counts
	case err = <-sent:
	case <-c.Done():
		err = drain(sent)
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return streamError(err)
}

// streamError gives the end of a stream its code and text.
func streamError(err error) error {
	if e := (*mux.Error)(nil); errors.As(err, &e) {
		return fail(e.Detail)
	}
	return err
}

var errUnread = status.Error(codes.ResourceExhausted, "the client reads too slowly; attach again")

// drain waits for the sender to finish, for a while.
func drain(sent <-chan error) error {
	timer := time.NewTimer(sendGrace)
	defer timer.Stop()
	select {
	case err := <-sent:
		return err
	case <-timer.C:
		return errUnread
	}
}

func send(ss grpc.BidiStreamingServer[pb.AttachRequest, pb.AttachResponse], c *mux.Client) error {
	for {
		messages, err := c.Next(ss.Context())
		if err != nil {
			return err
		}
		if len(messages) > 1 && c.Batches() {
			messages = batches(messages)
		}
		for _, m := range messages {
			if err := ss.Send(m); err != nil {
				return err
			}
		}
	}
}

// Bounds of one batch, which must stay below gRPC's 4 MB a message: an ack names
// its leases with some 100 bytes each.
const (
	maxBatch     = 256
	maxBatchHeld = 2048
)

// batches puts messages together, in their order.
func batches(messages []*pb.AttachResponse) []*pb.AttachResponse {
	var out []*pb.AttachResponse
	for len(messages) > 0 {
		n, held := 0, 0
		for n < len(messages) && n < maxBatch && (n == 0 || held+len(messages[n].GetAck().GetHeld()) <= maxBatchHeld) {
			held += len(messages[n].GetAck().GetHeld())
			n++
		}
		m := messages[0]
		if n > 1 {
			m = &pb.AttachResponse{Kind: &pb.AttachResponse_Batch{Batch: &pb.AttachResponses{Responses: messages[:n:n]}}}
		}
		out, messages = append(out, m), messages[n:]
	}
	return out
}

func receive(ss grpc.BidiStreamingServer[pb.AttachRequest, pb.AttachResponse], c *mux.Client) error {
	for {
		req, err := ss.Recv()
		if err != nil {
			return err
		}
		if err := c.Request(req); err != nil {
			return err
		}
	}
}

// Prove returns the check of a stream's sessions, for the leader.
func Prove(raft Raft) mux.Prove {
	return func(caller policy.Caller, session string, secret []byte) (bool, error) {
		err := authenticate(raft.View(), caller, session, secret)
		var d *DetailError
		if errors.As(err, &d) && d.Detail.GetSessionExpired() != nil {
			return false, nil
		}
		return err == nil, err
	}
}

// authenticate checks that a caller may speak for a session: it shows the
// session's secret, or, without one, the identity that opened it. A secret that
// is another session's is refused whoever shows it. The comparison takes the same
// time wherever the secrets differ.
func authenticate(view state.View, caller policy.Caller, id string, secret []byte) error {
	s, ok := view.Session(id)
	if !ok {
		return sessionExpired(id)
	}
	if len(secret) == 0 {
		if caller.Role != "" && caller.Name != "" && caller.Name == s.Identity {
			return nil
		}
		return invalid("secret", "is missing, and session %s is not of %s; send the one that OpenSession returned, or connect as who opened it", id, caller.Name)
	}
	hash := sha256.Sum256(secret)
	if subtle.ConstantTimeCompare(hash[:], s.SecretHash) != 1 {
		return invalid("secret", "does not belong to session %s; use the one that OpenSession returned", id)
	}
	return nil
}

// authorize is authenticate for the caller of a call. A server that was deposed
// and does not know it knows no newer session either: that one has ended is said
// only after a leadership check, from what is known then.
func authorize(ctx context.Context, identify func(context.Context) (policy.Caller, bool), raft Raft, id string, secret []byte) error {
	caller, _ := identify(ctx) // nobody: the secret alone counts
	if _, known := raft.View().Session(id); !known {
		if _, err := raft.Check(ctx); err != nil {
			return resultError(nil, err)
		}
	}
	return authenticate(raft.View(), caller, id, secret)
}
