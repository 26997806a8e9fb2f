package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// inNS runs f on an OS thread that has entered the network namespace. The
// thread is thrown away afterwards (never unlocked), so no other goroutine can
// inherit the namespace.
func inNS(ns string, f func() error) error {
	errc := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		fd, err := os.Open("/run/netns/" + ns)
		if err != nil {
			errc <- err
			return
		}
		defer func() { _ = fd.Close() }()
		if err := unix.Setns(int(fd.Fd()), unix.CLONE_NEWNET); err != nil {
			errc <- fmt.Errorf("setns %s: %w", ns, err)
			return
		}
		errc <- f()
	}()
	return <-errc
}

// nsDialer dials from inside a namespace: the socket is made there and stays
// there whatever thread uses it later.
func nsDialer(ns string) DialCtx {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		var c net.Conn
		err := inNS(ns, func() error {
			var e error
			c, e = (&net.Dialer{}).DialContext(ctx, network, addr)
			return e
		})
		return c, err
	}
}
