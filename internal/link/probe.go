package link

import (
	"context"
	"time"
)

// Reached is how long a connection to a peer took.
type Reached struct {
	// Connect is the time of TCP's handshake: one round trip, and the name's
	// resolution.
	Connect time.Duration
	// Secured is the time of the handshake in which both ends prove themselves.
	Secured time.Duration
}

// Probe connects to a peer, proves both ends, and hangs up.
func (l *Links) Probe(ctx context.Context, plane Plane, peer Peer) (Reached, error) {
	began := time.Now()
	c, err := l.dialRaw(ctx, plane, peer)
	if err != nil {
		return Reached{}, err
	}
	defer c.kill()
	r := Reached{Connect: time.Since(began)}
	began = time.Now()
	secured, _, err := l.clientHandshake(ctx, plane, peer, c)
	if err != nil {
		return r, err
	}
	r.Secured = time.Since(began)
	_ = secured.Close() // says goodbye; kill ends what is left
	return r, nil
}
