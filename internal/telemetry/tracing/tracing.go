// Package tracing follows single requests through the servers that they pass, with OpenTelemetry. It is off, and costs
// nothing, unless the standard environment variables name a collector. It is
// apart from package telemetry because the witness, which must stay small, does
// not link it.
package tracing

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
)

// Process says what the spans come from.
type Process struct {
	// Service is the role: "headlease-region".
	Service string
	// Instance is the server's name, Region its region.
	Instance, Region string
	Version          string
	Logger           *slog.Logger
}

// FromEnvironment returns a provider that exports by OTLP over gRPC, as
// OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) and its
// companions say, or nil if neither is set or OTEL_SDK_DISABLED is. OTEL_TRACES_SAMPLER chooses
// what is sampled; without it everything that the caller samples, or that has no
// caller's decision. stop sends what is left; call it once, also of nil.
//
// A collector that is slow or down costs spans, never a request's time: they are
// exported in the background from a bounded queue.
func FromEnvironment(ctx context.Context, p Process) (provider trace.TracerProvider, stop func(context.Context) error, err error) {
	none := func(context.Context) error { return nil }
	if os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") == "" && os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") == "" || os.Getenv("OTEL_SDK_DISABLED") == "true" {
		return nil, none, nil
	}
	exporter, err := otlptracegrpc.New(ctx)
	if err != nil {
		return nil, none, fmt.Errorf("tracing: OTEL_EXPORTER_OTLP_ENDPOINT: %w", err)
	}
	res, err := resource.New(ctx,
		resource.WithAttributes(
			attribute.String("service.name", p.Service),
			attribute.String("service.instance.id", p.Instance),
			attribute.String("service.version", p.Version),
			attribute.String("headlease.region", p.Region)),
		resource.WithFromEnv())
	if err != nil {
		return nil, none, fmt.Errorf("tracing: OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	if p.Logger != nil {
		otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { p.Logger.Warn("tracing", "error", err) }))
	}
	made := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(res))
	return made, made.Shutdown, nil
}

// ServerOptions make a server continue the traces of its callers, or begin
// them. Of a nil provider there are none.
func ServerOptions(p trace.TracerProvider) []grpc.ServerOption {
	if p == nil {
		return nil
	}
	return []grpc.ServerOption{grpc.StatsHandler(otelgrpc.NewServerHandler(options(p)...))}
}

// DialOptions make a connection carry the traces of its calls. Of a nil provider
// there are none.
func DialOptions(p trace.TracerProvider) []grpc.DialOption {
	if p == nil {
		return nil
	}
	return []grpc.DialOption{grpc.WithStatsHandler(otelgrpc.NewClientHandler(options(p)...))}
}

func options(p trace.TracerProvider) []otelgrpc.Option {
	return []otelgrpc.Option{otelgrpc.WithTracerProvider(p), otelgrpc.WithPropagators(propagation.TraceContext{})}
}
