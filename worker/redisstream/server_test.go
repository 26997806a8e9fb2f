package redisstream

import (
	"path/filepath"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/internal/redisserver"
)

// server is a real redis-server that forgets nothing.
type server struct {
	*redisserver.Server
	t testing.TB
}

func startServer(t testing.TB) *server {
	t.Helper()
	s, err := redisserver.New(filepath.Join(t.TempDir(), "redis"), redisserver.Durable()...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return &server{s, t}
}

func (s *server) kill() { s.Kill() }

func (s *server) start() {
	if err := s.Start(); err != nil {
		s.t.Error(err)
	}
}

func (s *server) client() *redis.Client {
	c := redis.NewClient(&redis.Options{Network: "unix", Addr: s.Socket(), ContextTimeoutEnabled: true})
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}
