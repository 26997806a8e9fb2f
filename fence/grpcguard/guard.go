// Package grpcguard is a fence guard for gRPC services: a call names the resource it works on
// and its fencing token in its metadata, and one with a token lower than one seen before is
// refused.
//
// # Protocol
//
//	fencing-resource: orders/7
//	fencing-token: 4294967297
//	fencing-claim: true          (a new holder's first call)
//
// A claim raises the mark and waits until handlers of lower tokens have ended, whose
// contexts end if the store can tell them; then the call is handled as any other. A stale
// token (fence.StaleError) and a resource that nobody claimed (fence.UnclaimedError) are
// FAILED_PRECONDITION with a google.rpc.ErrorInfo; Refusal reads them. A stream is
// one effect: its token counts from its begin to its end.
//
// What is guaranteed is what the store of marks guarantees. Several processes that serve the same
// resources need one that is shared; New refuses any other.
package grpcguard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/markstore"
)

// Keys of a call's metadata.
const (
	KeyToken    = "fencing-token"
	KeyResource = "fencing-resource"
	KeyClaim    = "fencing-claim"
)

// Domain and reasons of the ErrorInfo of a refusal.
const (
	Domain          = "headlease"
	reasonStale     = "STALE_TOKEN"
	reasonUnclaimed = "UNCLAIMED"
)

// Config of a Guard.
type Config struct {
	// Store of the marks.
	Store markstore.Store
	// Replicas is how many processes serve the same resources, this one included. Needed.
	Replicas int
	// Guarded says which methods ("/package.Service/Method") are; default: all of them, health
	// checks and reflection included, so mostly it is needed.
	Guarded func(method string) bool
	// Resource that a call works on; default: as its metadata says. req is nil for a
	// stream.
	Resource func(ctx context.Context, method string, req any) (string, error)
	// Logger defaults to slog.Default().
	Logger *slog.Logger
}

// Guard makes interceptors. It is safe for concurrent use.
type Guard struct{ cfg Config }

// New returns a guard. It refuses replicas beyond one whose store of marks is not shared.
func New(cfg Config) (*Guard, error) {
	if err := markstore.Check(cfg.Store, cfg.Replicas); err != nil {
		return nil, fmt.Errorf("grpc guard: %w", err)
	}
	if cfg.Guarded == nil {
		cfg.Guarded = func(string) bool { return true }
	}
	if cfg.Resource == nil {
		cfg.Resource = func(ctx context.Context, _ string, _ any) (string, error) { return only(ctx, KeyResource), nil }
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Guard{cfg}, nil
}

// Unary guards unary calls. A handler's context ends, with a *fence.StaleError as cause,
// when a higher token came, if the store can tell; the new holder waits until it has returned.
func (g *Guard) Unary() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (res any, err error) {
		if !g.cfg.Guarded(info.FullMethod) {
			return handler(ctx, req)
		}
		err = g.guard(ctx, info.FullMethod, req, func(ctx context.Context) (err error) {
			res, err = handler(ctx, req)
			return err
		})
		if err != nil {
			return nil, err
		}
		return res, nil
	}
}

// Stream guards streams, each as one effect.
func (g *Guard) Stream() grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		if !g.cfg.Guarded(info.FullMethod) {
			return handler(srv, stream)
		}
		return g.guard(stream.Context(), info.FullMethod, nil, func(ctx context.Context) error {
			return handler(srv, fenced{stream, ctx})
		})
	}
}

// fenced is a stream whose context ends with its token.
type fenced struct {
	grpc.ServerStream
	ctx context.Context
}

// Context of the stream.
func (f fenced) Context() context.Context { return f.ctx }

func (g *Guard) guard(ctx context.Context, method string, req any, handle func(context.Context) error) error {
	resource, err := g.cfg.Resource(ctx, method, req)
	if err == nil && resource == "" {
		err = fmt.Errorf("%s: missing; name the leased resource in the call's metadata", KeyResource)
	}
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	token, err := fence.ParseToken(only(ctx, KeyToken))
	if err != nil {
		return status.Error(codes.InvalidArgument, KeyToken+": "+err.Error())
	}
	if only(ctx, KeyClaim) == "true" {
		if err := g.cfg.Store.Claim(ctx, resource, token); err != nil {
			return g.refusal(ctx, err)
		}
	}
	began := false
	var handled error
	err = g.cfg.Store.Do(ctx, resource, token, func(ctx context.Context) error {
		began = true
		handled = handle(ctx)
		return handled
	})
	switch {
	case !began && err != nil:
		return g.refusal(ctx, err)
	case handled == nil && err != nil:
		g.cfg.Logger.Error("a call was handled, and its guard failed afterwards", "resource", resource, "token", token.String(), "error", err)
	}
	return handled
}

// only returns the metadata of a key, if there is one of it.
func only(ctx context.Context, key string) string {
	values := metadata.ValueFromIncomingContext(ctx, key)
	if len(values) != 1 {
		return ""
	}
	return values[0]
}

func (g *Guard) refusal(ctx context.Context, err error) error {
	var stale *fence.StaleError
	var unclaimed *fence.UnclaimedError
	switch {
	case errors.As(err, &stale):
		return withInfo(stale, reasonStale, map[string]string{"resource": stale.Resource, "seen": stale.Seen.String(), "given": stale.Given.String()})
	case errors.As(err, &unclaimed):
		return withInfo(unclaimed, reasonUnclaimed, map[string]string{"resource": unclaimed.Resource})
	case ctx.Err() != nil:
		return status.FromContextError(ctx.Err()).Err()
	}
	g.cfg.Logger.Warn("a guarded call was not handled: its mark could not be looked at", "error", err)
	return status.Error(codes.Unavailable, "the fencing marks are out of reach; try again")
}

func withInfo(err error, reason string, about map[string]string) error {
	st, detailErr := status.New(codes.FailedPrecondition, err.Error()).WithDetails(&errdetails.ErrorInfo{Reason: reason, Domain: Domain, Metadata: about})
	if detailErr != nil {
		return status.Error(codes.Internal, detailErr.Error())
	}
	return st.Err()
}

// Outgoing says in a call's metadata what it works on, and with which token. claim is for the
// first call of a new holder, and only while lease.Valid().
func Outgoing(ctx context.Context, resource string, token fence.Token, claim bool) context.Context {
	md, _ := metadata.FromOutgoingContext(ctx)
	md = md.Copy()
	md.Set(KeyResource, resource)
	md.Set(KeyToken, token.String())
	md.Delete(KeyClaim)
	if claim {
		md.Set(KeyClaim, "true")
	}
	return metadata.NewOutgoingContext(ctx, md)
}

// Refusal returns the *fence.StaleError or *fence.UnclaimedError that a call's error is, else
// nil.
func Refusal(err error) error {
	st, ok := status.FromError(err)
	if !ok || st.Code() != codes.FailedPrecondition {
		return nil
	}
	for _, d := range st.Details() {
		info, ok := d.(*errdetails.ErrorInfo)
		if !ok || info.GetDomain() != Domain {
			continue
		}
		about := info.GetMetadata()
		switch info.GetReason() {
		case reasonStale:
			seen, err1 := fence.ParseToken(about["seen"])
			given, err2 := fence.ParseToken(about["given"])
			if err1 == nil && err2 == nil {
				return &fence.StaleError{Resource: about["resource"], Seen: seen, Given: given}
			}
		case reasonUnclaimed:
			return &fence.UnclaimedError{Resource: about["resource"]}
		}
	}
	return nil
}
