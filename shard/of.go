package shard

import "github.com/cespare/xxhash/v2"

// FirstDedicated is the number of the first dedicated shard. The numbers
// below it belong to hash shards, whatever the cluster's shard count.
const FirstDedicated = 1 << 24

// Exceptions gives hot keys shards of their own, numbered from FirstDedicated.
// A dedicated shard is in the partition of its key's hash shard.
type Exceptions map[string]uint32

// Of returns the shard of a key: that of the exceptions if the key is among
// them, else its hash shard. shards is a power of two up to MaxCount.
func Of(key string, shards uint32, exceptions Exceptions) uint32 {
	if s, ok := exceptions[key]; ok {
		return s
	}
	return HashShard(key, shards)
}

// HashShard is xxhash64(key, seed 0) & (shards-1), over the key's UTF-8 bytes.
func HashShard(key string, shards uint32) uint32 {
	return uint32(xxhash.Sum64String(key) & uint64(shards-1))
}
