// Package grpcmetrics counts the calls of gRPC servers. It is apart from package
// telemetry because the witness, which must stay small, does not link it.
//
// The metrics are those of go-grpc-middleware's Prometheus provider, by name and by
// meaning; that one looks up each of them by its labels at each call and each
// message, which was a twentieth of a busy leader's time (docs/performance.md).
package grpcmetrics

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/telemetry"
)

// Interceptors count the calls of a process's gRPC servers by method, code and
// latency, and the messages of streams. They go before those of the policy, so
// that refused calls count too.
func Interceptors(reg prometheus.Registerer) (grpc.UnaryServerInterceptor, grpc.StreamServerInterceptor) {
	m := newMetrics()
	reg.MustRegister(m.started, m.handled, m.received, m.sent, m.seconds)
	return m.unary, m.stream
}

type metrics struct {
	started, handled, received, sent *prometheus.CounterVec
	seconds                          *prometheus.HistogramVec
	// methods by full name, as *method: few, and each resolved once.
	methods sync.Map
}

// method is a method's metrics.
type method struct {
	started, ok, received, sent prometheus.Counter
	seconds                     prometheus.Observer
	labels                      []string
}

func newMetrics() *metrics {
	labels := []string{"grpc_type", "grpc_service", "grpc_method"}
	counter := func(name, help string, labels []string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	return &metrics{
		started:  counter("grpc_server_started_total", "Total number of RPCs started on the server.", labels),
		handled:  counter("grpc_server_handled_total", "Total number of RPCs completed on the server, regardless of success or failure.", append(labels[:3:3], "grpc_code")),
		received: counter("grpc_server_msg_received_total", "Total number of RPC stream messages received on the server.", labels),
		sent:     counter("grpc_server_msg_sent_total", "Total number of gRPC stream messages sent by the server.", labels),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "grpc_server_handling_seconds",
			Help:    "Histogram of response latency (seconds) of gRPC that had been application-level handled by the server.",
			Buckets: telemetry.Seconds(),
		}, labels),
	}
}

// of returns a method's metrics; kind is its type.
func (m *metrics) of(full, kind string) *method {
	if known, ok := m.methods.Load(full); ok {
		return known.(*method) //nolint:forcetypeassert // nothing else is stored
	}
	service, name, _ := strings.Cut(strings.TrimPrefix(full, "/"), "/")
	l := []string{kind, service, name}
	known, _ := m.methods.LoadOrStore(full, &method{
		started: m.started.WithLabelValues(l...), received: m.received.WithLabelValues(l...), sent: m.sent.WithLabelValues(l...),
		ok: m.handled.WithLabelValues(append(l[:3:3], codes.OK.String())...), seconds: m.seconds.WithLabelValues(l...), labels: l,
	})
	return known.(*method) //nolint:forcetypeassert // nothing else is stored
}

// ended counts the end of a call.
func (m *metrics) ended(of *method, began time.Time, err error) {
	if err == nil {
		of.ok.Inc()
	} else {
		s, ok := status.FromError(err)
		if !ok {
			s = status.FromContextError(err) // as gRPC's server does
		}
		m.handled.WithLabelValues(append(of.labels[:3:3], s.Code().String())...).Inc()
	}
	of.seconds.Observe(time.Since(began).Seconds())
}

func (m *metrics) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	of, began := m.of(info.FullMethod, "unary"), time.Now()
	of.started.Inc()
	of.received.Inc()
	resp, err := handler(ctx, req)
	if err == nil {
		of.sent.Inc()
	}
	m.ended(of, began, err)
	return resp, err
}

func (m *metrics) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	kind := "bidi_stream"
	switch {
	case !info.IsClientStream:
		kind = "server_stream"
	case !info.IsServerStream:
		kind = "client_stream"
	}
	of, began := m.of(info.FullMethod, kind), time.Now()
	of.started.Inc()
	err := handler(srv, &counted{ss, of})
	m.ended(of, began, err)
	return err
}

// counted is a stream whose messages count.
type counted struct {
	grpc.ServerStream
	of *method
}

func (c *counted) SendMsg(m any) error {
	err := c.ServerStream.SendMsg(m)
	if err == nil {
		c.of.sent.Inc()
	}
	return err
}

func (c *counted) RecvMsg(m any) error {
	err := c.ServerStream.RecvMsg(m)
	if err == nil {
		c.of.received.Inc()
	}
	return err
}
