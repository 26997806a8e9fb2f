package callstream

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Each call's context ends at its own deadline, in whatever order they came,
// and one without a deadline does not.
func TestCallsEndAtTheirDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s calls
		began := time.Now()
		after := map[uint64]time.Duration{1: 5 * time.Second, 2: time.Second, 3: 3 * time.Second, 4: 3*time.Second + late/2, 5: 0, 6: -time.Second}
		ended := map[uint64]chan time.Duration{}
		for id := range uint64(7) {
			c := &callContext{Context: t.Context()}
			if d := after[id]; d != 0 {
				c.at = began.Add(d)
			}
			if !s.add(id, c) {
				t.Fatal(id)
			}
			ended[id] = make(chan time.Duration, 1)
			go func() {
				<-c.Done()
				if after[id] != 0 && !errors.Is(c.Err(), context.DeadlineExceeded) || after[id] == 0 && !errors.Is(c.Err(), context.Canceled) {
					t.Errorf("call %d ended by %v", id, c.Err())
				}
				ended[id] <- time.Since(began)
			}()
		}
		time.Sleep(10 * time.Second)
		s.end(context.Canceled)
		for id, ch := range ended {
			want := max(after[id], 0)
			if after[id] == 0 {
				want = 10 * time.Second
			}
			if got := <-ch; got < want || got > want+late {
				t.Errorf("call %d ended after %v, not %v", id, got, want)
			}
		}
		late := &callContext{Context: t.Context()}
		if s.add(9, late); late.Err() == nil {
			t.Error("a call of an ended stream goes on")
		}
	})
}

// An answered call's deadline wakes nobody, and a stream's timer is set anew
// only for a call that is due before it.
func TestAnAnsweredCallIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s calls
		for id := range uint64(100) {
			c := &callContext{Context: t.Context(), at: time.Now().Add(5 * time.Second)}
			if !s.add(id, c) {
				t.Fatal("not added")
			}
			if s.add(id, c) {
				t.Fatal("added again")
			}
			s.mu.Lock()
			got := time.Until(s.armed)
			s.mu.Unlock()
			if got > 5*time.Second || got < 4*time.Second {
				t.Fatalf("the timer fires in %v", got)
			}
			time.Sleep(10 * time.Millisecond)
			s.remove(id, c)
			if !errors.Is(c.Err(), context.Canceled) {
				t.Fatal(c.Err())
			}
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.armed.IsZero() || len(s.open) != 0 {
			t.Errorf("armed for %v, %d open", s.armed, len(s.open))
		}
	})
}

// Children follow without a goroutine each, with the parent's error.
func TestChildrenFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &callContext{Context: t.Context()}
		child, stop := context.WithTimeout(c, time.Minute)
		defer stop()
		left, leave := context.WithCancel(c)
		leave()
		if len(c.after) != 1 || left.Err() == nil {
			t.Fatalf("%d children, %v", len(c.after), left.Err())
		}
		c.cancel(context.DeadlineExceeded)
		synctest.Wait()
		if !errors.Is(child.Err(), context.DeadlineExceeded) || !errors.Is(context.Cause(c), context.DeadlineExceeded) {
			t.Errorf("the child ended by %v, the parent by %v", child.Err(), context.Cause(c))
		}
		later, stop := context.WithCancel(c)
		defer stop()
		synctest.Wait()
		if later.Err() == nil {
			t.Error("a child of an ended call goes on")
		}
		if _, open := <-c.Done(); open {
			t.Error("not done")
		}
	})
}

// fake is a stream of calls from a test.
type fake struct {
	grpc.ServerStream
	ctx  context.Context
	sent chan *pb.CallsRequest
}

func (f *fake) Context() context.Context { return f.ctx }

func (f *fake) Send(*pb.CallsResponse) error { return nil }

func (f *fake) Recv() (*pb.CallsRequest, error) {
	select {
	case r := <-f.sent:
		return r, nil
	case <-f.ctx.Done():
		return nil, f.ctx.Err()
	}
}

// A second call of an open one's id would leave the first without a deadline.
func TestAnIdInUseEndsTheStream(t *testing.T) {
	ended := make(chan error, 1)
	s := &Server{}
	s.RegisterService(&grpc.ServiceDesc{ServiceName: "s", Methods: []grpc.MethodDesc{{
		MethodName: "m",
		Handler: func(_ any, ctx context.Context, _ func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			<-ctx.Done()
			ended <- ctx.Err()
			return nil, ctx.Err()
		},
	}}}, nil)
	f := &fake{ctx: t.Context(), sent: make(chan *pb.CallsRequest, 1)}
	f.sent <- &pb.CallsRequest{Calls: []*pb.Call{{Id: 1, Method: "/s/m"}, {Id: 1, Method: "/s/m"}}}
	if err := s.Calls(f); status.Code(err) != codes.InvalidArgument {
		t.Errorf("the stream ended by %v", err)
	}
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the call ended by %v", err)
	}
}
