package telemetry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/headlease/headlease/internal/link"
)

const (
	// readTimeout and writeTimeout bound one request, so that a scraper that
	// stalls holds nothing.
	readTimeout  = 5 * time.Second
	writeTimeout = 30 * time.Second
	// readyTimeout bounds the question whether the process is ready.
	readyTimeout = 2 * time.Second
	// maxScrapes bounds scrapes that run at once.
	maxScrapes = 4
	// stopTimeout is how long requests under way may last when the process stops.
	stopTimeout = time.Second
)

// ServerConfig of a Server; all fields but Logger are needed.
type ServerConfig struct {
	// Address is HOST:PORT or "unix:PATH", as in the cluster file.
	Address  string
	Gatherer prometheus.Gatherer
	// Ready returns nil when the process can serve, else why not. It must not
	// fail because others do (a lost quorum, a partition): an orchestrator would
	// take a whole region out of service.
	Ready  func(context.Context) error
	Logger *slog.Logger
}

// Server serves /metrics, /healthz and /readyz.
type Server struct {
	cfg      ServerConfig
	ln       net.Listener
	http     *http.Server
	stopping atomic.Bool
}

// Listen takes the address. Serve, or Close, must follow.
func Listen(ctx context.Context, cfg ServerConfig) (*Server, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	ln, local, err := link.ListenPlain(ctx, "metrics", cfg.Address)
	if err != nil {
		return nil, err
	}
	if !local {
		cfg.Logger.Warn("metrics are served in plain text beyond this machine, as the cluster file says; keep the address inside a trusted network",
			"address", ln.Addr().String())
	}
	s := &Server{cfg: cfg, ln: ln}
	s.http = &http.Server{
		Handler: s.handler(), ReadTimeout: readTimeout, WriteTimeout: writeTimeout,
		ErrorLog: slog.NewLogLogger(cfg.Logger.Handler(), slog.LevelDebug),
	}
	return s, nil
}

// Addr is where the server listens.
func (s *Server) Addr() net.Addr { return s.ln.Addr() }

// Stopping makes the process not ready from now on; it is about to stop.
func (s *Server) Stopping() { s.stopping.Store(true) }

// Run is Serve as the first part of a process, which stops last: it answers until
// ctx ends, and from the end of process on that the process is not ready. A nil
// Server returns at once.
func (s *Server) Run(process, ctx context.Context) error {
	if s == nil {
		return nil
	}
	defer context.AfterFunc(process, s.Stopping)()
	return s.Serve(ctx)
}

// Serve answers until ctx ends, which is no error.
func (s *Server) Serve(ctx context.Context) error {
	done := make(chan error, 1)
	go func() { done <- s.http.Serve(s.ln) }()
	select {
	case err := <-done:
		return fmt.Errorf("serve metrics: %w", err)
	case <-ctx.Done():
	}
	s.Stopping()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	if err := s.http.Shutdown(grace); err != nil {
		_ = s.http.Close() // a request did not end in time: cut it
	}
	if err := <-done; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}

// Close gives the address back if Serve was not called.
func (s *Server) Close() error {
	if err := s.ln.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.cfg.Gatherer, promhttp.HandlerOpts{
		ErrorLog: slog.NewLogLogger(s.cfg.Logger.Handler(), slog.LevelWarn), ErrorHandling: promhttp.ContinueOnError,
		MaxRequestsInFlight: maxScrapes,
	}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, nil) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), readyTimeout)
		defer cancel()
		answer(w, s.ready(ctx))
	})
	return mux
}

var errStopping = errors.New("the process is stopping")

func (s *Server) ready(ctx context.Context) error {
	if s.stopping.Load() {
		return errStopping
	}
	return s.cfg.Ready(ctx)
}

func answer(w http.ResponseWriter, err error) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	if err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = fmt.Fprintf(w, "not ready: %v\n", err)
		return
	}
	_, _ = fmt.Fprintln(w, "ok")
}
