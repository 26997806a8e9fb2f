package redisstream

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/headlease/headlease/fence/redisguard"
	"github.com/headlease/headlease/shard"
)

// Stream of all shards: what producers and workers must agree on.
type Stream struct {
	// Name is part of all keys.
	Name string
	// Shards is the cluster's count, a power of two.
	Shards uint32
	// Resource of a shard, as in group.Config; default shard/N. With resources of
	// its own a stream has no dedicated shards: the tokens of a key's two shards
	// could not be compared (docs/decisions/0130).
	Resource func(shard uint32) string
}

// Validate reports all faults at once.
func (s Stream) Validate() error {
	var errs []error
	if s.Name == "" || strings.ContainsAny(s.Name, "{}:") {
		errs = append(errs, fmt.Errorf("name of a stream: %q; give one without braces and colons", s.Name))
	}
	if s.Shards == 0 || s.Shards > shard.MaxCount || s.Shards&(s.Shards-1) != 0 {
		errs = append(errs, fmt.Errorf("shards of stream %s: %d; give the cluster's, a power of two up to %d", s.Name, s.Shards, shard.MaxCount))
	}
	return errors.Join(errs...)
}

func (s Stream) resource(n uint32) string {
	if s.Resource != nil {
		return s.Resource(n)
	}
	return "shard/" + strconv.FormatUint(uint64(n), 10)
}

// Key of the stream of a resource.
func (s Stream) Key(resource string) (string, error) { return redisguard.Key(resource, s.Name) }

// keys of a resource.
type keys struct {
	resource                             string
	stream, seq, parked, dead, producers string
	// moves are the records of keys that are not, or not always were, at home in
	// the shard; arriving the keys that are on their way to it, and what is sent
	// of them until they are there.
	moves, arriving, arrivals string
}

func (s Stream) keys(resource string) (keys, error) {
	stream, err := s.Key(resource)
	if err != nil {
		return keys{}, err
	}
	return keys{
		resource, stream, stream + ":seq", stream + ":parked", stream + ":dead", stream + ":producer:",
		stream + ":moves", stream + ":arriving", stream + ":arriving:",
	}, nil
}

func (s Stream) keysOf(n uint32) (keys, error) { return s.keys(s.resource(n)) }

// number of the shard of a resource; false if it has none, or the stream names
// its resources itself.
func (s Stream) number(resource string) (uint32, bool) {
	r, err := shard.Parse(resource)
	return r.Number, err == nil && r.Kind == shard.KindShard && s.Resource == nil
}

// channel on which a resource is named when it has a new message: a hint.
func (s Stream) channel() string { return "headlease:stream:" + s.Name }

// Fields of an entry.
const (
	fieldKey  = "key"
	fieldSeq  = "seq"
	fieldBody = "body"
)
