// Package shard maps resources to shards: which part of the key space a
// resource's lease, token and partition belong to.
package shard

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Defaults and bounds of a cluster's shard count and of names.
const (
	DefaultCount = 256
	MaxCount     = 1 << 16
	MaxKey       = 256
)

// Kind of a resource.
type Kind int

// Kinds of resources.
const (
	// KindShard is a whole shard: shard/68.
	KindShard Kind = iota + 1
	// KindLock is a named lock, perhaps one slot of a semaphore:
	// lock/nightly-report, lock/x#3.
	KindLock
)

// Resource is a parsed resource name.
type Resource struct {
	Name string
	Kind Kind
	// Key is what hashes to the shard: after the first slash and before the
	// last '#', so that all slots of a semaphore share a partition.
	Key string
	// Slot is the semaphore slot, or -1.
	Slot int
	// Number is the shard's number, for KindShard.
	Number uint32
}

var keyPattern = regexp.MustCompile(`^[A-Za-z0-9._:/-]+$`)

// Parse reads a resource name. The error names the part and the remedy.
func Parse(name string) (Resource, error) {
	kind, rest, ok := strings.Cut(name, "/")
	if !ok {
		return Resource{}, fmt.Errorf("resource %q: has no '/'; write shard/N or lock/NAME", name)
	}
	r := Resource{Name: name, Key: rest, Slot: -1}
	switch kind {
	case "shard":
		n, err := strconv.ParseUint(rest, 10, 32)
		if err != nil || strconv.FormatUint(n, 10) != rest {
			return Resource{}, fmt.Errorf("resource %q: %q is not a shard number; write shard/N, for example shard/68", name, rest)
		}
		r.Kind, r.Number = KindShard, uint32(n)
		return r, nil
	case "lock":
		r.Kind = KindLock
	default:
		return Resource{}, fmt.Errorf("resource %q: unknown kind %q; use shard/N or lock/NAME", name, kind)
	}
	if i := strings.LastIndexByte(rest, '#'); i >= 0 {
		n, err := strconv.ParseUint(rest[i+1:], 10, 31)
		if err != nil || strconv.FormatUint(n, 10) != rest[i+1:] {
			return Resource{}, fmt.Errorf("resource %q: slot %q is not a number from 0; write lock/NAME#SLOT", name, rest[i+1:])
		}
		r.Key, r.Slot = rest[:i], int(n)
	}
	if len(r.Key) == 0 || len(r.Key) > MaxKey {
		return Resource{}, fmt.Errorf("resource %q: key has %d bytes; 1 to %d are allowed", name, len(r.Key), MaxKey)
	}
	if !keyPattern.MatchString(r.Key) {
		return Resource{}, fmt.Errorf("resource %q: key has a character outside [A-Za-z0-9._:/-]; rename it", name)
	}
	return r, nil
}

// Shard returns the resource's hash shard, or an error if a shard's number is not
// below count.
func (r Resource) Shard(count uint32) (uint32, error) {
	if r.Kind != KindShard {
		return HashShard(r.Key, count), nil
	}
	if r.Number >= count {
		return 0, fmt.Errorf("resource %q: the cluster has %d shards; use shard/0 to shard/%d", r.Name, count, count-1)
	}
	return r.Number, nil
}
