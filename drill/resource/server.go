package resource

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"
)

const (
	// maxBody holds the largest value, each byte of it escaped.
	maxBody         = 6*MaxValue + 4096
	operationLimit  = 10 * time.Second
	headerLimit     = 5 * time.Second
	shutdownLimit   = 3 * time.Second
	statusClientWas = 499 // the client has gone; nobody reads the answer
)

// Handler serves a store by the paths of this package.
//
// Refusals are 409 (stale) and 428 (unclaimed) with the Entry as body; a request
// that makes no sense is 400 and a failing disk 500, with an error text.
func Handler(s *Store) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+PathClaim, func(w http.ResponseWriter, r *http.Request) {
		operation(w, r, func(ctx context.Context, q Request) (Entry, error) {
			if q.Value != "" {
				return Entry{}, fmt.Errorf("%w: value: a claim has none; leave it out", ErrInvalid)
			}
			return s.Claim(ctx, q.Resource, q.Token, q.Writer)
		})
	})
	mux.HandleFunc("POST "+PathWrite, func(w http.ResponseWriter, r *http.Request) {
		operation(w, r, func(ctx context.Context, q Request) (Entry, error) {
			return s.Write(ctx, q.Resource, q.Token, q.Writer, q.Value)
		})
	})
	mux.HandleFunc("GET "+PathValue, func(w http.ResponseWriter, r *http.Request) {
		name := r.URL.Query().Get("resource")
		if name == "" {
			answer(w, http.StatusBadRequest, problem{"resource: missing; ask for " + PathValue + "?resource=NAME"})
			return
		}
		v := Value{Resource: name, Mark: s.Mark(name)}
		if e, ok := s.Read(name); ok {
			v.Written = &e
		}
		answer(w, http.StatusOK, v)
	})
	mux.HandleFunc("GET "+PathJournal, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/jsonl")
		enc := json.NewEncoder(w)
		for _, e := range s.Journal() {
			if enc.Encode(e) != nil {
				return // the client has gone
			}
		}
	})
	mux.HandleFunc("GET "+PathHealth, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	return mux
}

func operation(w http.ResponseWriter, r *http.Request, do func(context.Context, Request) (Entry, error)) {
	ctx, cancel := context.WithTimeout(r.Context(), operationLimit)
	defer cancel()
	q, err := decodeRequest(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		answer(w, http.StatusBadRequest, problem{err.Error()})
		return
	}
	e, err := do(ctx, q)
	switch {
	case errors.Is(err, ErrInvalid):
		answer(w, http.StatusBadRequest, problem{err.Error()})
	case errors.Is(err, context.Canceled):
		answer(w, statusClientWas, problem{err.Error()})
	case errors.Is(err, context.DeadlineExceeded):
		answer(w, http.StatusGatewayTimeout, problem{err.Error()})
	case err != nil:
		answer(w, http.StatusInternalServerError, problem{err.Error()})
	case e.Outcome == Stale:
		answer(w, http.StatusConflict, e)
	case e.Outcome == Unclaimed:
		answer(w, http.StatusPreconditionRequired, e)
	default:
		answer(w, http.StatusOK, e)
	}
}

func decodeRequest(body io.Reader) (Request, error) {
	var q Request
	dec := json.NewDecoder(body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&q); err != nil {
		return q, fmt.Errorf("body: %w; send {\"resource\",\"token\",\"writer\",\"value\"}", err)
	}
	if dec.More() {
		return q, errors.New("body: has more than one JSON value; send one operation a request")
	}
	return q, nil
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // fails only if the client has gone
}

// Config of a resource process.
type Config struct {
	// Dir of the data.
	Dir string
	// Address on loopback; port 0 takes a free one. Default 127.0.0.1:0.
	Address string
	// UnguardedForDrill turns the guard off: the drill's control run.
	UnguardedForDrill bool
	// Ready is told the address once the resource serves.
	Ready  func(address string)
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Address == "" {
		c.Address = "127.0.0.1:0"
	}
	if c.Ready == nil {
		c.Ready = func(string) {}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// Validate reports all faults at once.
func (c Config) Validate() error {
	var errs []error
	if c.Dir == "" {
		errs = append(errs, errors.New("dir: empty; name a directory for the resource's data"))
	}
	host, _, err := net.SplitHostPort(c.Address)
	if ip := net.ParseIP(host); err != nil || ip == nil || !ip.IsLoopback() {
		errs = append(errs, fmt.Errorf("address %q: not host:port on loopback; the resource has no encryption, use 127.0.0.1:0", c.Address))
	}
	return errors.Join(errs...)
}

// Run serves a resource until ctx ends or serving fails.
func Run(ctx context.Context, c Config) error {
	c = c.withDefaults()
	if err := c.Validate(); err != nil {
		return err
	}
	store, err := OpenStore(c.Dir, c.UnguardedForDrill, func() time.Time { return time.Now().UTC() }, c.Logger)
	if err != nil {
		return err
	}
	l, err := listen(c.Address)
	if err != nil {
		return errors.Join(err, store.Close())
	}
	server := &http.Server{
		Handler:           Handler(store),
		ReadHeaderTimeout: headerLimit,
		ErrorLog:          slog.NewLogLogger(c.Logger.Handler(), slog.LevelWarn),
	}
	stopped := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownLimit)
		defer cancel()
		stopped <- server.Shutdown(limited)
	})
	c.Ready(l.Addr().String())
	err = server.Serve(l)
	if !stop() { // ctx has ended
		err = <-stopped
	}
	return errors.Join(err, server.Close(), store.Close())
}

// listen is the one place where the resource meets the network. It stands for
// a database beside the cluster: it has no identity in it and so no TLS of it,
// and the drills' fault tables do not reach it.
func listen(address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address) //nolint:forbidigo // See above; loopback only.
	if err != nil {
		return nil, fmt.Errorf("address %s of the resource: %w; use 127.0.0.1:0 for a free port", address, err)
	}
	return l, nil
}
