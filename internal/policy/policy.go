// Package policy is the rule of every gRPC method: how long a call may take,
// how large its request may be, and who may call it. One table per server says
// it all, and a served method without an entry stops the start (Check), so
// that nothing is open by oversight.
package policy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Role is what a certificate makes its bearer.
type Role = pki.Role

// Roles.
const (
	Region  = pki.RoleRegion
	Witness = pki.RoleWitness
	Client  = pki.RoleClient
	Admin   = pki.RoleAdmin
)

// Everyone is every role there is: a valid certificate is still needed.
func Everyone() []Role { return []Role{Region, Witness, Client, Admin} }

// NoDeadline is the explicit choice of a call that lasts as long as its caller
// wants: a stream, or a wait.
const NoDeadline time.Duration = -1

// Rule is one method's entry.
type Rule struct {
	// Deadline ends the call even if the caller gave a later one or none;
	// NoDeadline: it does not.
	Deadline time.Duration
	// MaxRequestBytes bounds each request message.
	MaxRequestBytes int
	// Roles that may call it.
	Roles []Role
}

func (r Rule) validate(method string) error {
	var errs []error
	if r.Deadline <= 0 && r.Deadline != NoDeadline {
		errs = append(errs, fmt.Errorf("%s: deadline: set one, or NoDeadline", method))
	}
	if r.MaxRequestBytes <= 0 {
		errs = append(errs, fmt.Errorf("%s: max request bytes: must be positive", method))
	}
	if len(r.Roles) == 0 {
		errs = append(errs, fmt.Errorf("%s: roles: name who may call it", method))
	}
	return errors.Join(errs...)
}

// Table holds the rules by full method name ("/package.Service/Method").
type Table map[string]Rule

// Merge returns the rules of both; o wins where both have one.
func (t Table) Merge(o Table) Table {
	out := maps.Clone(t)
	maps.Copy(out, o)
	return out
}

// MaxRequestBytes is the largest limit of the table, for
// grpc.MaxRecvMsgSize: the transport refuses what no method would take.
func (t Table) MaxRequestBytes() int {
	largest := 0
	for _, r := range t {
		largest = max(largest, r.MaxRequestBytes)
	}
	return largest
}

// Caller is who a call comes from.
type Caller struct {
	Role Role
	// Name is for messages: "region/eu/eu-1".
	Name string
}

// ByConnection is the caller that the call's connection proves to be.
func ByConnection(ctx context.Context) (Caller, bool) {
	role, path, ok := link.PeerCaller(ctx)
	return Caller{Role: role, Name: path}, ok
}

// Enforcer applies a table.
type Enforcer struct {
	Table Table
	// Identify tells who calls (ByConnection, or what a forwarding server
	// vouches for); false: nobody that may call anything.
	Identify func(context.Context) (Caller, bool)
}

// Check returns an error that names every method served by server without a
// complete rule. Call it after the services are registered, before serving.
func (e *Enforcer) Check(server *grpc.Server) error {
	var errs []error
	info := server.GetServiceInfo()
	for _, service := range slices.Sorted(maps.Keys(info)) {
		for _, m := range info[service].Methods {
			full := "/" + service + "/" + m.Name
			rule, ok := e.Table[full]
			if !ok {
				errs = append(errs, fmt.Errorf("%s: served without a rule; add it to the policy table", full))
				continue
			}
			if err := rule.validate(full); err != nil {
				errs = append(errs, err)
			}
			if m.IsClientStream && rule.Deadline != NoDeadline {
				errs = append(errs, fmt.Errorf("%s: deadline: a client stream needs NoDeadline", full))
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("policy: %w", err)
	}
	return nil
}

// ServerOptions are the interceptors and the transport's size limit.
func (e *Enforcer) ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(e.Table.MaxRequestBytes()),
		grpc.ChainUnaryInterceptor(e.Unary),
		grpc.ChainStreamInterceptor(e.stream),
	}
}

// Unary is the interceptor for unary calls, one of ServerOptions.
func (e *Enforcer) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	rule, err := e.admit(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	if err := checkSize(info.FullMethod, rule, req); err != nil {
		return nil, err
	}
	if rule.Deadline != NoDeadline {
		if at, ok := ctx.Deadline(); !ok || time.Until(at) > rule.Deadline {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, rule.Deadline)
			defer cancel()
		}
	}
	return handler(ctx, req)
}

func (e *Enforcer) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	rule, err := e.admit(ss.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	limited := &limitedStream{ServerStream: ss, ctx: ss.Context(), method: info.FullMethod, rule: rule}
	if rule.Deadline != NoDeadline {
		var cancel context.CancelFunc
		limited.ctx, cancel = context.WithTimeout(limited.ctx, rule.Deadline)
		defer cancel()
	}
	return handler(srv, limited)
}

// limitedStream holds each message of a stream to the size limit.
type limitedStream struct {
	grpc.ServerStream
	ctx    context.Context
	method string
	rule   Rule
}

func (s *limitedStream) Context() context.Context { return s.ctx }

func (s *limitedStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	return checkSize(s.method, s.rule, m)
}

func (e *Enforcer) admit(ctx context.Context, method string) (Rule, error) {
	rule, ok := e.Table[method]
	if !ok { // Check makes this impossible for a served method
		return Rule{}, status.Errorf(codes.Unimplemented, "%s has no rule here", method)
	}
	caller, ok := e.Identify(ctx)
	if !ok {
		return Rule{}, status.Errorf(codes.Unauthenticated, "%s: the caller has no identity; connect with a certificate of this cluster", method)
	}
	if !slices.Contains(rule.Roles, caller.Role) {
		return Rule{}, status.Errorf(codes.PermissionDenied, "%s may not call %s; use a certificate of role %s", caller.Name, method, roleList(rule.Roles))
	}
	return rule, nil
}

func roleList(roles []Role) string {
	names := make([]string, len(roles))
	for i, r := range roles {
		names[i] = string(r)
	}
	return strings.Join(names, " or ")
}

func checkSize(method string, rule Rule, req any) error {
	m, ok := req.(proto.Message)
	if !ok {
		return nil
	}
	size := proto.Size(m)
	if size <= rule.MaxRequestBytes {
		return nil
	}
	st := status.Newf(codes.ResourceExhausted, "%s: the request has %d bytes; at most %d are allowed, send less at once", method, size, rule.MaxRequestBytes)
	detail := &pb.ErrorDetail{Kind: &pb.ErrorDetail_Invalid{Invalid: &pb.Invalid{
		Field: "request", Remedy: fmt.Sprintf("send at most %d bytes at once", rule.MaxRequestBytes),
	}}}
	if with, err := st.WithDetails(detail); err == nil {
		st = with
	}
	return st.Err()
}
