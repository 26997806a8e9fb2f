package link

import (
	"strconv"
	"strings"

	"google.golang.org/grpc/status"
)

// Reason is the message of a call's error without what gRPC writes around the error
// of a connection that did not come about: its own words, quotes, and the address once
// more. It is for people; nothing may be judged by it.
func Reason(err error) string {
	msg := status.Convert(err).Message()
	if quoted, ok := strings.CutPrefix(msg, "connection error: desc = "); ok {
		if plain, err := strconv.Unquote(quoted); err == nil {
			msg = plain
		}
	}
	for _, noise := range []string{"transport: Error while dialing: ", handshakeFailed} {
		msg = strings.TrimPrefix(msg, noise)
	}
	// "… at ADDRESS: dial tcp ADDRESS: connect: connection refused" of package net.
	if before, after, ok := strings.Cut(msg, ": dial tcp "); ok {
		if address, why, ok := strings.Cut(after, ": "); ok && strings.HasSuffix(before, " at "+address) {
			msg = before + ": " + strings.TrimPrefix(why, "connect: ")
		}
	}
	return msg
}

// RefusedHandshake tells, for people as well, that something listens at the address of a
// call that failed, and that the two ends do not accept each other.
func RefusedHandshake(err error) bool {
	return strings.Contains(status.Convert(err).Message(), handshakeFailed)
}

// handshakeFailed is gRPC's.
const handshakeFailed = "transport: authentication handshake failed: "
