package api_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// TestBadTermsOfARequest name the field and the remedy, through the leader and
// through a follower, and reach no log.
func TestBadTermsOfARequest(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		s := open(t, w.leader)
		before := w.region.View().AppliedIndex()
		value := make([]byte, state.MaxValue+1)
		for _, c := range []struct {
			edit func(*pb.AcquireRequest)
			want string
		}{
			{func(r *pb.AcquireRequest) { r.Value = value }, "value: has 65537 bytes; at most 65536 are kept beside a lease, put the rest elsewhere and its name here"},
			{func(r *pb.AcquireRequest) { r.LockDelayMs = 60_001 }, "lock_delay_ms: 60001 is out of range; choose 0 to 60000"},
			{func(r *pb.AcquireRequest) { r.LockDelayMs = -1 }, "lock_delay_ms: -1 is out of range; choose 0 to 60000"},
			{func(r *pb.AcquireRequest) { r.Wait, r.WaitMs = true, -1 }, "wait_ms: -1 is out of range; choose up to 86400000, or 0 to wait until it is cancelled"},
			{func(r *pb.AcquireRequest) { r.Wait, r.WaitMs = true, 1<<40 }, "wait_ms: 1099511627776 is out of range; choose up to 86400000, or 0 to wait until it is cancelled"},
			{func(r *pb.AcquireRequest) { r.WaitMs = 5 }, "wait_ms: is given without wait; set wait, or leave wait_ms out"},
			{func(r *pb.AcquireRequest) { r.Slots = 10_001 }, "slots: 10001 are too many; a semaphore has up to 10000"},
			{func(r *pb.AcquireRequest) { r.Slots, r.Resource = 2, "shard/7" }, "slots: 2 are asked for of shard/7; only a lock/NAME has slots"},
			{func(r *pb.AcquireRequest) { r.Slots, r.Resource = 2, "lock/x#1" }, `resource: "lock/x#1" has a slot's number already; with slots name the semaphore without one`},
		} {
			req := acquire(s, "lock/x", 1)
			c.edit(req)
			for server, conn := range w.both() {
				_, err := pb.NewLeaseServiceClient(conn).Acquire(t.Context(), req)
				if status.Code(err) != codes.InvalidArgument || status.Convert(err).Message() != c.want || detail(err).GetInvalid() == nil {
					t.Errorf("%s: %v\nwant %s", server, err, c.want)
				}
			}
		}
		for server, conn := range w.both() {
			leases := pb.NewLeaseServiceClient(conn)
			set := &pb.SetValueRequest{SessionId: s.GetSessionId(), Secret: s.GetSecret(), Resource: "lock/x", Token: 5, Value: value}
			if _, err := leases.SetValue(t.Context(), set); detail(err).GetInvalid().GetField() != "value" {
				t.Errorf("%s: too long a value: %v", server, err)
			}
			set.Token, set.Value = 0, nil
			if _, err := leases.SetValue(t.Context(), set); detail(err).GetInvalid().GetField() != "token" {
				t.Errorf("%s: no token: %v", server, err)
			}
		}
		if after := w.region.View().AppliedIndex(); after != before {
			t.Errorf("%d commands were committed", after-before)
		}
	})
}

func TestValuesAreKeptBesideTheLease(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		s := open(t, w.follower)
		leases := pb.NewLeaseServiceClient(w.follower)
		req := acquire(s, "lock/x", 1)
		req.Value, req.LockDelayMs = []byte("one"), 1500
		got, err := leases.Acquire(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		token := got.GetGranted().GetToken()
		look := func() *pb.LeaseInfo {
			t.Helper()
			l, err := leases.GetLease(t.Context(), &pb.GetLeaseRequest{Resource: "lock/x"})
			if err != nil {
				t.Fatal(err)
			}
			list, err := leases.ListLeases(t.Context(), &pb.ListLeasesRequest{Prefix: "lock/"})
			if err != nil || len(list.GetLeases()) != 1 || string(list.GetLeases()[0].GetValue()) != string(l.GetLease().GetValue()) {
				t.Errorf("listed %v, %v", list, err)
			}
			return l.GetLease()
		}
		first := look()
		if string(first.GetValue()) != "one" || first.GetLockDelayMs() != 1500 || first.GetRevision() == 0 {
			t.Errorf("%v", first)
		}
		set := &pb.SetValueRequest{SessionId: s.GetSessionId(), Secret: s.GetSecret(), Resource: "lock/x", Token: token, Value: []byte("two")}
		res, err := leases.SetValue(t.Context(), set)
		if err != nil {
			t.Fatal(err)
		}
		if next := look(); string(next.GetValue()) != "two" || next.GetRevision() != res.GetRevision() || res.GetRevision() <= first.GetRevision() {
			t.Errorf("%v, revision %d after %d", next, res.GetRevision(), first.GetRevision())
		}
		set.Token++
		if _, err := leases.SetValue(t.Context(), set); detail(err).GetNotHolder() == nil {
			t.Errorf("with another token: %v", err)
		}
	})
}

// TestSlotsAreNamedInTheAnswer, and the third of two waits, or is told that it
// is busy.
func TestSlotsAreNamedInTheAnswer(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		s := open(t, w.follower)
		leases := pb.NewLeaseServiceClient(w.follower)
		for i := range uint64(2) {
			req := acquire(s, "lock/pool", i+1)
			req.Slots = 2
			got, err := leases.Acquire(t.Context(), req)
			if want := fmt.Sprintf("lock/pool#%d", i); err != nil || got.GetGranted().GetResource() != want {
				t.Fatalf("%v %v, want %s", got, err, want)
			}
		}
		req := acquire(s, "lock/pool", 3)
		req.Slots = 2
		if got, err := leases.Acquire(t.Context(), req); err != nil || got.GetBusy() == nil {
			t.Errorf("%v %v", got, err)
		}
		req = acquire(s, "lock/pool", 4)
		req.Slots, req.Wait = 2, true
		if got, err := leases.Acquire(t.Context(), req); err != nil || got.GetQueued() == nil {
			t.Errorf("%v %v", got, err)
		}
	})
}

// TestAWaitThatIsOverIsTold on the stream.
func TestAWaitThatIsOverIsTold(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		holder, waiter := open(t, w.leader), open(t, w.follower)
		if _, err := pb.NewLeaseServiceClient(w.leader).Acquire(t.Context(), acquire(holder, "lock/x", 1)); err != nil {
			t.Fatal(err)
		}
		a := attach(t, w.follower)
		if err := a.Send(keepalive(waiter, 1)); err != nil {
			t.Fatal(err)
		}
		req := acquire(waiter, "lock/x", 1)
		req.Wait, req.WaitMs = true, 2000
		begin := time.Now()
		if _, err := pb.NewLeaseServiceClient(w.follower).Acquire(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		for {
			m, err := a.Recv()
			if err != nil {
				t.Fatal(err)
			}
			f := m.GetFailed()
			if f == nil {
				continue
			}
			if e := f.GetError().GetWaitEnded(); e.GetResource() != "lock/x" || e.GetWaitedMs() != 2000 || f.GetRequestId() != 1 {
				t.Errorf("%v", f)
			}
			break
		}
		if took := time.Since(begin); took < 2*time.Second || took > 2200*time.Millisecond {
			t.Errorf("after %v", took)
		}
	})
}

// TestALockDelayIsWaitedOut.
func TestALockDelayIsWaitedOut(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		holder, waiter := open(t, w.leader), open(t, w.follower)
		req := acquire(holder, "lock/x", 1)
		req.LockDelayMs = 3000
		if _, err := pb.NewLeaseServiceClient(w.leader).Acquire(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		a := attach(t, w.follower)
		req = acquire(waiter, "lock/x", 1)
		req.Wait = true
		if _, err := pb.NewLeaseServiceClient(w.follower).Acquire(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		stop := make(chan struct{})
		defer close(stop)
		go func() {
			for n := uint64(1); ; n++ {
				if a.Send(keepalive(waiter, n)) != nil {
					return
				}
				select {
				case <-stop:
					return
				case <-time.After(time.Second):
				}
			}
		}()
		begin := time.Now()
		for {
			m, err := a.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if m.GetGrant() != nil {
				break
			}
		}
		// The holder's session lives 10 s, and then its lock delay runs.
		if took := time.Since(begin); took < 13*time.Second || took > 14*time.Second {
			t.Errorf("granted after %v", took)
		}
		busy := acquire(waiter, "lock/x", 2)
		if _, err := pb.NewLeaseServiceClient(w.follower).Acquire(t.Context(), busy); err != nil {
			t.Error(err)
		}
	})
}

// TestPagesOfLeasesAreBoundedInBytes.
func TestPagesOfLeasesAreBoundedInBytes(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		s := open(t, w.leader)
		leases := pb.NewLeaseServiceClient(w.leader)
		const n = 40
		for i := range uint64(n) {
			req := acquire(s, fmt.Sprintf("lock/%02d", i), i+1)
			req.Value = []byte(strings.Repeat("v", state.MaxValue))
			if _, err := leases.Acquire(t.Context(), req); err != nil {
				t.Fatal(err)
			}
		}
		seen := map[string]bool{}
		req := &pb.ListLeasesRequest{Limit: 1000}
		for pages := 1; ; pages++ {
			res, err := leases.ListLeases(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			for _, l := range res.GetLeases() {
				if seen[l.GetResource()] {
					t.Errorf("%s is listed twice", l.GetResource())
				}
				seen[l.GetResource()] = true
			}
			if req.Page = res.GetNextPage(); req.GetPage() == "" {
				if len(seen) != n || pages < 3 {
					t.Errorf("%d leases on %d pages", len(seen), pages)
				}
				return
			}
		}
	})
}

// TestASessionNeedsItsSecretOrItsOpener: every call that touches a session takes
// its secret from anybody and no secret from the identity that opened it; a wrong
// secret from nobody.
func TestASessionNeedsItsSecretOrItsOpener(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		mallory := map[string]*grpc.ClientConn{"leader": dialAs(t, w, "mallory", 0), "follower": dialAs(t, w, "mallory", 1)}
		wrong := make([]byte, 16)
		touch := map[string]func(ctx context.Context, c *grpc.ClientConn, id string, secret []byte) error{
			"Acquire": func(ctx context.Context, c *grpc.ClientConn, id string, secret []byte) error {
				_, err := pb.NewLeaseServiceClient(c).Acquire(ctx, &pb.AcquireRequest{SessionId: id, Secret: secret, RequestId: 1, Resource: "lock/" + id})
				return err
			},
			"SetValue": func(ctx context.Context, c *grpc.ClientConn, id string, secret []byte) error {
				_, err := pb.NewLeaseServiceClient(c).SetValue(ctx, &pb.SetValueRequest{SessionId: id, Secret: secret, Token: 1, Resource: "lock/a"})
				return allow(err, codes.FailedPrecondition)
			},
			"CancelAcquire": func(ctx context.Context, c *grpc.ClientConn, id string, secret []byte) error {
				_, err := pb.NewLeaseServiceClient(c).CancelAcquire(ctx, &pb.CancelAcquireRequest{SessionId: id, Secret: secret, RequestId: 1})
				return err
			},
			"Release": func(ctx context.Context, c *grpc.ClientConn, id string, secret []byte) error {
				_, err := pb.NewLeaseServiceClient(c).Release(ctx, &pb.ReleaseRequest{SessionId: id, Secret: secret, Resource: "lock/a", Token: 1})
				return allow(err, codes.FailedPrecondition)
			},
			"Attach": func(ctx context.Context, c *grpc.ClientConn, id string, secret []byte) error {
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				a, err := pb.NewSessionServiceClient(c).Attach(ctx)
				if err != nil {
					return err
				}
				if err := a.Send(&pb.AttachRequest{Kind: &pb.AttachRequest_Keepalive{Keepalive: &pb.Keepalive{SessionId: id, Secret: secret, Sequence: 1}}}); err != nil {
					return err
				}
				_, err = a.Recv()
				return err
			},
			"CloseSession": func(ctx context.Context, c *grpc.ClientConn, id string, secret []byte) error {
				_, err := pb.NewSessionServiceClient(c).CloseSession(ctx, &pb.CloseSessionRequest{SessionId: id, Secret: secret})
				return err
			},
		}
		for name, call := range touch {
			for server, alice := range w.both() {
				for _, c := range []struct {
					who    string
					conn   *grpc.ClientConn
					secret func(s *pb.OpenSessionResponse) []byte
					ok     bool
				}{
					{"the opener without a secret", alice, func(*pb.OpenSessionResponse) []byte { return nil }, true},
					{"the opener with the secret", alice, (*pb.OpenSessionResponse).GetSecret, true},
					{"the opener with a wrong one", alice, func(*pb.OpenSessionResponse) []byte { return wrong }, false},
					{"another with the secret", mallory[server], (*pb.OpenSessionResponse).GetSecret, true},
					{"another without one", mallory[server], func(*pb.OpenSessionResponse) []byte { return nil }, false},
					{"another with a wrong one", mallory[server], func(*pb.OpenSessionResponse) []byte { return wrong }, false},
					{"another with half of it", mallory[server], func(s *pb.OpenSessionResponse) []byte { return s.GetSecret()[:8] }, false},
				} {
					s := open(t, alice)
					err := call(t.Context(), c.conn, s.GetSessionId(), c.secret(s))
					if c.ok && err != nil || !c.ok && (status.Code(err) != codes.InvalidArgument || detail(err).GetInvalid().GetField() != "secret") {
						t.Errorf("%s through the %s, %s: %v", name, server, c.who, err)
					}
				}
			}
		}
	})
}

// allow: a refusal with that code comes after the session is proven.
func allow(err error, code codes.Code) error {
	if status.Code(err) == code {
		return nil
	}
	return err
}
