package redisguard

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/redisserver"
)

func TestMain(m *testing.M) {
	redis.SetLogger(quiet{}) // servers die here all the time
	goleak.VerifyTestMain(m)
}

type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

// server is a real redis-server of a test.
type server struct {
	*redisserver.Server
	t testing.TB
}

func startServer(t testing.TB, config ...string) *server {
	t.Helper()
	s, err := redisserver.New(t.TempDir(), config...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return &server{s, t}
}

// again starts the server after its end.
func (s *server) again() {
	s.t.Helper()
	if err := s.Start(); err != nil {
		s.t.Fatal(err)
	}
}

func (s *server) client() *redis.Client { return clientAt(s.t, s.Socket()) }

const patience = 30 * time.Second

func clientAt(t testing.TB, address string) *redis.Client {
	// Patient: these tests are not about a machine that stands still.
	c := redis.NewClient(&redis.Options{Addr: address, ContextTimeoutEnabled: true, ReadTimeout: patience})
	t.Cleanup(func() { c.Close() })
	return c
}

func (s *server) guard(opts Options) (*Guard, *redis.Client) {
	s.t.Helper()
	c := s.client()
	return guardOf(s.t, c, opts), c
}

func guardOf(t testing.TB, c redis.UniversalClient, opts Options) *Guard {
	t.Helper()
	g, err := New(c, opts)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func token(t testing.TB, epoch fence.Epoch, seq fence.Seq) fence.Token {
	t.Helper()
	tok, err := fence.NewToken(epoch, seq)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}
