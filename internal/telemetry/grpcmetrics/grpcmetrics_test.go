package grpcmetrics_test

import (
	"context"
	"io"
	"testing"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/internal/telemetry"
	"github.com/headlease/headlease/internal/telemetry/grpcmetrics"
)

// stream takes so many messages, and then ends.
type stream struct {
	grpc.ServerStream
	left int
}

func (s *stream) Context() context.Context { return context.Background() }

func (s *stream) SendMsg(any) error { return nil }

func (s *stream) RecvMsg(any) error {
	if s.left--; s.left < 0 {
		return io.EOF
	}
	return nil
}

// drive makes the same calls of any pair of interceptors.
func drive(t *testing.T, unary grpc.UnaryServerInterceptor, streams grpc.StreamServerInterceptor) {
	t.Helper()
	for i, err := range []error{nil, nil, status.Error(codes.NotFound, "no"), context.DeadlineExceeded, io.ErrUnexpectedEOF} {
		info := &grpc.UnaryServerInfo{FullMethod: []string{"/a.B/One", "/a.B/Two"}[i%2]}
		if _, got := unary(t.Context(), nil, info, func(context.Context, any) (any, error) { return nil, err }); got != err { //nolint:errorlint // this very one
			t.Errorf("call %d returned %v", i, got)
		}
	}
	for _, info := range []*grpc.StreamServerInfo{
		{FullMethod: "/a.B/Down", IsServerStream: true},
		{FullMethod: "/a.B/Up", IsClientStream: true},
		{FullMethod: "/a.B/Both", IsServerStream: true, IsClientStream: true},
	} {
		err := streams(nil, &stream{left: 3}, info, func(_ any, ss grpc.ServerStream) error {
			for ss.RecvMsg(nil) == nil {
				_ = ss.SendMsg(nil)
			}
			return status.Error(codes.Aborted, "over")
		})
		if status.Code(err) != codes.Aborted {
			t.Errorf("%s returned %v", info.FullMethod, err)
		}
	}
}

// plain is what was counted, without times.
func plain(t *testing.T, reg *prometheus.Registry) map[string]*dto.MetricFamily {
	t.Helper()
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]*dto.MetricFamily{}
	for _, f := range all {
		var kept []*dto.Metric
		for _, m := range f.Metric {
			if c := m.Counter; c != nil {
				c.CreatedTimestamp = nil
				if c.GetValue() == 0 {
					continue // one makes it at the first call, the other with the first count
				}
			}
			if h := m.Histogram; h != nil {
				h.SampleSum, h.CreatedTimestamp = nil, nil
				for _, b := range h.Bucket {
					b.CumulativeCount = nil
				}
			}
			kept = append(kept, m)
		}
		f.Metric = kept
		out[f.GetName()] = f
	}
	return out
}

// TestAsTheProviderCounts: dashboards made for go-grpc-middleware's metrics read
// these.
func TestAsTheProviderCounts(t *testing.T) {
	ours, theirs := prometheus.NewRegistry(), prometheus.NewRegistry()
	unary, streams := grpcmetrics.Interceptors(ours)
	drive(t, unary, streams)
	m := grpcprom.NewServerMetrics(grpcprom.WithServerHandlingTimeHistogram(grpcprom.WithHistogramBuckets(telemetry.Seconds())))
	theirs.MustRegister(m)
	drive(t, m.UnaryServerInterceptor(), m.StreamServerInterceptor())
	got, want := plain(t, ours), plain(t, theirs)
	if len(got) != len(want) || len(want) != 5 {
		t.Errorf("%d metrics, want %d", len(got), len(want))
	}
	for name, w := range want {
		if !proto.Equal(got[name], w) {
			t.Errorf("%s:\n%v\nwant\n%v", name, got[name], w)
		}
	}
}
