package redisserver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// NewSentinel starts a sentinel, with its configuration in dir, that watches a server
// with a port under the name. Alone, it decides on failovers: once the server was away for
// three seconds.
func NewSentinel(ctx context.Context, dir, name string, watched *Server) (*Server, error) {
	ports, err := freePorts(ctx, 1)
	if err != nil {
		return nil, err
	}
	s := &Server{dir: dir, port: ports[0], watched: fmt.Sprintf("127.0.0.1 %d", watched.port), name: name}
	return s, s.create()
}

// startSentinel writes what it was told when it was new: a sentinel rewrites its
// configuration as it goes.
func (s *Server) startSentinel() error {
	config := fmt.Sprintf(`port %d
bind 127.0.0.1
dir %s
sentinel monitor %[3]s %[4]s 1
sentinel down-after-milliseconds %[3]s 3000
sentinel failover-timeout %[3]s 10000
`, s.port, s.dir, s.name, s.watched)
	path := filepath.Join(s.dir, "sentinel.conf")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		return err
	}
	return s.launch(append([]string{path, "--sentinel"}, s.settings...), func(line string) bool { return strings.Contains(line, "+monitor master") })
}
