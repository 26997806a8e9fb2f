package link

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/pki"
)

// ErrIdentity is wrapped by the refusal of a peer that proved to be someone
// else, or of a role that has no business on a plane.
var ErrIdentity = errors.New("wrong identity")

// checkPeer refuses a dialled process that is not the one meant.
func checkPeer(own Identity, want Peer, got Identity) error {
	switch {
	case got.Cluster != own.Cluster:
		return fmt.Errorf("%w: the other end is of cluster %q, not %q; check the address", ErrIdentity, got.Cluster, own.Cluster)
	case want.Role != "" && got.Role != want.Role,
		want.Region != "" && got.Region != want.Region,
		want.Name != "" && got.Name != want.Name:
		return fmt.Errorf("%w: the other end is %s; check the address in cluster.yaml", ErrIdentity, got)
	case want.Role == "" && got.Role != pki.RoleRegion && got.Role != pki.RoleWitness:
		return fmt.Errorf("%w: the other end is %s, not a server", ErrIdentity, got)
	}
	return nil
}

// checkCaller refuses who has no business on a plane. What a caller may do on
// it is the business of the services' policy table.
func checkCaller(own Identity, plane Plane, got Identity) error {
	if got.Cluster != own.Cluster {
		return fmt.Errorf("%w: caller is of cluster %q, not %q; use the certificates of this cluster", ErrIdentity, got.Cluster, own.Cluster)
	}
	var may bool
	switch plane {
	case PlaneAPI:
		may = true
	case PlaneVotes:
		may = got.Role != pki.RoleClient
	case PlaneRaft:
		may = got.Role == pki.RoleRegion && got.Region == own.Region
	case PlaneGossip:
		may = got.Role == pki.RoleRegion || got.Role == pki.RoleWitness
	}
	if !may {
		return fmt.Errorf("%w: %s has no business on the %s plane of %s", ErrIdentity, got, plane, own)
	}
	return nil
}

// AuthInfo is what PeerIdentity finds in a gRPC call.
type AuthInfo struct {
	credentials.CommonAuthInfo
	Identity Identity
	// path is Identity.Path, made once per connection.
	path string
}

// AuthType is the name of the handshake.
func (AuthInfo) AuthType() string { return "headlease" }

// PeerIdentity is the proven identity of the other end of a gRPC call: the
// caller in a handler; in a client, with the peer call option's context, the
// server.
func PeerIdentity(ctx context.Context) (Identity, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return Identity{}, false
	}
	info, ok := p.AuthInfo.(AuthInfo)
	return info.Identity, ok
}

// PeerCaller is PeerIdentity in what each call asks for: the role, and the path.
func PeerCaller(ctx context.Context) (role pki.Role, path string, ok bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return "", "", false
	}
	info, ok := p.AuthInfo.(AuthInfo)
	return info.Identity.Role, info.path, ok
}

// RequireAdmin refuses, with PERMISSION_DENIED, the calls of all but admins.
func RequireAdmin(ctx context.Context) error {
	id, ok := PeerIdentity(ctx)
	if !ok {
		return status.Error(codes.Unauthenticated, "caller has no identity; connect with a certificate of the cluster")
	}
	if id.Role != pki.RoleAdmin {
		return status.Errorf(codes.PermissionDenied, "caller is %s; this call needs the admin certificate", id)
	}
	return nil
}
