package main

import (
	"context"

	"github.com/headlease/headlease/fence"
)

// order that was taken from the streams.
type order struct {
	Account string `json:"account"`
	Seq     uint64 `json:"seq"`
	Body    string `json:"body"`
}

// write of a shard's orders.
type write struct {
	Resource string `json:"resource"`
	// Compared is the token that the guard compares: the lease's, or in a control
	// run the same for all. Token is always the lease's, for the journal.
	Compared fence.Token `json:"-"`
	Token    fence.Token `json:"token"`
	Orders   []order     `json:"orders"`
}

// table is where a worker's orders go: PostgreSQL, or its stand-in.
type table interface {
	// Claim refuses lower tokens from then on.
	Claim(ctx context.Context, resource string, token fence.Token) error
	// Write takes orders, each once however often it comes, and notes the write
	// in a journal; all of it, or nothing if the token is stale.
	Write(ctx context.Context, w write) error
	Close()
}

// book is what the checker reads of a table.
type book interface {
	Orders(ctx context.Context) (int, error)
	// Writes in the journal.
	Writes(ctx context.Context) (int, error)
	// Accounts with their number of orders and the number of their last one.
	Accounts(ctx context.Context, each func(account string, count, last uint64)) error
	// Journal of the accepted writes, in their order.
	Journal(ctx context.Context, each func(resource string, token fence.Token, account string, seq uint64)) error
	// Refused stale writes and claims, by the store's own count.
	Refused() (int, error)
	Close()
}
