package redisguard

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/headlease/headlease/fence"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// server is a real redis-server on a unix socket, with its data in a
// directory that outlives a restart.
type server struct {
	t      testing.TB
	dir    string
	socket string
	config []string
	cmd    *exec.Cmd
	logged chan struct{} // closed at the end of the process's log
}

// durable is a configuration that forgets nothing.
var durable = []string{"--appendonly", "yes", "--appendfsync", "always"}

func startServer(t testing.TB, config ...string) *server {
	t.Helper()
	// Not TempDir: a socket's path has 108 bytes at most.
	sockets, err := os.MkdirTemp("", "redis")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{t: t, dir: t.TempDir(), socket: filepath.Join(sockets, "s"), config: config}
	t.Cleanup(func() {
		s.kill()
		os.RemoveAll(sockets)
	})
	s.start()
	return s
}

func (s *server) start() {
	s.t.Helper()
	path, err := exec.LookPath("redis-server")
	if err != nil {
		s.t.Fatalf("%v: install redis-server, or run scripts/need.sh redis-server redis-server", err)
	}
	args := append([]string{"--port", "0", "--unixsocket", s.socket, "--dir", s.dir, "--save", "", "--daemonize", "no"}, s.config...)
	s.cmd = exec.Command(path, args...)
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.logged = make(chan struct{})
	lines, log := bufio.NewScanner(out), strings.Builder{}
	for lines.Scan() {
		log.WriteString(lines.Text() + "\n")
		// Redis 7.0 says "The server is now ready to accept connections at",
		// later ones "Ready to accept connections unix".
		if strings.Contains(strings.ToLower(lines.Text()), "ready to accept connections") ||
			strings.Contains(lines.Text(), "now ready to accept connections") {
			go func() {
				defer close(s.logged)
				_, _ = io.Copy(io.Discard, out)
			}()
			return
		}
	}
	close(s.logged)
	s.t.Fatalf("redis-server did not start:\n%s", log.String())
}

// kill is kill -9.
func (s *server) kill() {
	if s.cmd == nil || s.cmd.Process == nil {
		return
	}
	_ = s.cmd.Process.Kill()
	<-s.logged
	_ = s.cmd.Wait()
	s.cmd = nil
}

// shutdown ends the server in order.
func (s *server) shutdown(client *redis.Client) {
	s.t.Helper()
	// The server closes the connection instead of answering.
	client.Shutdown(s.t.Context())
	<-s.logged
	if err := s.cmd.Wait(); err != nil {
		s.t.Fatalf("redis-server ended badly: %v", err)
	}
	s.cmd = nil
}

func (s *server) client() *redis.Client {
	c := redis.NewClient(&redis.Options{Network: "unix", Addr: s.socket, ContextTimeoutEnabled: true})
	s.t.Cleanup(func() { c.Close() })
	return c
}

func (s *server) guard(opts Options) (*Guard, *redis.Client) {
	s.t.Helper()
	c := s.client()
	g, err := New(c, opts)
	if err != nil {
		s.t.Fatal(err)
	}
	return g, c
}

func token(t testing.TB, epoch fence.Epoch, seq fence.Seq) fence.Token {
	t.Helper()
	tok, err := fence.NewToken(epoch, seq)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}
