package e2e

import (
	"context"
	"encoding/hex"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// TestATraceFollowsARequest: one acquire through a follower is one trace, from
// the follower's call over the leader's to Raft and back.
func TestATraceFollowsARequest(t *testing.T) {
	c := newCollector(t)
	o := oneRegion()
	o.Env = []string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://" + c.address, "OTEL_BSP_SCHEDULE_DELAY=200"}
	cl := start(t, o)
	ctx := within(t, stepTimeout)
	region := cl.File().Regions[0].Name
	leader := cl.leader(region)
	servers := cl.File().RegionProcesses(region)
	at := servers[slices.IndexFunc(servers, func(p clusterfile.Process) bool { return p.Name != leader })]
	conn, err := cl.clientLinks().DialGRPC(link.PlaneAPI, link.Peer{Name: at.Name, Region: region, Role: pki.RoleRegion, Address: at.API})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	opened, err := pb.NewSessionServiceClient(conn).OpenSession(ctx, &pb.OpenSessionRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pb.NewLeaseServiceClient(conn).Acquire(ctx, &pb.AcquireRequest{
		SessionId: opened.GetSessionId(), Secret: opened.GetSecret(), RequestId: 1, Resource: "lock/traced",
	}); err != nil {
		t.Fatal(err)
	}
	// The spans of one trace, by the server that made them.
	want := []string{
		at.Name + " headlease.v1.LeaseService/Acquire", // taken
		at.Name + " headlease.v1.LeaseService/Acquire", // forwarded
		leader + " headlease.v1.LeaseService/Acquire",
		leader + " raft.propose",
	}
	for {
		traces := c.traces()
		for _, spans := range traces {
			slices.Sort(spans)
			sorted := slices.Sorted(slices.Values(want))
			if slices.Equal(spans, sorted) {
				return
			}
		}
		select {
		case <-c.more:
		case <-ctx.Done():
			for id, spans := range traces {
				t.Logf("%s: %s", id, strings.Join(spans, ", "))
			}
			t.Fatalf("no trace is %s", strings.Join(want, ", "))
		}
	}
}

// spanCollector is an OpenTelemetry collector that keeps spans in memory.
type spanCollector struct {
	collector.UnimplementedTraceServiceServer
	address string
	more    chan struct{}

	mu      sync.Mutex
	byTrace map[string][]string
}

func newCollector(t *testing.T) *spanCollector {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &spanCollector{address: ln.Addr().String(), more: make(chan struct{}, 1), byTrace: map[string][]string{}}
	server := grpc.NewServer()
	collector.RegisterTraceServiceServer(server, c)
	served := make(chan error, 1)
	go func() { served <- server.Serve(ln) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return c
}

func (c *spanCollector) Export(_ context.Context, req *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range req.GetResourceSpans() {
		instance := ""
		for _, a := range r.GetResource().GetAttributes() {
			if a.GetKey() == "service.instance.id" {
				instance = a.GetValue().GetStringValue()
			}
		}
		for _, s := range r.GetScopeSpans() {
			for _, span := range s.GetSpans() {
				c.add(instance, span)
			}
		}
	}
	select {
	case c.more <- struct{}{}:
	default:
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

func (c *spanCollector) add(instance string, span *tracepb.Span) {
	id := hex.EncodeToString(span.GetTraceId())
	c.byTrace[id] = append(c.byTrace[id], instance+" "+span.GetName())
}

func (c *spanCollector) traces() map[string][]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[string][]string{}
	for id, spans := range c.byTrace {
		out[id] = slices.Clone(spans)
	}
	return out
}
