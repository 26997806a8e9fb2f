package client

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/api"
)

// Every kind of refusal comes back as what it was: code, text, detail, and one
// sentinel. A new kind without a sentinel fails here.
func TestErrorsRoundTrip(t *testing.T) {
	sentinels := map[string]error{
		"not_owner": ErrNotOwner, "lapsed": ErrLapsed, "moved": ErrMoved, "session_expired": ErrSessionExpired,
		"not_holder": ErrNotHolder, "overloaded": ErrOverloaded, "invalid": ErrInvalid, "not_leader": ErrUnavailable,
		"uninitialised": ErrInvalid, "stale_request": ErrStaleRequest, "wrong_term": ErrUnavailable,
		"other_cluster": ErrDenied, "refused": ErrInvalid,
	}
	all := []error{
		ErrNotOwner, ErrLapsed, ErrMoved, ErrSessionExpired, ErrNotHolder, ErrOverloaded, ErrInvalid, ErrUnavailable,
		ErrStaleRequest, ErrDenied, ErrClosed, ErrBusy, ErrLost, ErrReleased, ErrLeft,
	}
	kinds := (&pb.ErrorDetail{}).ProtoReflect().Descriptor().Oneofs().ByName("kind").Fields()
	for i := range kinds.Len() {
		field := kinds.Get(i)
		name := string(field.Name())
		detail := &pb.ErrorDetail{}
		detail.ProtoReflect().Set(field, detail.ProtoReflect().NewField(field))
		sent := &api.DetailError{Detail: detail}
		got := errorOf(status.ErrorProto(sent.GRPCStatus().Proto()))
		var e *Error
		if !errors.As(got, &e) || !proto.Equal(e.Detail, detail) || e.Code != sent.GRPCStatus().Code() || e.Code == codes.Internal {
			t.Errorf("%s: came back as %#v", name, got)
			continue
		}
		if e.Error() != sent.Error() || e.Error() == "" && name != "refused" { // which has its reason only
			t.Errorf("%s: text %q, sent %q", name, e.Error(), sent.Error())
		}
		for _, s := range all {
			if is := errors.Is(got, s); is != errors.Is(s, sentinels[name]) {
				t.Errorf("%s: errors.Is(err, %q) is %v", name, s, is)
			}
		}
		if errorOfDetail(detail).Error() == "" && name != "refused" {
			t.Errorf("%s: no text without a status", name)
		}
	}
}

func TestErrorsWithoutADetail(t *testing.T) {
	for code, want := range map[codes.Code]error{
		codes.Unavailable: ErrUnavailable, codes.DeadlineExceeded: ErrUnavailable, codes.Canceled: ErrUnavailable,
		codes.Internal: ErrUnavailable, codes.Unknown: ErrUnavailable, codes.ResourceExhausted: ErrOverloaded,
		codes.InvalidArgument: ErrInvalid, codes.Unimplemented: ErrInvalid, codes.FailedPrecondition: ErrInvalid,
		codes.PermissionDenied: ErrDenied, codes.Unauthenticated: ErrDenied,
	} {
		if err := errorOf(status.Error(code, "x")); !errors.Is(err, want) {
			t.Errorf("%v: is not %v", code, want)
		}
	}
	if errorOf(nil) != nil {
		t.Error("an error of nothing")
	}
}

// TestPausesOfAnyAnswer: whatever a service asks for, the pause is one that can be
// made, not under the client's own by more than half, and not endless.
func TestPausesOfAnyAnswer(t *testing.T) {
	for _, ns := range []int64{math.MinInt64, -1, 0, 1, int64(time.Second), math.MaxInt64} {
		asked := askedToWait(&Error{Detail: &pb.ErrorDetail{Kind: &pb.ErrorDetail_Lapsed{Lapsed: &pb.Lapsed{RetryNs: ns}}}})
		for range 100 {
			if p := dice(fairDice).spread(minRetry, asked); p < minRetry/2 || p < asked || p > 2*time.Second {
				t.Fatalf("asked for %d ns: a pause of %v", ns, p)
			}
		}
	}
}

// TestWhatNoMessageCanCarryIsRefused: it would look like a region that does not
// answer, and be tried until the caller gives up.
func TestWhatNoMessageCanCarryIsRefused(t *testing.T) {
	cfg := Config{Regions: []Region{{Name: "eu", Servers: []Server{{Name: "eu-1"}}}}, Links: byName{}}
	cfg.Labels = map[string]string{"tenant": "\xff"}
	if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), `labels: "tenant"="\xff" is not UTF-8`) {
		t.Errorf("labels of a client: %v", err)
	}
	cfg.Labels = nil
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close(t.Context()) }()
	if _, err := c.NewSession(SessionOptions{Labels: map[string]string{"\xff": ""}}); err == nil {
		t.Error("a session has labels that are not UTF-8")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, err := range c.WatchPrefix(ctx, "lock/\xff") {
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("a watch: %v", err)
		}
	}
	if _, err := c.List(ctx, "eu", &pb.ListLeasesRequest{Prefix: "\xff"}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a list: %v", err)
	}
	if ctx.Err() != nil {
		t.Error("it was tried")
	}
}
