package witness

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/clock"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestNeverAnsweredBeforeDurable(t *testing.T) {
	r := newRig(t)
	entered, release := make(chan struct{}), make(chan struct{})
	var before string
	r.disk.set(func(string) error {
		before = copyData(t, r.dir)
		close(entered)
		<-release
		return nil
	})
	type answer struct {
		resp *pb.PrepareResponse
		err  error
	}
	answers := make(chan answer, 1)
	go func() {
		resp, err := r.prepare(context.Background(), prepareOf(eu, 3, "p"))
		answers <- answer{resp, err}
	}()
	<-entered
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.describe(ctx); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a caller with a dead context waits for the disk: %v", err)
	}
	select {
	case a := <-answers:
		t.Fatalf("answered before it was durable: %v", a)
	default:
	}
	close(release)
	a := <-answers
	if a.err != nil || a.resp.GetAnswers()[0].GetRefusal() != nil {
		t.Fatalf("answer: %v", a)
	}
	after := copyData(t, r.dir) // a crash right after the answer
	for dir, want := range map[string]register.Ballot{before: {}, after: ballot(3, eu)} {
		s := start(t, dir, &disk{})
		if got := s.registers["p"].Promised; got != want {
			t.Errorf("promised on disk %v, want %v", got, want)
		}
		_ = s.store.close()
	}
}

func TestAFailedWriteSilencesTheVoter(t *testing.T) {
	r := newRig(t)
	r.mustPrepare(t, prepareOf(eu, 1, "p"))
	broken := errors.New("input/output error")
	r.disk.set(func(string) error { return broken })
	if _, err := r.accept(t.Context(), acceptOf(eu, 1, 1, "p")); status.Code(err) != codes.Unavailable {
		t.Fatalf("accept on a broken disk: %v", err)
	}
	if len(r.failures) != 1 || !errors.Is(r.failures[0], broken) {
		t.Errorf("failures told: %v", r.failures)
	}
	r.disk.set(nil) // it works again, but nobody knows what it holds
	for name, call := range map[string]func() error{
		"accept":   func() error { _, err := r.accept(t.Context(), acceptOf(eu, 1, 1, "p")); return err },
		"prepare":  func() error { _, err := r.prepare(t.Context(), prepareOf(eu, 2, "p")); return err },
		"describe": func() error { _, err := r.describe(t.Context()); return err },
		"dry": func() error {
			_, err := r.prepare(t.Context(), &pb.PrepareRequest{Header: header(eu), Dry: true})
			return err
		},
	} {
		if err := call(); status.Code(err) != codes.Unavailable {
			t.Errorf("%s after the failure: %v", name, err)
		}
	}
	if r.registers["p"].Accepted != (register.Ballot{}) {
		t.Error("the failed value was installed")
	}
}

// slowStore is a durable that takes its time.
type slowStore struct{ takes time.Duration }

func (s slowStore) write(map[string]register.Record, uint64) error { time.Sleep(s.takes); return nil }
func (s slowStore) configure(config.Voter, uint64) error {
	time.Sleep(s.takes)
	return nil
}
func (s slowStore) decide(config.Register, uint64) error { time.Sleep(s.takes); return nil }
func (s slowStore) stop(*pb.EraStop, uint64) error       { time.Sleep(s.takes); return nil }
func (slowStore) close() error                           { return nil }

func TestF30AHangingDiskEndsTheProcess(t *testing.T) {
	for _, c := range []struct {
		takes time.Duration
		exits int
	}{{storeLimit - time.Millisecond, 0}, {storeLimit + time.Millisecond, 1}, {time.Hour, 1}} {
		synctest.Test(t, func(t *testing.T) {
			var exits []int
			v := &voter{
				id: "witness/w1", name: "w1", cluster: "test", clock: clock.NewRuntime(), suspects: suspects{}, logger: quiet(),
				exit: func(code int) { exits = append(exits, code) }, failed: func(error) {}, configured: func(*pb.ClusterConfiguration) {},
			}
			v.load(slowStore{c.takes}, contents{identity: identity{incarnation: 1}})
			r := &rig{voter: v}
			r.setUp(t)
			if len(exits) != c.exits || (c.exits == 1 && exits[0] != exitDiskHangs) {
				t.Errorf("a call of %v: exits %v, want %d", c.takes, exits, c.exits)
			}
		})
	}
}
