// Package pgguard is a fence guard for data in PostgreSQL: the highest token seen
// of each resource is a row beside the data, its mark, and a transaction that was
// checked with a lower token cannot commit after a higher one was claimed.
//
// What it guarantees, whatever clocks, pauses, crashes and networks do, as long as
// the server keeps its marks as durably as the data beside them (they are in one
// database, so it does):
//   - check and write are one transaction of the caller's: between them the mark
//     cannot rise, so that a write that was checked, delayed and then overtaken
//     does not exist;
//   - once Claim returned nil no transaction of a lower token commits any more: those
//     under way have ended, and later ones are refused [F15];
//   - a write of a higher token raises the mark as it writes;
//   - a resource without a mark takes no guarded write (*fence.UnclaimedError).
//
// It works at every isolation level; above read committed a mark that rose
// meanwhile shows as a serialization failure (SQLSTATE 40001), to be tried again like any
// other.
//
// Migration is plain SQL: one table and three functions, for psql, any driver and
// any migration tool. SQLSTATE HL001 is a stale token, HL002 a resource that nobody
// claimed. From Go:
//
//	guard := pgguard.New()
//	err := guard.Claim(ctx, pool, "orders/7", lease.Token()) // once, while lease.Valid()
//	...
//	err = guard.Do(ctx, pool, "orders/7", lease.Token(), func(tx pgx.Tx) error {
//		_, err := tx.Exec(ctx, "UPDATE orders SET state = 'paid' WHERE id = 7")
//		return err
//	})
//
// A holder that waits for Claim waits for transactions of the holder before it: set
// idle_in_transaction_session_timeout, or a client that froze inside one holds up
// its successor until its connection ends.
//
// A transaction holds one advisory lock per resource that it writes to; of
// thousands of resources in one transaction, max_locks_per_transaction is the
// bound.
package pgguard
