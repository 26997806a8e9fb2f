package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/httpguard"
	"github.com/headlease/headlease/fence/inprocess"
	"github.com/headlease/headlease/fence/markstore"
	"github.com/headlease/headlease/internal/link"
)

// Stand-ins of --embedded: both live in the process of the run and end with it.

// miniRedis stands in for redis-server. While it is down it refuses all scripts,
// and so all writes, as a server does that reads its log; it forgets nothing.
// (To close a miniredis makes scripts that wait for their turn panic.)
type miniRedis struct {
	*miniredis.Miniredis
	down atomic.Bool
}

func newMiniRedis() (*miniRedis, error) {
	m, err := miniredis.Run()
	if err != nil {
		return nil, err
	}
	r := &miniRedis{Miniredis: m}
	m.Server().SetPreHook(func(c *server.Peer, cmd string, _ ...string) bool {
		// Not the commands of a script that has begun.
		refused := r.down.Load() && (cmd == "EVAL" || cmd == "EVALSHA")
		if refused {
			c.WriteError("LOADING the stand-in is down")
		}
		return refused
	})
	return r, nil
}

func (m *miniRedis) where() string { return m.Addr() }
func (m *miniRedis) Kill()         { m.down.Store(true) }

func (m *miniRedis) Start() error {
	m.down.Store(false)
	return nil
}

func (m *miniRedis) Close() error {
	m.Miniredis.Close()
	return nil
}

// standIn stands in for PostgreSQL: a table in memory, whose handlers
// fence/httpguard guards with marks in memory.
type standIn struct {
	server *http.Server
	url    string
	ended  chan struct{} // closed when server has ended

	mu      sync.Mutex
	orders  map[string]map[uint64]string // body by account and number
	journal []entry
	refused int
}

type entry struct {
	resource string
	token    fence.Token
	account  string
	seq      uint64
}

func newStandIn(ctx context.Context) (*standIn, error) {
	s := &standIn{orders: map[string]map[uint64]string{}, ended: make(chan struct{})}
	guard, err := httpguard.New(httpguard.Config{Store: &countingMarks{inprocess.New(inprocess.Options{}), s}, Replicas: 1})
	if err != nil {
		return nil, err
	}
	ln, err := link.ListenLocal(ctx, "stand-in for PostgreSQL", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("/claim", guard.Claims())
	mux.Handle("/orders", guard.Wrap(http.HandlerFunc(s.write)))
	s.server, s.url = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}, "http://"+ln.Addr().String()
	go func() {
		defer close(s.ended)
		_ = s.server.Serve(ln)
	}()
	return s, nil
}

// countingMarks counts what is refused.
type countingMarks struct {
	markstore.Store
	s *standIn
}

func (c *countingMarks) Claim(ctx context.Context, resource string, token fence.Token) error {
	return c.count(c.Store.Claim(ctx, resource, token))
}

func (c *countingMarks) Do(ctx context.Context, resource string, token fence.Token, effect func(context.Context) error) error {
	return c.count(c.Store.Do(ctx, resource, token, effect))
}

func (c *countingMarks) count(err error) error {
	var stale *fence.StaleError
	if errors.As(err, &stale) {
		c.s.mu.Lock()
		c.s.refused++
		c.s.mu.Unlock()
	}
	return err
}

// write is a guarded handler.
func (s *standIn) write(w http.ResponseWriter, r *http.Request) {
	var in write
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := context.Cause(r.Context()); err != nil { // a new holder waits for this to return
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	for _, o := range in.Orders {
		if s.orders[o.Account] == nil {
			s.orders[o.Account] = map[uint64]string{}
		}
		if _, known := s.orders[o.Account][o.Seq]; !known {
			s.orders[o.Account][o.Seq] = o.Body
		}
		s.journal = append(s.journal, entry{r.Header.Get(httpguard.HeaderResource), in.Token, o.Account, o.Seq})
	}
	w.WriteHeader(http.StatusNoContent)
}

// Orders is book.
func (s *standIn) Orders(context.Context) (n int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, orders := range s.orders {
		n += len(orders)
	}
	return n, nil
}

// Writes is book.
func (s *standIn) Writes(context.Context) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.journal), nil
}

// Accounts is book.
func (s *standIn) Accounts(_ context.Context, each func(account string, count, last uint64)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for account, orders := range s.orders {
		each(account, uint64(len(orders)), slices.Max(slices.Collect(maps.Keys(orders))))
	}
	return nil
}

// Journal is book.
func (s *standIn) Journal(_ context.Context, each func(resource string, token fence.Token, account string, seq uint64)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.journal {
		each(e.resource, e.token, e.account, e.seq)
	}
	return nil
}

// Refused is book.
func (s *standIn) Refused() (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refused, nil
}

// Close is book.
func (s *standIn) Close() {
	_ = s.server.Close()
	<-s.ended
}

// remote is the table of a stand-in in another process.
type remote struct {
	url    string
	client http.Client
}

func newRemote(url string) *remote {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.MaxIdleConnsPerHost = 64
	return &remote{url, http.Client{Transport: t}}
}

func (r *remote) Close() { r.client.CloseIdleConnections() }

// Claim is table.
func (r *remote) Claim(ctx context.Context, resource string, token fence.Token) error {
	return r.post(ctx, "/claim", resource, token, nil)
}

// Write is table.
func (r *remote) Write(ctx context.Context, w write) error {
	return r.post(ctx, "/orders", w.Resource, w.Compared, w)
}

func (r *remote) post(ctx context.Context, path, resource string, token fence.Token, body any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+path, bytes.NewReader(b))
	if err != nil {
		return err
	}
	httpguard.SetHeaders(req.Header, resource, token, false)
	res, err := r.client.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close() //nolint:errcheck // its status says all
	if refused := httpguard.Refusal(res); refused != nil {
		return refused
	}
	if res.StatusCode != http.StatusNoContent {
		return fmt.Errorf("%s: %s", path, res.Status)
	}
	return nil
}
