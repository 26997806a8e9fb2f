package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/headlease/headlease/internal/pki"
)

// Without TLS each end sends one line, the dialler first:
//
//	headlease/1 PLANE IDENTITY-URI\n
//
// Nothing is proven: whoever reaches a loopback address may claim any name.

const (
	plainMagic = "headlease/1"
	// maxPlainLine bounds the line with its newline.
	maxPlainLine = len(plainMagic) + 1 + 16 + 1 + pki.MaxURI + 1
)

type plainShaker struct{ id Identity }

func (plainShaker) security() credentials.SecurityLevel { return credentials.NoSecurity }
func (plainShaker) protocol() string                    { return "plain" }

func (s plainShaker) client(ctx context.Context, plane Plane, peer Peer, c net.Conn) (net.Conn, Identity, error) {
	id, err := s.exchange(ctx, plane, c, true, func(id Identity) error { return checkPeer(s.id, peer, id) })
	return c, id, err
}

func (s plainShaker) server(ctx context.Context, plane Plane, c net.Conn) (net.Conn, Identity, error) {
	id, err := s.exchange(ctx, plane, c, false, func(id Identity) error { return checkCaller(s.id, plane, id) })
	return c, id, err
}

func (s plainShaker) exchange(ctx context.Context, plane Plane, c net.Conn, first bool, check func(Identity) error) (Identity, error) {
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(deadline); err != nil {
			return Identity{}, err
		}
	}
	// Like tls.Conn.HandshakeContext: an ended context ends the exchange.
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if first {
		if _, err := c.Write(encodePlain(plane, s.id)); err != nil {
			return Identity{}, err
		}
	}
	id, err := readPlain(plane, c)
	if err == nil {
		err = check(id)
	}
	if err != nil {
		return Identity{}, err
	}
	if !first {
		if _, err := c.Write(encodePlain(plane, s.id)); err != nil {
			return Identity{}, err
		}
	}
	if !stop() {
		return Identity{}, ctx.Err()
	}
	return id, c.SetDeadline(time.Time{})
}

func encodePlain(plane Plane, id Identity) []byte {
	return []byte(plainMagic + " " + plane.String() + " " + id.URI() + "\n")
}

// readPlain reads one line and not a byte more: what follows belongs to the
// protocol above.
func readPlain(plane Plane, c net.Conn) (Identity, error) {
	line := make([]byte, 0, maxPlainLine)
	var b [1]byte
	for len(line) < maxPlainLine {
		if _, err := c.Read(b[:]); err != nil {
			return Identity{}, fmt.Errorf("the other end sends no identity: %w; is it started with --insecure too?", err)
		}
		if b[0] == '\n' {
			return decodePlain(plane, string(line))
		}
		line = append(line, b[0])
		// A TLS client is noticed at its first byte, not when it gives up.
		if i := len(line) - 1; i < len(plainMagic) && line[i] != plainMagic[i] {
			return Identity{}, errors.New("the other end does not speak plain text; start both with --insecure or neither")
		}
	}
	return Identity{}, fmt.Errorf("the other end sends over %d bytes as its identity", maxPlainLine)
}

func decodePlain(plane Plane, line string) (Identity, error) {
	parts := strings.Split(line, " ")
	if len(parts) != 3 || parts[0] != plainMagic {
		return Identity{}, fmt.Errorf("the other end sends %.40q as its identity, not %q", line, plainMagic+" PLANE URI")
	}
	if parts[1] != plane.String() {
		return Identity{}, fmt.Errorf("the other end speaks %.20q, not %q; check the port", parts[1], plane)
	}
	return pki.ParseURI(parts[2])
}
