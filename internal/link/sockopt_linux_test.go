package link

import (
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestF50VotesConnectionsHaveAUserTimeout(t *testing.T) {
	server, l := links(t, "", eu1, nil), links(t, "", us1, nil)
	for plane, want := range map[Plane]int{PlaneVotes: 3000, PlaneAPI: 0} {
		ln, err := server.Listen(plane, "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		near, err := l.dialRaw(short5(t), plane, peerOf(eu1, ln.Addr().String()))
		if err != nil {
			t.Fatal(err)
		}
		far, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		for end, c := range map[string]net.Conn{"dialled": near.Conn, "accepted": far.(*conn).Conn} {
			raw, err := c.(syscall.Conn).SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var got int
			if err := raw.Control(func(fd uintptr) {
				got, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
			}); err != nil {
				t.Fatal(err)
			}
			if err != nil || got != want {
				t.Errorf("%s, %s: TCP_USER_TIMEOUT %d ms, %v", plane, end, got, err)
			}
		}
		_ = ln.Close()
	}
}
