package link

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/headlease/headlease/internal/pki"
)

// shaker proves the two ends of a connection to each other.
type shaker interface {
	client(ctx context.Context, plane Plane, peer Peer, c net.Conn) (net.Conn, Identity, error)
	server(ctx context.Context, plane Plane, c net.Conn) (net.Conn, Identity, error)
	security() credentials.SecurityLevel
	protocol() string
}

type tlsShaker struct {
	own   Identity
	creds *pki.Credentials
	turns *turns // of the API's callers; other planes have no herds
}

func newTLSShaker(own Identity, creds *pki.Credentials) tlsShaker {
	return tlsShaker{own: own, creds: creds, turns: newTurns()}
}

func (tlsShaker) security() credentials.SecurityLevel { return credentials.PrivacyAndIntegrity }
func (tlsShaker) protocol() string                    { return "tls" }

// alpn keeps a connection for one plane off the port of another. The API has
// gRPC's usual name, for the sake of general tools.
func alpn(plane Plane) string {
	switch plane {
	case PlaneAPI:
		return "h2"
	case PlaneVotes:
		return "headlease-votes"
	case PlaneRaft:
		return "headlease-raft"
	default:
		return "headlease-gossip"
	}
}

func (s tlsShaker) config(plane Plane) *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{s.creds.Certificate},
		NextProtos:   []string{alpn(plane)},
		// No resumption: every connection proves both identities afresh.
		SessionTicketsDisabled: true,
	}
}

// verified checks a peer's chain and reads its identity. Certificates name
// identities, not hosts, so that a server may move.
func (s tlsShaker) verified(state tls.ConnectionState, plane Plane, usage x509.ExtKeyUsage) (Identity, error) {
	if len(state.PeerCertificates) == 0 {
		return Identity{}, errors.New("the other end shows no certificate; use the certificates of this cluster")
	}
	leaf := state.PeerCertificates[0]
	_, err := leaf.Verify(x509.VerifyOptions{
		Roots:       s.creds.Roots,
		CurrentTime: time.Now(),
		KeyUsages:   []x509.ExtKeyUsage{usage},
	})
	if err != nil {
		return Identity{}, fmt.Errorf("certificate of the other end: %w; use the certificates of one set", err)
	}
	if state.NegotiatedProtocol != alpn(plane) {
		return Identity{}, fmt.Errorf("the other end speaks %q, not %q; check the port", state.NegotiatedProtocol, alpn(plane))
	}
	id, err := pki.FromURIs(leaf.URIs)
	if err != nil {
		return Identity{}, fmt.Errorf("certificate of the other end: %w", err)
	}
	return id, nil
}

func (s tlsShaker) client(ctx context.Context, plane Plane, peer Peer, c net.Conn) (net.Conn, Identity, error) {
	cfg := s.config(plane)
	var id Identity
	// The chain is verified below, without a host's name.
	cfg.InsecureSkipVerify = true //nolint:gosec // VerifyConnection checks chain and identity
	cfg.VerifyConnection = func(state tls.ConnectionState) (err error) {
		if id, err = s.verified(state, plane, x509.ExtKeyUsageServerAuth); err != nil {
			return err
		}
		return checkPeer(s.own, peer, id)
	}
	return shake(ctx, tls.Client(c, cfg), &id)
}

func (s tlsShaker) server(ctx context.Context, plane Plane, c net.Conn) (net.Conn, Identity, error) {
	cfg := s.config(plane)
	var id Identity
	// Verified below, and once: the client is told for whose certificates it is asked.
	cfg.ClientAuth = tls.RequireAnyClientCert
	cfg.ClientCAs = s.creds.Roots
	done := func() {}
	if plane == PlaneAPI {
		// Called when the client's first message is here, before anything is computed.
		cfg.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			turn, err := s.turns.take(hello.Context())
			if err == nil {
				done = turn
			}
			return nil, err // nil: this one
		}
	}
	cfg.VerifyConnection = func(state tls.ConnectionState) (err error) {
		if id, err = s.verified(state, plane, x509.ExtKeyUsageClientAuth); err != nil {
			return err
		}
		return checkCaller(s.own, plane, id)
	}
	secured, as, err := shake(ctx, tls.Server(c, cfg), &id)
	done()
	return secured, as, err
}

func shake(ctx context.Context, c *tls.Conn, id *Identity) (net.Conn, Identity, error) {
	if err := c.HandshakeContext(ctx); err != nil {
		return nil, Identity{}, fmt.Errorf("TLS: %w", err)
	}
	return c, *id, nil
}
