package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Forwarded calls carry the caller's identity from the server that took the
// call to the leader. Only a server of the same region is believed.
const (
	roleKey = "headlease-forwarded-role"
	nameKey = "headlease-forwarded-name"
)

// Identify returns who a call is from: the certificate's bearer, or for a call
// forwarded by a server of the same region, its original caller.
func Identify(region string, direct func(context.Context) (policy.Caller, bool)) func(context.Context) (policy.Caller, bool) {
	return func(ctx context.Context) (policy.Caller, bool) {
		caller, ok := direct(ctx)
		if !ok || caller.Role != policy.Region || regionOf(caller) != region {
			return caller, ok
		}
		md, _ := metadata.FromIncomingContext(ctx)
		role, name := md.Get(roleKey), md.Get(nameKey)
		switch {
		case len(role) == 0 && len(name) == 0:
			return caller, true
		case len(role) != 1 || len(name) != 1:
			return policy.Caller{}, false
		}
		return policy.Caller{Role: policy.Role(role[0]), Name: name[0]}, true
	}
}

// regionOf returns the region of a caller named "region/REGION/SERVER".
func regionOf(c policy.Caller) string {
	parts := strings.Split(c.Name, "/")
	if c.Role != policy.Region || len(parts) != 3 {
		return ""
	}
	return parts[1]
}

// Forwarder sends calls that only the leader can answer on to it, once: a call
// that was forwarded to a server which no longer leads fails with NOT_LEADER
// and the caller asks again.
type Forwarder struct {
	// Leader returns the leader as this server knows it, and whether it is this
	// one and ready.
	Leader func() (name string, ready bool)
	// Conn returns the connection to another server of the region, on the plane
	// that the calls came in on. It must not wait.
	Conn func(server string) (*grpc.ClientConn, error)
	// Uninitialised returns this server's name until it belongs to a region's
	// group, then ""; nil: it does.
	Uninitialised func() string
	// Failed is why this server stops, once its store has failed; nil: it never does.
	Failed func() error
	// Identify returns who a call is from.
	Identify func(context.Context) (policy.Caller, bool)
	// Local are the methods that every server answers itself.
	Local map[string]bool

	mu   sync.Mutex
	away map[*forwarded]struct{}
}

// forwarded is a call on its way to the leader.
type forwarded struct {
	to   string
	stop context.CancelCauseFunc
}

// errLedByAnother ends calls on their way to a leader of before.
var errLedByAnother = errors.New("another server leads the region now")

// send notes a call to the leader, until done is called.
func (f *Forwarder) send(ctx context.Context, leader string) (out context.Context, done func()) {
	out, stop := context.WithCancelCause(ctx)
	call := &forwarded{leader, stop}
	f.mu.Lock()
	if f.away == nil {
		f.away = map[*forwarded]struct{}{}
	}
	f.away[call] = struct{}{}
	f.mu.Unlock()
	// LedBy may have gone by since the leader was asked for.
	if now, _ := f.Leader(); now != "" && now != leader {
		stop(errLedByAnother)
	}
	return out, func() {
		f.mu.Lock()
		delete(f.away, call)
		f.mu.Unlock()
		stop(nil)
	}
}

// LedBy says which server begins to lead. Calls on their way to another one are
// answered with WRONG_TERM, their outcome unknown: a leader that hangs would hold
// them until their own limits. It does not wait.
func (f *Forwarder) LedBy(server string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for call := range f.away {
		if call.to != server {
			call.stop(errLedByAnother)
		}
	}
}

// target returns the connection to the leader, nil when this server leads.
func (f *Forwarder) target(ctx context.Context) (conn *grpc.ClientConn, leader string, err error) {
	leader, ready := f.Leader()
	if ready {
		return nil, leader, nil
	}
	if leader == "" && f.Uninitialised != nil {
		if server := f.Uninitialised(); server != "" {
			return nil, "", uninitialised(server)
		}
	}
	if leader == "" && f.Failed != nil {
		if failed := f.Failed(); failed != nil {
			return nil, "", stops(failed)
		}
	}
	// A client that claims to be forwarded only harms itself.
	if md, _ := metadata.FromIncomingContext(ctx); leader == "" || len(md.Get(roleKey)) > 0 {
		return nil, "", notLeader(leader)
	}
	if conn, err = f.Conn(leader); err != nil {
		return nil, "", status.Errorf(codes.Unavailable, "cannot reach the region's leader %s: %v", leader, err)
	}
	return conn, leader, nil
}

// outgoing is the context of a forwarded call: deadline and cancellation of
// the original, and its caller's identity.
func (f *Forwarder) outgoing(ctx context.Context) (context.Context, error) {
	caller, ok := f.Identify(ctx)
	if !ok {
		return nil, status.Error(codes.Unauthenticated, "the caller has no identity; connect with a certificate of this cluster")
	}
	return metadata.NewOutgoingContext(ctx, metadata.Pairs(roleKey, string(caller.Role), nameKey, caller.Name)), nil
}

// Unary is the server interceptor for unary calls.
func (f *Forwarder) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if f.Local[info.FullMethod] {
		return handler(ctx, req)
	}
	conn, leader, err := f.target(ctx)
	if err != nil {
		return nil, err
	}
	if conn == nil {
		return handler(ctx, req)
	}
	reply, err := newReply(info.FullMethod)
	if err != nil {
		return nil, err
	}
	out, done := f.send(ctx, leader) // first: a child of a call's own context costs no goroutine
	defer done()
	out, err = f.outgoing(out)
	if err != nil {
		return nil, err
	}
	if err := conn.Invoke(out, info.FullMethod, req, reply); err != nil {
		if ctx.Err() == nil && errors.Is(context.Cause(out), errLedByAnother) {
			return nil, fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_WrongTerm{WrongTerm: &pb.WrongTerm{}}})
		}
		return nil, err
	}
	return reply, nil
}

// Stream is the server interceptor for streams: messages pass in order in both
// directions, and the caller's stream ends when the one to the leader does
// [L5].
func (f *Forwarder) Stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if f.Local[info.FullMethod] {
		return handler(srv, ss)
	}
	conn, _, err := f.target(ss.Context())
	if err != nil {
		return err
	}
	if conn == nil {
		return handler(srv, ss)
	}
	method, err := findMethod(info.FullMethod)
	if err != nil {
		return err
	}
	ctx, err := f.outgoing(ss.Context())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	desc := &grpc.StreamDesc{ServerStreams: info.IsServerStream, ClientStreams: info.IsClientStream}
	up, err := conn.NewStream(ctx, desc, info.FullMethod)
	if err != nil {
		return err
	}
	refused := make(chan error, 1)
	go func() { // ends with the caller's stream, whose context this handler's return ends
		err := pipe(ss.RecvMsg, up.SendMsg, method.Input())
		if errors.Is(err, io.EOF) { // the caller has said all, or the leader hears no more
			_ = up.CloseSend()
			return
		}
		refused <- err
		cancel()
	}()
	err = pipe(up.RecvMsg, ss.SendMsg, method.Output())
	select {
	case err := <-refused: // what the caller sent was refused here, or the caller is gone
		return err
	default:
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// pipe moves messages until either side fails; io.EOF when from ended well.
func pipe(recv, send func(any) error, desc protoreflect.MessageDescriptor) error {
	for {
		m, err := newMessage(desc)
		if err != nil {
			return err
		}
		if err := recv(m); err != nil {
			return err
		}
		if err := send(m); err != nil {
			return err
		}
	}
}

func newReply(fullMethod string) (proto.Message, error) {
	m, err := findMethod(fullMethod)
	if err != nil {
		return nil, err
	}
	return newMessage(m.Output())
}

// findMethod looks "/package.Service/Method" up among the linked descriptors.
func findMethod(fullMethod string) (protoreflect.MethodDescriptor, error) {
	name := protoreflect.FullName("")
	if len(fullMethod) > 1 {
		name = protoreflect.FullName(strings.Replace(fullMethod[1:], "/", ".", 1))
	}
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if err != nil {
		return nil, status.Errorf(codes.Unimplemented, "%s: unknown method", fullMethod)
	}
	m, ok := d.(protoreflect.MethodDescriptor)
	if !ok {
		return nil, status.Errorf(codes.Unimplemented, "%s: not a method", fullMethod)
	}
	return m, nil
}

func newMessage(desc protoreflect.MessageDescriptor) (proto.Message, error) {
	t, err := protoregistry.GlobalTypes.FindMessageByName(desc.FullName())
	if err != nil {
		return nil, fmt.Errorf("message %s: %w", desc.FullName(), err)
	}
	return t.New().Interface(), nil
}
