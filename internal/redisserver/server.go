// Package redisserver runs real redis-server processes of its own, for tests,
// drills and examples: each has a data directory that outlives a restart and a
// unix socket, those of a cluster also a port on loopback.
package redisserver

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// Durable are the settings with which a server forgets nothing that it
// acknowledged.
func Durable() []string { return []string{"--appendonly", "yes", "--appendfsync", "always"} }

// Server is a redis-server. Its methods are for one goroutine.
type Server struct {
	dir, sockets string
	port         int // 0: none
	settings     []string
	cmd          *exec.Cmd
	logged       chan struct{} // closed at the end of the process's log
}

// New starts a server with its data in dir, which is made if its parent exists. settings
// are arguments of redis-server, such as "--maxmemory", "2mb". The caller
// closes the server.
func New(dir string, settings ...string) (*Server, error) { return newServer(dir, 0, settings) }

func newServer(dir string, port int, settings []string) (*Server, error) {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	// Not below dir: a socket's path has 108 bytes at most.
	sockets, err := os.MkdirTemp("", "redis")
	if err != nil {
		return nil, err
	}
	s := &Server{dir: dir, sockets: sockets, port: port, settings: settings}
	if err := s.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(sockets))
	}
	return s, nil
}

// Socket is the path at which clients reach the server; go-redis takes it as an
// address.
func (s *Server) Socket() string { return filepath.Join(s.sockets, "s") }

// Address is host:port; empty for a server without a port.
func (s *Server) Address() string {
	if s.port == 0 {
		return ""
	}
	return fmt.Sprintf("127.0.0.1:%d", s.port)
}

// Set changes the settings of the next Start: those given are added, and win.
func (s *Server) Set(settings ...string) { s.settings = append(s.settings, settings...) }

// Start starts the server again, after Kill or Stop, and returns when it takes
// connections.
func (s *Server) Start() error {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return fmt.Errorf("%w: install the package redis-server", err)
	}
	args := append([]string{
		"--port", fmt.Sprint(s.port), "--bind", "127.0.0.1", "--unixsocket", s.Socket(), "--dir", s.dir, "--save", "", "--daemonize", "no",
	}, s.settings...)
	cmd := exec.Command(path, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start redis-server: %w", err)
	}
	logged := make(chan struct{})
	lines, log := bufio.NewScanner(out), strings.Builder{}
	for lines.Scan() {
		log.WriteString(lines.Text() + "\n")
		// Redis 7.0 says "The server is now ready to accept connections at",
		// later ones "Ready to accept connections unix"; of several it is the
		// socket's line that comes last.
		line := strings.ToLower(lines.Text())
		if strings.Contains(line, "ready to accept connections") && (strings.Contains(line, s.Socket()) || strings.Contains(line, "connections unix")) {
			go func() {
				defer close(logged)
				_, _ = io.Copy(io.Discard, out)
			}()
			s.cmd, s.logged = cmd, logged
			return nil
		}
	}
	return fmt.Errorf("redis-server did not start: %w\n%s", cmd.Wait(), log.String())
}

// Kill is kill -9.
func (s *Server) Kill() { s.end(syscall.SIGKILL) }

// Stop ends the server in order.
func (s *Server) Stop() { s.end(syscall.SIGTERM) }

// Freeze stops the process where it is, until Thaw or Kill.
func (s *Server) Freeze() error { return s.cmd.Process.Signal(syscall.SIGSTOP) }

// Thaw lets it go on.
func (s *Server) Thaw() error { return s.cmd.Process.Signal(syscall.SIGCONT) }

func (s *Server) end(sig syscall.Signal) {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Signal(sig)
	<-s.logged
	_ = s.cmd.Wait()
	s.cmd = nil
}

// Close kills the server and removes its socket; the data stays.
func (s *Server) Close() error {
	s.Kill()
	return os.RemoveAll(s.sockets)
}
