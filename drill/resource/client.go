package resource

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/headlease/headlease/fence"
)

// Client is a worker's or a drill's side of a resource. Safe for concurrent
// use. Calls end with their context; none is retried, since a drill wants to
// see every attempt.
type Client struct {
	base   string
	writer string
	http   *http.Client
}

// NewClient talks to the resource at host:port; writer names the caller in the
// journal.
func NewClient(address, writer string) *Client {
	// A connection per call: a worker that was frozen for long would otherwise
	// send its write into a connection that has ended, and show nothing.
	transport := &http.Transport{DisableKeepAlives: true}
	return &Client{base: "http://" + address, writer: writer, http: &http.Client{Transport: transport}}
}

// Claim raises the mark: a new holder's first call, before it reads. A lower
// token than one seen gives a *fence.StaleError, and the Entry of the refusal.
func (c *Client) Claim(ctx context.Context, resource string, token fence.Token) (Entry, error) {
	return c.operation(ctx, PathClaim, Request{Resource: resource, Token: token, Writer: c.writer})
}

// Write sets the value. It fails with a *fence.StaleError or a
// *fence.UnclaimedError if the guard refused it, with the Entry of the refusal.
// After any other error the write may have happened.
func (c *Client) Write(ctx context.Context, resource string, token fence.Token, value string) (Entry, error) {
	return c.operation(ctx, PathWrite, Request{Resource: resource, Token: token, Writer: c.writer, Value: value})
}

// Read returns the value and the mark.
func (c *Client) Read(ctx context.Context, resource string) (Value, error) {
	var v Value
	body, status, err := c.do(ctx, http.MethodGet, PathValue+"?resource="+url.QueryEscape(resource), nil)
	if err != nil {
		return v, err
	}
	if status != http.StatusOK {
		return v, failure(PathValue, status, body)
	}
	if err := json.Unmarshal(body, &v); err != nil {
		return v, fmt.Errorf("resource: answer to %s: %w", PathValue, err)
	}
	return v, nil
}

// Journal returns all entries, in order.
func (c *Client) Journal(ctx context.Context) ([]Entry, error) {
	body, status, err := c.do(ctx, http.MethodGet, PathJournal, nil)
	if err != nil {
		return nil, err
	}
	if status != http.StatusOK {
		return nil, failure(PathJournal, status, body)
	}
	var entries []Entry
	dec := json.NewDecoder(bytes.NewReader(body))
	for {
		var e Entry
		switch err := dec.Decode(&e); {
		case errors.Is(err, io.EOF):
			return entries, nil
		case err != nil:
			return nil, fmt.Errorf("resource: answer to %s: %w", PathJournal, err)
		}
		entries = append(entries, e)
	}
}

func (c *Client) operation(ctx context.Context, path string, q Request) (Entry, error) {
	body, status, err := c.do(ctx, http.MethodPost, path, q)
	if err != nil {
		return Entry{}, err
	}
	switch status {
	case http.StatusOK, http.StatusConflict, http.StatusPreconditionRequired:
	default:
		return Entry{}, failure(path, status, body)
	}
	var e Entry
	if err := json.Unmarshal(body, &e); err != nil {
		return Entry{}, fmt.Errorf("resource: answer to %s: %w", path, err)
	}
	switch e.Outcome {
	case Accepted:
		return e, nil
	case Stale:
		return e, &fence.StaleError{Resource: e.Resource, Seen: e.Mark, Given: e.Token}
	case Unclaimed:
		return e, &fence.UnclaimedError{Resource: e.Resource}
	default:
		return e, fmt.Errorf("resource: answer to %s: outcome %q is unknown", path, e.Outcome)
	}
}

func (c *Client) do(ctx context.Context, method, path string, body any) ([]byte, int, error) {
	var reader io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return nil, 0, fmt.Errorf("resource: %w", err)
		}
		reader = bytes.NewReader(text)
	}
	r, err := http.NewRequestWithContext(ctx, method, c.base+path, reader)
	if err != nil {
		return nil, 0, fmt.Errorf("resource: %w", err)
	}
	answer, err := c.http.Do(r)
	if err != nil {
		return nil, 0, fmt.Errorf("resource: %w", err)
	}
	text, err := io.ReadAll(answer.Body)
	if err = errors.Join(err, answer.Body.Close()); err != nil {
		return nil, 0, fmt.Errorf("resource: answer to %s: %w", path, err)
	}
	return text, answer.StatusCode, nil
}

func failure(path string, status int, body []byte) error {
	var p problem
	if err := json.Unmarshal(body, &p); err != nil || p.Error == "" {
		return fmt.Errorf("resource: %s answered %d", path, status)
	}
	return fmt.Errorf("resource: %s answered %d: %s", path, status, p.Error)
}
