package validity

import (
	"encoding/binary"

	"github.com/cespare/xxhash/v2"

	"github.com/headlease/headlease/fence"
)

// TokenHash is one held token's part in a set's hash. The hash of a set is the
// sum of its tokens' hashes modulo 2^64, so it does not depend on an order,
// can be kept up to date in constant time, and is 0 for the empty set. The
// resource is hashed along because tokens are unique within a partition only.
func TokenHash(resource string, token fence.Token) uint64 {
	var d xxhash.Digest
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(token))
	d.Reset()
	_, _ = d.Write(b[:])
	_, _ = d.WriteString(resource)
	return d.Sum64()
}

// TokensHash is the hash of a set of held tokens by resource, as it travels in
// Keepalive.tokens_hash [F17].
func TokensHash(held map[string]fence.Token) uint64 {
	var sum uint64
	for resource, token := range held {
		sum += TokenHash(resource, token)
	}
	return sum
}
