package link

import (
	"errors"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestReasonSaysAnAddressOnce(t *testing.T) {
	l := links(t, set(t, "c"), eu2, nil)
	ln, err := l.Listen(PlaneAPI, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := ln.Addr().String()
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	err = check(short5(t), t, l, PlaneAPI, peerOf(eu1, closed))
	if got, want := Reason(err), "dial API of region/eu/eu-1 at "+closed+": connection refused"; got != want || RefusedHandshake(err) {
		t.Errorf("nobody listens: %q, refused handshake %v; want %q", got, RefusedHandshake(err), want)
	}

	address, _ := serve(t, links(t, set(t, "c"), eu1, nil), PlaneAPI) // another authority
	err = check(short5(t), t, l, PlaneAPI, peerOf(eu1, address))
	got := Reason(err)
	if !strings.HasPrefix(got, "dial API of region/eu/eu-1 at "+address+": TLS: certificate of the other end: ") || !RefusedHandshake(err) {
		t.Errorf("another authority: %q, refused handshake %v", got, RefusedHandshake(err))
	}
	if strings.Contains(got, "transport:") || strings.Contains(got, `\"`) {
		t.Errorf("gRPC's words are left in %q", got)
	}
}

func TestReasonLeavesOtherErrors(t *testing.T) {
	for _, err := range []error{
		status.Error(codes.FailedPrecondition, "not the leader"),
		status.Error(codes.Unavailable, "connection error: desc = broken"),
		status.Error(codes.Unavailable, "a: dial tcp "),
		status.Error(codes.Unavailable, "x at 10.0.0.1:1: dial tcp 10.0.0.2:1: connect: no route"), // two addresses say something
		errors.New("plain"),
	} {
		want := status.Convert(err).Message()
		if got := Reason(err); got != want || RefusedHandshake(err) {
			t.Errorf("%v: %q, want %q", err, got, want)
		}
	}
}
