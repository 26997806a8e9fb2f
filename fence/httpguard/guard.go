// Package httpguard is a fence guard for HTTP handlers: a request names the resource it
// works on and its fencing token, and one with a token lower than one seen before is
// refused.
//
// # Protocol
//
//	Fencing-Resource: orders/7
//	Fencing-Token: 4294967297
//	Fencing-Claim: true          (a new holder's first request)
//
// A claim raises the mark and waits until handlers of lower tokens have ended, whose
// contexts end if the store can tell them; then the request is handled as any other. Claims
// makes a handler that does nothing but claim. Refusals are JSON: 412 for a stale
// token (fence.StaleError), 428 for a resource that nobody claimed (fence.UnclaimedError), 400 for
// headers that are missing or no token, 503 if the marks are out of reach.
//
// What is guaranteed is what the store of marks guarantees. Several processes that serve the same
// resources need one that is shared; New refuses any other.
package httpguard

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/markstore"
)

// Headers of a request.
const (
	HeaderToken    = "Fencing-Token"
	HeaderResource = "Fencing-Resource"
	HeaderClaim    = "Fencing-Claim"
)

// Config of a Guard.
type Config struct {
	// Store of the marks.
	Store markstore.Store
	// Replicas is how many processes serve the same resources, this one included. Needed.
	Replicas int
	// Resource that a request works on; default: as its header says. With paths that name
	// the resource, take it from there, so that a request cannot name another one.
	Resource func(*http.Request) (string, error)
	// Logger defaults to slog.Default().
	Logger *slog.Logger
}

// Guard wraps handlers. It is safe for concurrent use.
type Guard struct{ cfg Config }

// New returns a guard. It refuses replicas beyond one whose store of marks is not shared.
func New(cfg Config) (*Guard, error) {
	if err := markstore.Check(cfg.Store, cfg.Replicas); err != nil {
		return nil, fmt.Errorf("http guard: %w", err)
	}
	if cfg.Resource == nil {
		cfg.Resource = func(r *http.Request) (string, error) { return r.Header.Get(HeaderResource), nil }
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Guard{cfg}, nil
}

// Wrap guards a handler. Its request's context ends, with a *fence.StaleError as cause,
// when a higher token came, if the store can tell; the new holder waits until the handler has
// returned.
func (g *Guard) Wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		resource, token, ok := g.enter(w, r)
		if !ok {
			return
		}
		if r.Header.Get(HeaderClaim) == "true" {
			if err := g.cfg.Store.Claim(r.Context(), resource, token); err != nil {
				g.refuse(w, r, err)
				return
			}
		}
		began := false
		err := g.cfg.Store.Do(r.Context(), resource, token, func(ctx context.Context) error {
			began = true
			next.ServeHTTP(w, r.WithContext(ctx))
			return nil
		})
		switch {
		case err != nil && !began:
			g.refuse(w, r, err)
		case err != nil: // the answer is out
			g.cfg.Logger.Error("a request was handled, and its guard failed afterwards", "resource", resource, "token", token.String(), "error", err)
		}
	})
}

// Claims is a handler of POST requests that only claim: 204 once the mark is raised and no
// handler of a lower token runs.
func (g *Guard) Claims() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			w.Header().Set("Allow", http.MethodPost)
			http.Error(w, "a claim is a POST", http.StatusMethodNotAllowed)
			return
		}
		resource, token, ok := g.enter(w, r)
		if !ok {
			return
		}
		if err := g.cfg.Store.Claim(r.Context(), resource, token); err != nil {
			g.refuse(w, r, err)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
}

// enter reads the headers, and answers if they are no good.
func (g *Guard) enter(w http.ResponseWriter, r *http.Request) (string, fence.Token, bool) {
	resource, err := g.cfg.Resource(r)
	if err == nil && resource == "" {
		err = fmt.Errorf("%s: missing; name the leased resource", HeaderResource)
	}
	if err != nil {
		answer(w, http.StatusBadRequest, Problem{Error: problemBad, Text: err.Error()})
		return "", 0, false
	}
	token, err := fence.ParseToken(r.Header.Get(HeaderToken))
	if err != nil {
		answer(w, http.StatusBadRequest, Problem{Error: problemBad, Resource: resource, Text: HeaderToken + ": " + err.Error()})
		return "", 0, false
	}
	return resource, token, true
}

func (g *Guard) refuse(w http.ResponseWriter, r *http.Request, err error) {
	var stale *fence.StaleError
	var unclaimed *fence.UnclaimedError
	switch {
	case errors.As(err, &stale):
		answer(w, http.StatusPreconditionFailed, Problem{Error: problemStale, Resource: stale.Resource, Seen: stale.Seen, Given: stale.Given, Text: stale.Error()})
	case errors.As(err, &unclaimed):
		answer(w, http.StatusPreconditionRequired, Problem{Error: problemUnclaimed, Resource: unclaimed.Resource, Text: unclaimed.Error()})
	default:
		if r.Context().Err() == nil {
			g.cfg.Logger.Warn("a guarded request was not handled: its mark could not be looked at", "error", err)
		}
		answer(w, http.StatusServiceUnavailable, Problem{Error: problemStore, Text: "the fencing marks are out of reach; try again"})
	}
}

// Kinds of problems.
const (
	problemStale     = "stale"
	problemUnclaimed = "unclaimed"
	problemBad       = "bad_request"
	problemStore     = "unavailable"
)

// Problem is the body of a refusal.
type Problem struct {
	// Error is stale, unclaimed, bad_request or unavailable.
	Error    string      `json:"error"`
	Resource string      `json:"resource,omitempty"`
	Seen     fence.Token `json:"seen,omitempty"`
	Given    fence.Token `json:"given,omitempty"`
	Text     string      `json:"text"`
}

func answer(w http.ResponseWriter, status int, p Problem) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(p)
}

// SetHeaders says in a request what it works on, and with which token. claim is for the first
// request of a new holder, and only while lease.Valid().
func SetHeaders(h http.Header, resource string, token fence.Token, claim bool) {
	h.Set(HeaderResource, resource)
	h.Set(HeaderToken, token.String())
	h.Del(HeaderClaim)
	if claim {
		h.Set(HeaderClaim, "true")
	}
}

// maxProblem bounds the body of a refusal that is read.
const maxProblem = 64 << 10

// Refusal returns the *fence.StaleError or *fence.UnclaimedError that a response is, else
// nil. Of one that may be a refusal it reads the body.
func Refusal(res *http.Response) error {
	if res.StatusCode != http.StatusPreconditionFailed && res.StatusCode != http.StatusPreconditionRequired {
		return nil
	}
	var p Problem
	if err := json.NewDecoder(io.LimitReader(res.Body, maxProblem)).Decode(&p); err != nil {
		return nil //nolint:nilerr // somebody else's answer
	}
	switch p.Error {
	case problemStale:
		return &fence.StaleError{Resource: p.Resource, Seen: p.Seen, Given: p.Given}
	case problemUnclaimed:
		return &fence.UnclaimedError{Resource: p.Resource}
	}
	return nil
}
