// Package pgserver runs a real PostgreSQL server of its own for tests, drills and
// examples: one data directory, one unix socket, no TCP port, everything synced
// to disk as in production.
package pgserver

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// Server is a running PostgreSQL server. Its methods are for one goroutine.
type Server struct {
	dir, bin, sockets string
	settings          []string
	owner             *syscall.Credential // nil: this process's own
	cmd               *exec.Cmd
	logged            chan struct{} // closed at the end of the process's log
}

// Find returns the directory of PostgreSQL's programs: of the one in PATH, else the
// newest that Debian's packages installed.
func Find() (string, error) {
	if path, err := exec.LookPath("postgres"); err == nil {
		if path, err = filepath.EvalSymlinks(path); err == nil {
			return filepath.Dir(path), nil
		}
	}
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	if err != nil || len(found) == 0 {
		return "", errors.New("postgres is not installed; install the package postgresql")
	}
	slices.SortFunc(found, func(a, b string) int { return version(a) - version(b) })
	return filepath.Dir(found[len(found)-1]), nil
}

func version(path string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(path))))
	return n
}

// New makes a database cluster in dir, which must not exist, and starts its server, whose
// log is at LogPath. settings are "name=value" of postgresql.conf. PostgreSQL refuses to run as root: then it
// runs as user postgres, or nobody.
func New(ctx context.Context, dir string, settings ...string) (*Server, error) {
	bin, err := Find()
	if err != nil {
		return nil, err
	}
	s := &Server{dir: dir, bin: bin, settings: settings}
	if s.owner, err = unprivileged(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	// Not below dir: a socket's path has 108 bytes at most.
	if s.sockets, err = os.MkdirTemp("", "pg"); err != nil {
		return nil, err
	}
	for _, d := range []string{dir, s.sockets} {
		if err := s.give(d); err != nil {
			return nil, errors.Join(err, os.RemoveAll(s.sockets))
		}
	}
	initdb := exec.CommandContext(ctx, filepath.Join(bin, "initdb"), "-D", dir, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	s.as(initdb)
	if out, err := initdb.CombinedOutput(); err != nil {
		return nil, errors.Join(fmt.Errorf("initdb: %w\n%s", err, out), os.RemoveAll(s.sockets))
	}
	if err := s.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(s.sockets))
	}
	return s, nil
}

// unprivileged is whom the server runs as; nil if this process is not root.
func unprivileged() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("postgres does not run as root, and there is neither a user postgres nor nobody")
}

// give makes a directory the server's, and lets it pass those above.
func (s *Server) give(dir string) error {
	if s.owner == nil {
		return nil
	}
	if err := os.Chown(dir, int(s.owner.Uid), int(s.owner.Gid)); err != nil {
		return err
	}
	temp := filepath.Clean(os.TempDir())
	for up := filepath.Dir(dir); strings.HasPrefix(up, temp+string(filepath.Separator)); up = filepath.Dir(up) {
		info, err := os.Stat(up)
		if err != nil {
			return err
		}
		if err := os.Chmod(up, info.Mode().Perm()|0o011); err != nil {
			return err
		}
	}
	return nil
}

// as runs a command as the server's user, in a process group of its own, and
// ended with this process.
func (s *Server) as(cmd *exec.Cmd) {
	cmd.Dir = s.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGQUIT, Credential: s.owner}
}

// Start starts the server again, after Kill or Stop, and returns when it takes
// connections.
func (s *Server) Start() error {
	// A killed postmaster leaves its pid file; its pid may be somebody else's by now.
	if err := os.Remove(filepath.Join(s.dir, "postmaster.pid")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	args := []string{"-D", s.dir, "-k", s.sockets, "-c", "listen_addresses=", "-c", "log_min_messages=warning"}
	for _, setting := range s.settings {
		args = append(args, "-c", setting)
	}
	file, err := os.OpenFile(s.LogPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	cmd := exec.Command(filepath.Join(s.bin, "postgres"), args...)
	s.as(cmd)
	pipe, err := cmd.StderrPipe()
	if err != nil {
		return errors.Join(err, file.Close())
	}
	if err := cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("start postgres: %w", err), file.Close())
	}
	logged := make(chan struct{})
	out := io.TeeReader(pipe, file)
	lines, log := bufio.NewScanner(out), strings.Builder{}
	for lines.Scan() {
		log.WriteString(lines.Text() + "\n")
		if strings.Contains(lines.Text(), "is ready to accept connections") {
			go func() {
				defer close(logged)
				defer func() { _ = file.Close() }()
				_, _ = io.Copy(io.Discard, out)
			}()
			s.cmd, s.logged = cmd, logged
			return nil
		}
	}
	return errors.Join(fmt.Errorf("postgres did not start: %w\n%s", cmd.Wait(), log.String()), file.Close())
}

// LogPath is the server's log, of all its lives: beside its data directory.
func (s *Server) LogPath() string { return s.dir + ".log" }

// DSN is where clients connect to.
func (s *Server) DSN() string {
	return fmt.Sprintf("host=%s user=postgres dbname=postgres", s.sockets)
}

// Kill is kill -9 of all the server's processes.
func (s *Server) Kill() { s.end(syscall.SIGKILL) }

// Stop ends the server in order, without waiting for its clients.
func (s *Server) Stop() { s.end(syscall.SIGINT) }

// Freeze stops the server's processes where they are, until Thaw.
func (s *Server) Freeze() error { return syscall.Kill(-s.cmd.Process.Pid, syscall.SIGSTOP) }

// Thaw lets them go on.
func (s *Server) Thaw() error { return syscall.Kill(-s.cmd.Process.Pid, syscall.SIGCONT) }

func (s *Server) end(sig syscall.Signal) {
	if s.cmd == nil {
		return
	}
	target := s.cmd.Process.Pid
	if sig == syscall.SIGKILL {
		target = -target
	}
	_ = syscall.Kill(target, sig)
	<-s.logged
	_ = s.cmd.Wait()
	s.cmd = nil
}

// Close kills the server and removes its socket; the data stays.
func (s *Server) Close() error {
	s.Kill()
	return os.RemoveAll(s.sockets)
}
