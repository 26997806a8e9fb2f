package link

import (
	"context"
	"fmt"
	"net"
	"strings"
)

// ListenLocal listens in plain text for what never leaves the machine:
// a sidecar's local API, the resources of drills. address is
// HOST:PORT on loopback, or "unix:PATH". what names the setting in errors. No
// faults apply: no process of the cluster is at the other end.
func ListenLocal(ctx context.Context, what, address string) (net.Listener, error) {
	network, at := split(address)
	lc := net.ListenConfig{}
	if network == "tcp" {
		if err := CheckAddress(ctx, what, at); err != nil {
			return nil, err
		}
		lc.Control = control(PlaneAPI, true)
	}
	ln, err := lc.Listen(ctx, network, at)
	if err != nil {
		return nil, addressError(what, address, err)
	}
	return ln, nil
}

// ListenPlain is ListenLocal for what an operator may deliberately serve to
// other machines in plain text: metrics and health. local tells whether the
// address it got is loopback or a Unix socket.
func ListenPlain(ctx context.Context, what, address string) (ln net.Listener, local bool, err error) {
	network, at := split(address)
	if network == "tcp" {
		if err := CheckAddress(ctx, what, at); err != nil {
			return nil, false, err
		}
	}
	if ln, err = (&net.ListenConfig{}).Listen(ctx, network, at); err != nil {
		return nil, false, addressError(what, address, err)
	}
	return ln, network == "unix" || loopback(ln.Addr().String()), nil
}

// DialLocal is the other end of ListenLocal.
func DialLocal(ctx context.Context, address string) (net.Conn, error) {
	network, at := split(address)
	d := net.Dialer{}
	if network == "tcp" {
		d.Control = control(PlaneAPI, true)
	}
	c, err := d.DialContext(ctx, network, at)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", address, err)
	}
	return c, nil
}

func split(address string) (network, at string) {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		return "unix", path
	}
	return "tcp", address
}
