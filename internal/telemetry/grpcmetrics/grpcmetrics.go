// Package grpcmetrics counts the calls of gRPC servers. It is apart from package
// telemetry because the witness, which must stay small, does not link it.
package grpcmetrics

import (
	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/telemetry"
)

// Interceptors count the calls of a process's gRPC servers by method, code and
// latency, and the messages of streams. They go before those of the policy, so
// that refused calls count too.
func Interceptors(reg prometheus.Registerer) (grpc.UnaryServerInterceptor, grpc.StreamServerInterceptor) {
	m := grpcprom.NewServerMetrics(grpcprom.WithServerHandlingTimeHistogram(grpcprom.WithHistogramBuckets(telemetry.Seconds())))
	reg.MustRegister(m)
	return m.UnaryServerInterceptor(), m.StreamServerInterceptor()
}
