package fencetest

import (
	"context"
	"sync"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/markstore"
)

// Handled returns a Subject whose values are in memory and written by effects under the
// store's marks.
func Handled(marks markstore.Store) Subject {
	return &handled{Store: marks, values: map[string]string{}}
}

type handled struct {
	markstore.Store
	mu     sync.Mutex
	values map[string]string
}

// Write is Subject.
func (h *handled) Write(ctx context.Context, resource string, token fence.Token, value string) error {
	return h.Do(ctx, resource, token, func(context.Context) error {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.values[resource] = value
		return nil
	})
}

// Value is Subject.
func (h *handled) Value(_ context.Context, resource string) (string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.values[resource], nil
}
