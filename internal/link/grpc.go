package link

import (
	"context"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/headlease/headlease/internal/pki"
)

const (
	votesUserTimeout = 3 * time.Second

	pingEvery   = 10 * time.Second // gRPC refuses less in a client
	pingTimeout = 3 * time.Second
	// pingFloor is below what any client of ours sends: no GOAWAY for pings
	// [F50].
	pingFloor = time.Second
	// streamWindow and connWindow are what may be on the way to one end of a
	// connection; nothing here sends much at once. gRPC would let each grow to 16 MB
	// with the delay of the link, and to find out asks the other end after each
	// message that comes by itself how far it is: a ping and its answer, each a
	// write and a read at either end, as the message is.
	streamWindow = 256 << 10
	connWindow   = 1 << 20
	// readBuffer of a connection; gRPC's 32 KiB would be much of the memory of an
	// idle one. TLS reads whole records whatever it is, and most messages are smaller.
	readBuffer = 1 << 10
	// connectTimeout bounds one attempt, TLS included.
	connectTimeout = 3 * time.Second
)

// grpcCredentials run the Links' handshake for gRPC.
type grpcCredentials struct {
	links *Links
	plane Plane
	peer  *Peer // of a client; nil in a server
}

var _ credentials.TransportCredentials = (*grpcCredentials)(nil)

// ServerCredentials prove both ends of the connections of Listen(plane).
func (l *Links) ServerCredentials(plane Plane) credentials.TransportCredentials {
	return &grpcCredentials{links: l, plane: plane}
}

func (g *grpcCredentials) ClientHandshake(ctx context.Context, _ string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, id, err := g.links.clientHandshake(ctx, g.plane, *g.peer, raw)
	if err != nil {
		return nil, nil, err
	}
	return c, g.info(id), nil
}

func (g *grpcCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	ctx, cancel := context.WithTimeout(context.Background(), handshakeTimeout)
	defer cancel()
	c, id, err := g.links.serverHandshake(ctx, g.plane, raw)
	if err != nil {
		g.links.cfg.Logger.Debug("connection refused", "plane", g.plane.String(), "error", err)
		return nil, nil, err
	}
	return c, g.info(id), nil
}

func (g *grpcCredentials) info(id Identity) AuthInfo {
	return AuthInfo{
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: g.links.shk.security()},
		Identity:       id,
		path:           id.Path(),
	}
}

func (g *grpcCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: g.links.shk.protocol()}
}

func (g *grpcCredentials) Clone() credentials.TransportCredentials {
	clone := *g
	return &clone
}

func (g *grpcCredentials) OverrideServerName(string) error { return nil }

// ServerOptions are what every gRPC server of a plane is made with:
// credentials, fixed windows, and a keepalive policy under which our clients'
// pings are fine.
func (l *Links) ServerOptions(plane Plane) []grpc.ServerOption {
	return append(ServerWindows(),
		grpc.ReadBufferSize(readBuffer),
		grpc.Creds(l.ServerCredentials(plane)),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingFloor, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: pingEvery, Timeout: pingTimeout}),
	)
}

// DialOptions are what every client connection of a plane is made with, but
// for the credentials, which DialGRPC adds.
func (l *Links) DialOptions(plane Plane) []grpc.DialOption {
	opts := []grpc.DialOption{
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay:  50 * time.Millisecond,
				Multiplier: 1.6,
				Jitter:     0.2,
				MaxDelay:   500 * time.Millisecond, // gRPC's 120 s would outlast any outage [F50]
			},
			MinConnectTimeout: connectTimeout,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingEvery, Timeout: pingTimeout, PermitWithoutStream: true}),
		grpc.WithDisableServiceConfig(),
		grpc.WithNoProxy(),
		grpc.WithIdleTimeout(0),
		grpc.WithReadBufferSize(readBuffer),
	}
	if l.cfg.Identity.Role != pki.RoleAdmin { // who may read a backup over a long way
		opts = append(opts, Windows()...)
	}
	if plane == PlaneVotes {
		// A vote is answered for its own round or not at all; rounds repeat it.
		opts = append(opts,
			grpc.WithDisableRetry(),
			grpc.WithDefaultCallOptions(grpc.WaitForReady(false)))
	}
	return opts
}

// Windows are the fixed ones of a client connection.
func Windows() []grpc.DialOption {
	return []grpc.DialOption{grpc.WithStaticStreamWindowSize(streamWindow), grpc.WithStaticConnWindowSize(connWindow)}
}

// ServerWindows are those of a server's connections.
func ServerWindows() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.StaticStreamWindowSize(streamWindow), grpc.StaticConnWindowSize(connWindow)}
}

// DialGRPC makes a client connection to one peer, which must prove to be it.
// It connects when first used; the caller closes it. Further options come
// after those of DialOptions.
func (l *Links) DialGRPC(plane Plane, peer Peer, extra ...grpc.DialOption) (*grpc.ClientConn, error) {
	opts := append(l.DialOptions(plane),
		grpc.WithTransportCredentials(&grpcCredentials{links: l, plane: plane, peer: &peer}),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return l.dialRaw(ctx, plane, peer)
		}))
	if plane == PlaneVotes && peer.Name != "" {
		opts = append(opts, grpc.WithChainUnaryInterceptor(l.measure(peer.Name)))
	}
	// passthrough: dialRaw resolves the host afresh at each dial.
	return grpc.NewClient("passthrough:///"+peer.Address, append(opts, extra...)...)
}

// RetryNow ends the wait for a connection's next attempt, if it is waiting [F50].
//
// Not in other states: grpc-go v1.85.0 walks a map in ResetConnectBackoff without
// the lock under which a connection that begins to connect writes to it, and Go
// ends a process that does both at once. A connection that waits after a failed
// attempt has its entries, and keeps them.
func RetryNow(conn *grpc.ClientConn) {
	if conn.GetState() == connectivity.TransientFailure {
		conn.ResetConnectBackoff()
	}
}
