// Package redisserver runs real redis-server processes of its own, for tests,
// drills and examples: each has a data directory that outlives a restart and a
// unix socket, those of a cluster also a port on loopback.
package redisserver

import (
	"bufio"
	"context"
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
	port         int  // 0: none
	tls          bool // the port's connections are
	// watched is the address of the server that this one, a sentinel, watches under
	// the name.
	watched, name string
	settings      []string
	cmd           *exec.Cmd
	logged        chan struct{} // closed at the end of the process's log
}

// New starts a server with its data in dir, which is made if its parent exists. settings
// are arguments of redis-server, such as "--maxmemory", "2mb". The caller
// closes the server.
func New(dir string, settings ...string) (*Server, error) { return newServer(dir, 0, settings) }

// NewTLS starts a server with a port on loopback, besides its socket, whose connections are
// TLS with the certificate and key in these PEM files; it asks its clients for none.
func NewTLS(ctx context.Context, dir, certFile, keyFile string, settings ...string) (*Server, error) {
	ports, err := freePorts(ctx, 1)
	if err != nil {
		return nil, err
	}
	s := &Server{dir: dir, port: ports[0], tls: true}
	s.settings = append([]string{
		"--tls-cert-file", certFile, "--tls-key-file", keyFile, "--tls-ca-cert-file", certFile, "--tls-auth-clients", "no",
	}, settings...)
	return s, s.create()
}

func newServer(dir string, port int, settings []string) (*Server, error) {
	s := &Server{dir: dir, port: port, settings: settings}
	return s, s.create()
}

// create starts it for the first time; after an error nothing is left but dir.
func (s *Server) create() (err error) {
	if err := os.Mkdir(s.dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	// Not below dir: a socket's path has 108 bytes at most.
	if s.sockets, err = os.MkdirTemp("", "redis"); err != nil {
		return err
	}
	if err := s.Start(); err != nil {
		return errors.Join(err, os.RemoveAll(s.sockets))
	}
	return nil
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
	if s.watched != "" {
		return s.startSentinel()
	}
	args := []string{"--bind", "127.0.0.1", "--unixsocket", s.Socket(), "--dir", s.dir, "--save", "", "--daemonize", "no"}
	if s.tls {
		args = append(args, "--port", "0", "--tls-port", fmt.Sprint(s.port))
	} else {
		args = append(args, "--port", fmt.Sprint(s.port))
	}
	return s.launch(append(args, s.settings...), func(line string) bool {
		// Redis 7.0 says "The server is now ready to accept connections at",
		// later ones "Ready to accept connections unix"; of several it is the
		// socket's line that comes last.
		return strings.Contains(strings.ToLower(line), "ready to accept connections") &&
			(strings.Contains(line, s.Socket()) || strings.Contains(line, "connections unix"))
	})
}

// launch starts the process and returns at the line that says that it is ready.
func (s *Server) launch(args []string, ready func(line string) bool) error {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return fmt.Errorf("%w: install the package redis-server", err)
	}
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
		if ready(lines.Text()) {
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
