package redisstream

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/shard"
)

// MaxBody is the most bytes of a message.
const MaxBody = 1 << 20

// producerTTL is how long a producer's last message is remembered after it.
const producerTTL = 24 * time.Hour

// ErrUnknown: the message may have been sent; it is not sent later.
var ErrUnknown = errors.New("it is not known whether the message was sent")

// Number, entry and the producer's memory are one step. A send that arrives
// late, after a later one of its producer, is refused; and so is one that goes by
// another move of its key than the newest that the shard knows.
//
// KEYS: moves, stream, seq, arriving, arriving:KEY, producer. ARGV: key, this
// shard, the key's hash shard; of the move that is known of, its generation, the
// shard that the key left, and the last number there; body, number, TTL, channel,
// resource.
var sendScript = redis.NewScript(luaRecord + luaArriveHead + `
local last = redis.call('HMGET', KEYS[6], 'number', 'id', 'seq')
local number = tonumber(ARGV[8])
if last[1] and tonumber(last[1]) == number then
  return {'sent', last[2], last[3]}
end
if last[1] and tonumber(last[1]) > number then
  return redis.error_reply('LATE a later message of this producer was sent')
end
local r = read_record(KEYS[1], ARGV[1], ARGV[2], ARGV[3])
if tonumber(ARGV[4]) > tonumber(r.gen) then
  r = arrive(KEYS[1], KEYS[3], KEYS[4], ARGV[1], ARGV[4], ARGV[5], ARGV[6])
elseif r.place == 'away' or ARGV[4] ~= r.gen then
  return {'moved', r.gen, r.place, r.other, r.last}
end
local to = KEYS[2]
if r.place == 'arriving' then to = KEYS[5] end
local seq = redis.call('HINCRBY', KEYS[3], ARGV[1], 1)
local id = redis.call('XADD', to, '*', 'key', ARGV[1], 'seq', seq, 'body', ARGV[7])
redis.call('HSET', KEYS[6], 'number', ARGV[8], 'id', id, 'seq', seq)
redis.call('PEXPIRE', KEYS[6], ARGV[9])
redis.call('PUBLISH', ARGV[10], ARGV[11])
return {'sent', id, tostring(seq)}
`)

// route is where a key's messages go, by the newest move that is known of.
type route struct {
	shard uint32
	// generation of the move; 0: none is known, the shard is the hash shard.
	generation uint64
	// from is the shard that the key left, and last the last number there.
	from uint32
	last uint64
}

// Sent is where a message is.
type Sent struct {
	Shard uint32
	// ID in the shard's stream. A message that was sent while its key moves gets
	// another one there, with the same number.
	ID string
	// Seq counts the key's messages, from 1.
	Seq uint64
}

// Producer sends messages. It is safe for concurrent use; messages of one shard
// go one after the other.
type Producer struct {
	client redis.UniversalClient
	stream Stream
	id     string

	mu    sync.Mutex
	lines map[uint32]*line
	// routes of keys that were moved.
	routes map[string]route
}

// line is a producer's messages to one shard.
type line struct {
	turn   chan struct{} // has room for one
	number uint64        // of the last message; whoever has the turn
}

// NewProducer returns a producer with an id of its own.
func NewProducer(client redis.UniversalClient, stream Stream) (*Producer, error) {
	if client == nil {
		return nil, errors.New("client of a producer: is nil; give that of the stream's server")
	}
	if err := stream.Validate(); err != nil {
		return nil, err
	}
	return &Producer{client: client, stream: stream, id: uuid.NewString(), lines: map[uint32]*line{}, routes: map[string]route{}}, nil
}

// Send appends a message, and tries again until it knows that this is done or
// ctx ends: then the error is ErrUnknown if it may have been done.
func (p *Producer) Send(ctx context.Context, key string, body []byte) (Sent, error) {
	if key == "" || len(body) > MaxBody {
		return Sent{}, fmt.Errorf("send to %s: the key has %d bytes and the body %d; give a key, and a body of at most %d", p.stream.Name, len(key), len(body), MaxBody)
	}
	r := p.route(key)
	for {
		sent, moved, err := p.sendTo(ctx, r, key, body)
		if err != nil || moved == nil {
			return sent, err
		}
		if moved.generation <= r.generation {
			return Sent{}, fmt.Errorf("send to %s: the shards %d and %d both say that %s is at the other; has the server lost data?", p.stream.Name, r.shard, moved.shard, key)
		}
		r = *moved
		p.learn(key, r)
	}
}

func (p *Producer) route(key string) route {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r, ok := p.routes[key]; ok {
		return r
	}
	return route{shard: shard.HashShard(key, p.stream.Shards)}
}

func (p *Producer) learn(key string, r route) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.routes[key].generation < r.generation {
		p.routes[key] = r
	}
}

// sendTo sends to one shard, until it is known that this is done or that the
// key's messages go elsewhere.
func (p *Producer) sendTo(ctx context.Context, r route, key string, body []byte) (Sent, *route, error) {
	k, err := p.stream.keysOf(r.shard)
	if err != nil {
		return Sent{}, nil, err
	}
	l := p.line(r.shard)
	select {
	case l.turn <- struct{}{}:
	case <-ctx.Done():
		return Sent{}, nil, fmt.Errorf("send to %s: %w", k.stream, context.Cause(ctx))
	}
	defer func() { <-l.turn }()
	l.number++
	pause := 10 * time.Millisecond
	for {
		sent, moved, err := p.try(ctx, k, r, l.number, key, body)
		if err == nil {
			return sent, moved, nil
		}
		var refused redis.Error
		if errors.As(err, &refused) && !retryable(refused) {
			return Sent{}, nil, fmt.Errorf("send to %s: %w", k.stream, err)
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return Sent{}, nil, fmt.Errorf("send to %s: %w: %w", k.stream, ErrUnknown, err)
		}
		pause = min(2*pause, time.Second)
	}
}

func (p *Producer) try(ctx context.Context, k keys, r route, number uint64, key string, body []byte) (Sent, *route, error) {
	reply, err := sendScript.Run(ctx, p.client, []string{k.moves, k.stream, k.seq, k.arriving, k.arrivals + key, k.producers + p.id},
		key, r.shard, shard.HashShard(key, p.stream.Shards), r.generation, r.from, r.last,
		body, number, producerTTL.Milliseconds(), p.stream.channel(), k.resource).StringSlice()
	if err != nil {
		return Sent{}, nil, err
	}
	switch {
	case len(reply) == 3 && reply[0] == "sent":
		seq, err := strconv.ParseUint(reply[2], 10, 64)
		if err != nil {
			return Sent{}, nil, fmt.Errorf("the number of the message: %w", err)
		}
		return Sent{Shard: r.shard, ID: reply[1], Seq: seq}, nil, nil
	case len(reply) == 5 && reply[0] == "moved":
		a, err := decodeAnswer(append(reply, "0-0", "-", "0"))
		if err != nil {
			return Sent{}, nil, err
		}
		if a.place != away {
			return Sent{}, &route{shard: r.shard, generation: a.generation}, nil
		}
		return Sent{}, &route{shard: a.other, generation: a.generation, from: r.shard, last: a.last}, nil
	}
	return Sent{}, nil, fmt.Errorf("the server replied %q", reply)
}

func (p *Producer) line(n uint32) *line {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.lines[n]
	if l == nil {
		l = &line{turn: make(chan struct{}, 1)}
		p.lines[n] = l
	}
	return l
}

// retryable reports whether a server that refuses so may take it later.
func retryable(err redis.Error) bool {
	for _, prefix := range []string{"LOADING ", "BUSY ", "TRYAGAIN ", "CLUSTERDOWN ", "MASTERDOWN ", "READONLY ", "OOM ", "MISCONF "} {
		if redis.HasErrorPrefix(err, prefix) {
			return true
		}
	}
	return false
}
