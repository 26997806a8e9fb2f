package link

import (
	"context"
	"errors"
	"net"
	"time"

	"google.golang.org/grpc"
)

// ServeGRPC serves until ctx ends, then lets calls under way finish for at most
// grace. It returns nil after such an end, and the server's error otherwise.
func ServeGRPC(ctx context.Context, server *grpc.Server, listener net.Listener, grace time.Duration) error {
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	force := time.AfterFunc(grace, server.Stop)
	defer force.Stop()
	server.GracefulStop() // returns at once when Stop cuts in
	if err := <-done; !errors.Is(err, grpc.ErrServerStopped) {
		return err
	}
	return nil
}
