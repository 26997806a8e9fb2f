// Package redisstream keeps the messages of shards in Redis Streams: one stream
// per shard, written by a [Producer], read by a worker through a [Source].
//
// # Keys
//
// All keys of a shard have the hash tag of its resource, and so are in one slot
// with the fencing mark of package redisguard. Of stream "orders" and shard 68:
//
//	{shard/68}:orders            the stream: key, seq, body
//	{shard/68}:orders:seq        hash: the number of each key's last message
//	{shard/68}:orders:producer:… the last message of each producer, for a day
//	{shard/68}:orders:parked     hash: how many messages of a key are parked
//	{shard/68}:orders:dead       stream: parked messages with the reason
//	{shard/68}:orders:moves      hash: where a key went, or came from
//	{shard/68}:orders:arriving   set: keys on their way here
//	{shard/68}:orders:arriving:… stream: what was sent of one of them meanwhile
//
// # What it guarantees
//
//   - A key's messages are numbered 1, 2, 3 … in the order of the stream, by
//     however many producers and wherever they crash: number and entry are one
//     script. A send repeated by its producer is done once.
//   - What a holder reads, it reads under its token: a holder that woke up late
//     is refused and takes no entry out of its successor's sight
//     (docs/decisions/0111).
//   - Whoever opens a shard gets what was delivered and not acknowledged first,
//     from the lowest ID to the last, and then what was never delivered.
//   - A key can be moved to a shard of its own and back by a [Mover], while
//     messages are sent: its numbers go on, what was sent before the move is handled
//     before what comes after it, by one shard's holder at a time, and tokens
//     rise (docs/decisions/0130).
//   - Trim drops nothing that a consumer group has not acknowledged.
//
// Redis decides how durable this is: appendonly yes and appendfsync always lose
// nothing that was answered. After a failover that lost writes, numbers may be
// given twice.
package redisstream
