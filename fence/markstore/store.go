// Package markstore is what the guards of handlers (fence/httpguard,
// fence/grpcguard) ask of the place where marks are kept.
//
// Stores of one process are inprocess.Guard, whose marks end with the process, and
// filemark.Guard, which keeps them on disk. Stores that several processes share are
// redisguard.Handlers and pgguard.Handlers.
package markstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/headlease/headlease/fence"
)

// Store keeps the highest token seen of each resource, and admits effects under it. It is
// safe for concurrent use.
type Store interface {
	// Claim raises the resource's mark to the token, cancels or waits for effects of
	// lower tokens, and returns nil once none is running [F15]. It fails with
	// a *fence.StaleError if a higher token was seen.
	Claim(ctx context.Context, resource string, token fence.Token) error
	// Do runs the effect if the token is not below the mark; a higher one raises it first,
	// and waits as Claim does. The effect's ctx ends, with a *fence.StaleError as cause,
	// when a higher token came, if the store can tell. Do fails with a *fence.StaleError or
	// a *fence.UnclaimedError, the effect not run, or with the effect's error.
	Do(ctx context.Context, resource string, token fence.Token, effect func(context.Context) error) error
	// Shared reports whether other processes with a store of the same data see the same
	// marks and wait for each other's effects.
	Shared() bool
}

// Check refuses a store that is not shared where several processes serve the same
// resources: each would keep its own marks, and a late write could choose the process
// that has not seen the higher token.
func Check(s Store, replicas int) error {
	switch {
	case s == nil:
		return errors.New("store of marks: is nil")
	case replicas < 1:
		return fmt.Errorf("replicas: %d; say how many processes serve the same resources, 1 or more", replicas)
	case replicas > 1 && !s.Shared():
		return fmt.Errorf("replicas: %d processes serve the same resources, and the store of marks is one process's own; use a shared one, of Redis or PostgreSQL", replicas)
	}
	return nil
}
