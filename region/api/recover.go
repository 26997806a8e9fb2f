package api

import (
	"fmt"
	"runtime/debug"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
)

// Recover are the interceptors that turn a handler's panic into an answer and
// tell died of it, once for each. The server must then stop in order: nobody
// knows what the handler left half done under a lock, and a leader that serves
// on with broken tables is worse than one that is elected anew
// (docs/decisions/0070). They go outside of all others.
func Recover(died func(error)) (grpc.UnaryServerInterceptor, grpc.StreamServerInterceptor) {
	handle := recovery.WithRecoveryHandler(func(p any) error {
		died(fmt.Errorf("panic in a call's handler: %v\n%s", p, debug.Stack()))
		return status.Error(codes.Internal, "the server failed in this call and restarts; ask another one")
	})
	return recovery.UnaryServerInterceptor(handle), recovery.StreamServerInterceptor(handle)
}
