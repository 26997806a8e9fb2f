package httpguard_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/fencetest"
	"github.com/headlease/headlease/fence/httpguard"
	"github.com/headlease/headlease/fence/inprocess"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// site is a server with one value per resource, and its client.
type site struct {
	*httptest.Server
	mu     sync.Mutex
	values map[string]string
}

func (s *site) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.values[r.Header.Get(httpguard.HeaderResource)] = string(body)
}

func start(t testing.TB, handler http.Handler) *site {
	t.Helper()
	s := &site{values: map[string]string{}}
	if handler == nil {
		handler = s
	}
	g, err := httpguard.New(httpguard.Config{Store: inprocess.New(inprocess.Options{}), Replicas: 1, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("/write", g.Wrap(handler))
	mux.Handle("/claim", g.Claims())
	s.Server = httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s
}

func (s *site) send(ctx context.Context, path, resource string, token fence.Token, claim bool, body string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+path, strings.NewReader(body))
	if err != nil {
		return err
	}
	httpguard.SetHeaders(req.Header, resource, token, claim)
	res, err := s.Client().Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if err := httpguard.Refusal(res); err != nil {
		return err
	}
	if res.StatusCode/100 != 2 {
		text, _ := io.ReadAll(res.Body)
		return fmt.Errorf("status %d: %s", res.StatusCode, text)
	}
	return nil
}

func (s *site) Claim(ctx context.Context, resource string, token fence.Token) error {
	return s.send(ctx, "/claim", resource, token, false, "")
}

func (s *site) Write(ctx context.Context, resource string, token fence.Token, value string) error {
	return s.send(ctx, "/write", resource, token, false, value)
}

func (s *site) Value(_ context.Context, resource string) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.values[resource], nil
}

func TestGuardAgainstModel(t *testing.T) { fencetest.Run(t, start(t, nil), "orders/") }

func token(t testing.TB, epoch fence.Epoch, seq fence.Seq) fence.Token {
	t.Helper()
	tok, err := fence.NewToken(epoch, seq)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// A request that claims ends the context of a handler with a lower token, and is handled when
// that has returned.
func TestF15AClaimCancelsHandlersAndWaits(t *testing.T) {
	running, end := make(chan struct{}), make(chan struct{})
	low, high := token(t, 1, 1), token(t, 1, 2)
	var mu sync.Mutex
	var order []string
	note := func(s string) {
		mu.Lock()
		defer mu.Unlock()
		order = append(order, s)
	}
	s := start(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.Header.Get(httpguard.HeaderToken) == high.String() {
			note("new")
			return
		}
		close(running)
		<-r.Context().Done()
		var stale *fence.StaleError
		if cause := context.Cause(r.Context()); !errors.As(cause, &stale) || stale.Seen != high {
			t.Errorf("the handler's context ended with %v", cause)
		}
		<-end
		note("old")
	}))
	if err := s.Claim(t.Context(), "r", low); err != nil {
		t.Fatal(err)
	}
	old, taken := make(chan error, 1), make(chan error, 1)
	go func() { old <- s.Write(t.Context(), "r", low, "") }()
	<-running
	go func() { taken <- s.send(t.Context(), "/write", "r", high, true, "") }()
	close(end)
	if err := errors.Join(<-old, <-taken); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(order, " "); got != "old new" {
		t.Errorf("handled in the order %s", got)
	}
}

func TestHeadersThatAreNoGood(t *testing.T) {
	s := start(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("handled") }))
	for name, test := range map[string]struct {
		path, resource, token, method string
		status                        int
		want                          string
	}{
		"no resource":  {"/write", "", "4294967297", "POST", 400, "Fencing-Resource: missing"},
		"no token":     {"/write", "r", "", "POST", 400, "Fencing-Token: fencing token"},
		"another form": {"/write", "r", "04294967297", "POST", 400, "not a plain decimal"},
		"too large":    {"/claim", "r", "9007199254740993", "POST", 400, "out of range"},
		"a GET claim":  {"/claim", "r", "4294967297", "GET", 405, "a claim is a POST"},
		"nobody's":     {"/write", "r", "4294967297", "POST", 428, "no token has claimed it"},
	} {
		req, err := http.NewRequestWithContext(t.Context(), test.method, s.URL+test.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set(httpguard.HeaderResource, test.resource)
		req.Header.Set(httpguard.HeaderToken, test.token)
		res, err := s.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if res.StatusCode != test.status || !strings.Contains(string(body), test.want) {
			t.Errorf("%s: %d %s", name, res.StatusCode, body)
		}
	}
}

func TestReplicasNeedASharedStore(t *testing.T) {
	_, err := httpguard.New(httpguard.Config{Store: inprocess.New(inprocess.Options{}), Replicas: 2})
	if err == nil || !strings.Contains(err.Error(), "use a shared one") {
		t.Errorf("two replicas with marks in memory: %v", err)
	}
}

// A store that fails lets nothing through.
type broken struct{}

func (broken) Shared() bool { return true }
func (broken) Claim(context.Context, string, fence.Token) error {
	return errors.New("out of reach")
}

func (broken) Do(context.Context, string, fence.Token, func(context.Context) error) error {
	return errors.New("out of reach")
}

func TestWithoutMarksNothingIsHandled(t *testing.T) {
	g, err := httpguard.New(httpguard.Config{Store: broken{}, Replicas: 3, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	for name, h := range map[string]http.Handler{
		"write": g.Wrap(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("handled") })), "claim": g.Claims(),
	} {
		req := httptest.NewRequest(http.MethodPost, "/", nil)
		httpguard.SetHeaders(req.Header, "r", token(t, 1, 1), false)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req)
		if w.Code != http.StatusServiceUnavailable || strings.Contains(w.Body.String(), "out of reach") && !strings.Contains(w.Body.String(), "try again") {
			t.Errorf("%s: %d %s", name, w.Code, w.Body)
		}
	}
}

func TestAnswersOfOthersAreNoRefusals(t *testing.T) {
	for _, res := range []*http.Response{
		{StatusCode: 412, Body: io.NopCloser(strings.NewReader("<html>"))},
		{StatusCode: 412, Body: io.NopCloser(strings.NewReader(`{"error":"etag"}`))},
		{StatusCode: 200, Body: io.NopCloser(strings.NewReader(`{"error":"stale"}`))},
	} {
		if err := httpguard.Refusal(res); err != nil {
			t.Errorf("%+v: %v", res, err)
		}
	}
}
