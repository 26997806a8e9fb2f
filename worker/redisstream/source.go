package redisstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/client/group"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/redisguard"
	"github.com/headlease/headlease/worker"
)

const (
	// consumer is the same for all holders of a shard: there is one at a time, by
	// its token, and names of dead ones would pile up.
	consumer = "holder"
	// maxRead bounds one read; scripts reply with all of it.
	maxRead = 1000
)

// Guard is what a Source needs of a *redisguard.Guard.
type Guard interface {
	Claim(ctx context.Context, resource string, token fence.Token) error
	MarkKey(resource string, keys ...string) (string, error)
	Run(ctx context.Context, resource string, token fence.Token, script *redisguard.Script, keys []string, args ...any) (any, error)
}

// Config of a Source.
type Config struct {
	Client redis.UniversalClient
	Guard  Guard
	Stream Stream
	// Group of consumers; default "workers".
	Group string
	// Poll is how long a shard without messages waits, at most, when no producer's
	// hint comes, and how often a key's move to a shard is looked after; default
	// 500 ms.
	Poll time.Duration
	// TrimEvery so many acknowledged messages of a shard its stream is trimmed;
	// default 1000, negative: never.
	TrimEvery int
	Logger    *slog.Logger
}

// Source is a worker.Source. It is safe for concurrent use.
type Source struct {
	cfg    Config
	places places

	mu sync.Mutex
	// waiting feeds, by resource.
	waiting map[string]map[chan struct{}]bool
}

// NewSource returns a source, without talking to the server.
func NewSource(cfg Config) (*Source, error) {
	if cfg.Group == "" {
		cfg.Group = "workers"
	}
	if cfg.Poll == 0 {
		cfg.Poll = 500 * time.Millisecond
	}
	if cfg.TrimEvery == 0 {
		cfg.TrimEvery = 1000
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	var errs []error
	if cfg.Client == nil || cfg.Guard == nil {
		errs = append(errs, errors.New("client, guard of a source: both are needed; see redisguard.New"))
	}
	if cfg.Poll < 0 {
		errs = append(errs, fmt.Errorf("poll: %v is negative; leave it out for the default", cfg.Poll))
	}
	errs = append(errs, cfg.Stream.Validate())
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Source{cfg: cfg, places: redisPlaces{cfg.Client, cfg.Guard, cfg.Stream}, waiting: map[string]map[chan struct{}]bool{}}, nil
}

// Run listens to the producers' hints until ctx ends. Without it messages are
// found each Poll.
func (s *Source) Run(ctx context.Context) {
	hints := s.cfg.Client.Subscribe(ctx, s.cfg.Stream.channel())
	defer hints.Close() //nolint:errcheck // nothing is lost
	for {
		select {
		case <-ctx.Done():
			return
		case m, ok := <-hints.Channel():
			if !ok {
				return
			}
			s.mu.Lock()
			for c := range s.waiting[m.Payload] {
				select {
				case c <- struct{}{}:
				default:
				}
			}
			s.mu.Unlock()
		}
	}
}

// Open is worker.Source.
func (s *Source) Open(ctx context.Context, resource string, token fence.Token) (worker.Feed, error) {
	k, err := s.cfg.Stream.keys(resource)
	if err != nil {
		return nil, err
	}
	if err := s.cfg.Guard.Claim(ctx, resource, token); err != nil {
		return nil, err
	}
	f := &Feed{source: s, keys: k, token: token, cursor: "0-0", last: "0-0", hint: make(chan struct{}, 1)}
	if _, err := f.run(ctx, openScript, []string{k.stream}, s.cfg.Group); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting[resource] == nil {
		s.waiting[resource] = map[chan struct{}]bool{}
	}
	s.waiting[resource][f.hint] = true
	return f, nil
}

// Feed is a worker.Feed of one shard, under one token.
type Feed struct {
	source *Source
	keys   keys
	token  fence.Token
	hint   chan struct{}
	// cursor of the pending entries that are still to be taken over; empty: all
	// are.
	cursor string
	// last entry that was received: all pending ones up to it were, once cursor is
	// empty.
	last  string
	acked int // since the last trim
	// arriving are the keys that the last read found on their way to this shard,
	// and looked when they were looked after.
	arriving []string
	looked   time.Time
}

func (f *Feed) run(ctx context.Context, script *redisguard.Script, keys []string, args ...any) (any, error) {
	return f.source.cfg.Guard.Run(ctx, f.keys.resource, f.token, script, keys, args...)
}

// Next is worker.Feed.
func (f *Feed) Next(ctx context.Context, limit int) ([]worker.Message, error) {
	limit = min(limit, maxRead)
	for {
		if err := f.receive(ctx); err != nil {
			return nil, err
		}
		messages, more, err := f.read(ctx, limit)
		if err != nil {
			// It may have been delivered all the same: everything pending is looked
			// at again, and nothing of it is in work.
			f.cursor = "0-0"
			return nil, err
		}
		if len(messages) > 0 {
			return messages, nil
		}
		if more {
			continue
		}
		t := time.NewTimer(f.source.cfg.Poll)
		select {
		case <-ctx.Done():
			t.Stop()
			return nil, context.Cause(ctx)
		case <-f.hint:
			t.Stop()
		case <-t.C:
		}
	}
}

// read takes over pending entries, or reads new ones. more: there may be some
// although none came.
func (f *Feed) read(ctx context.Context, limit int) (messages []worker.Message, more bool, err error) {
	from := []string{f.keys.stream, f.keys.parked, f.keys.arriving}
	claiming := f.cursor != ""
	var reply any
	if claiming {
		reply, err = f.run(ctx, claimScript, from, f.source.cfg.Group, consumer, f.cursor, limit)
	} else {
		reply, err = f.run(ctx, readScript, from, f.source.cfg.Group, consumer, limit, f.last)
	}
	if err != nil {
		return nil, false, err
	}
	cursor, messages, gone, arriving, err := decode(reply)
	if err != nil {
		return nil, false, fmt.Errorf("read %s: %w", f.keys.stream, err)
	}
	f.arriving = arriving
	if len(gone) > 0 {
		f.source.cfg.Logger.Error("redisstream: entries were deleted before they were acknowledged", "stream", f.keys.stream, "ids", gone)
	}
	if n := len(messages); n > 0 {
		f.last = messages[n-1].ID
	}
	if claiming {
		if f.cursor = cursor; cursor == "0-0" {
			f.cursor = ""
		}
	}
	return messages, claiming || len(gone) > 0, nil
}

// receive looks after the keys that are on their way to this shard, so that a
// move which was begun ends by itself. The error is group.ErrNewLease if one
// must not be handled under this token, which is older than one that has handled
// it [F14].
func (f *Feed) receive(ctx context.Context) error {
	now := time.Now()
	number, ok := f.source.cfg.Stream.number(f.keys.resource)
	if len(f.arriving) == 0 || !ok || now.Sub(f.looked) < f.source.cfg.Poll {
		return nil
	}
	f.looked = now
	for _, key := range f.arriving {
		p, err := finish(ctx, f.source.places, number, key)
		if err != nil {
			f.source.cfg.Logger.Warn("redisstream: could not look after a key's move", "key", key, "to", f.keys.stream, "error", err)
			continue
		}
		if p.Stage == StageLease && f.token <= p.Floor {
			f.source.cfg.Logger.Info("redisstream: a key comes from a holder with a higher token; the shard is leased anew", "key", key, "to", f.keys.stream)
			return group.ErrNewLease
		}
	}
	return nil
}

// decode reads the reply of claimScript and readScript.
func decode(reply any) (cursor string, messages []worker.Message, gone []any, arriving []string, err error) {
	parts, ok := reply.([]any)
	if !ok || len(parts) != 5 {
		return "", nil, nil, nil, fmt.Errorf("the server replied %v", reply)
	}
	cursor, _ = parts[0].(string)
	entries, _ := parts[1].([]any)
	gone, _ = parts[2].([]any)
	keys, _ := parts[3].([]any)
	parked := make(map[any]bool, len(keys))
	for _, k := range keys {
		parked[k] = true
	}
	for _, e := range entries {
		m, err := decodeEntry(e)
		if err != nil {
			return "", nil, nil, nil, err
		}
		m.Parked = parked[m.Key]
		messages = append(messages, m)
	}
	keys, _ = parts[4].([]any)
	for _, k := range keys {
		key, _ := k.(string)
		arriving = append(arriving, key)
	}
	return cursor, messages, gone, arriving, nil
}

func decodeEntry(e any) (m worker.Message, err error) {
	pair, ok := e.([]any)
	if !ok || len(pair) != 2 {
		return m, fmt.Errorf("an entry is %v", e)
	}
	m.ID, _ = pair[0].(string)
	fields, _ := pair[1].([]any)
	for i := 0; i+1 < len(fields); i += 2 {
		name, _ := fields[i].(string)
		value, _ := fields[i+1].(string)
		switch name {
		case fieldKey:
			m.Key = value
		case fieldBody:
			m.Body = []byte(value)
		case fieldSeq:
			if m.Seq, err = strconv.ParseUint(value, 10, 64); err != nil {
				return m, fmt.Errorf("entry %s: seq: %w", m.ID, err)
			}
		}
	}
	if m.ID == "" || m.Key == "" {
		return m, fmt.Errorf("entry %v has no key; write it with a Producer", e)
	}
	return m, nil
}

// Ack is worker.Feed.
func (f *Feed) Ack(ctx context.Context, messages []worker.Message) error {
	args := []any{f.source.cfg.Group}
	for _, m := range messages {
		args = append(args, m.ID)
	}
	if _, err := f.run(ctx, ackScript, []string{f.keys.stream}, args...); err != nil {
		return err
	}
	f.count(ctx, len(messages))
	return nil
}

// count trims the stream now and then.
func (f *Feed) count(ctx context.Context, n int) {
	f.acked += n
	if every := f.source.cfg.TrimEvery; every < 0 || f.acked < every {
		return
	}
	f.acked = 0
	if _, err := Trim(ctx, f.source.cfg.Client, f.keys.stream); err != nil {
		f.source.cfg.Logger.Warn("redisstream: could not trim", "stream", f.keys.stream, "error", err)
	}
}

// Park is worker.Feed.
func (f *Feed) Park(ctx context.Context, m worker.Message, reason string) error {
	k := []string{f.keys.stream, f.keys.parked, f.keys.dead}
	_, err := f.run(ctx, parkScript, k, f.source.cfg.Group, m.ID, m.Key, m.Seq, m.Body, reason)
	return err
}

// Close is worker.Feed.
func (f *Feed) Close() {
	s := f.source
	s.mu.Lock()
	defer s.mu.Unlock()
	if delete(s.waiting[f.keys.resource], f.hint); len(s.waiting[f.keys.resource]) == 0 {
		delete(s.waiting, f.keys.resource)
	}
}

// ApplyScript writes to keys of a shard's slot and acknowledges in the same
// step.
type ApplyScript struct{ script *redisguard.Script }

// NewApplyScript makes one of a script's body; see redisguard.NewScript.
func NewApplyScript(body string) (*ApplyScript, error) {
	if _, err := redisguard.NewScript(body); err != nil {
		return nil, err
	}
	s, err := redisguard.NewScript(luaApplyHead + body + luaApplyTail)
	return &ApplyScript{s}, err
}

// Apply runs the script under the shard's token and acknowledges the batch, in
// one step: the effect is there once, whatever crashes and however often it is
// called. It returns the script's reply, or nil if the batch was applied before,
// by a call whose answer was lost. The keys have the shard's hash tag (redisguard.Key). The batch's Feed must be of this package.
func (a *ApplyScript) Apply(ctx context.Context, b *worker.Batch, keys []string, args ...any) (any, error) {
	f, ok := b.Feed.(*Feed)
	if !ok {
		return nil, fmt.Errorf("apply to %s: its messages come from a %T; write first, and acknowledge then", b.Resource(), b.Feed)
	}
	all := append(make([]any, 0, len(args)+len(b.Messages)+2), args...)
	for _, m := range b.Messages {
		all = append(all, m.ID)
	}
	all = append(all, f.source.cfg.Group, len(b.Messages))
	reply, err := f.run(ctx, a.script, append(keys[:len(keys):len(keys)], f.keys.stream), all...)
	if err != nil {
		return nil, err
	}
	parts, ok := reply.([]any)
	if !ok || len(parts) == 0 {
		return nil, fmt.Errorf("apply to %s: the server replied %v", b.Resource(), reply)
	}
	b.Acked()
	f.count(ctx, len(b.Messages))
	if len(parts) < 2 {
		return nil, nil
	}
	return parts[1], nil
}
