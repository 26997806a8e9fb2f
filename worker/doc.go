// Package worker handles the messages of shards in order: every message of a
// key by one worker at a time, one after the other, through crashes, redeploys,
// freezes and the loss of a region.
//
//	err := worker.Run(ctx, worker.Config{
//		Group:  group.Config{Client: c, Name: "orders", Member: "worker-1", Shards: group.Shards(256)},
//		Source: source, // package worker/redisstream
//		Claim:  func(ctx context.Context, s *worker.Shard) error { return guard.Claim(ctx, db, s.Resource(), s.Token()) },
//		Handle: func(ctx context.Context, b *worker.Batch) error { … one guarded write … },
//	})
//
// Each shard that the worker holds (package client/group) has a chain, a
// goroutine: it claims the shard at the stores, so that no write of a holder
// before it is accepted from then on, takes what the holder before had begun
// and not finished, and then what is new; it handles one batch after the other
// and acknowledges it. Chains of different shards run beside each other, at most
// Parallel in the handler at once.
//
// # What it guarantees
//
//   - A key's messages are handled in the order of its shard, each one after
//     the one before was acknowledged or parked.
//   - A message is handled at least once. It takes effect once when the handler's
//     write is guarded with the shard's token and idempotent by the message's key
//     and number; or when the write is in the source's own store, in one step
//     with the acknowledgement.
//   - The context of a handler ends with the shard's lease.
//   - What a worker sends after it has lost a shard, the stores refuse, reads of
//     new messages included: a holder that woke up late takes none away.
//   - A message that cannot be handled holds up its shard, or is parked with all
//     that follow it of its key; order is kept in both cases.
//
// # Stopping
//
// When ctx ends a chain finishes its batch and gives the shard up, so that the
// next worker has it at once; see group.Config.Return and DrainLimit.
package worker
