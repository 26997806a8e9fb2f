package cache

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/fence"
)

// keys makes the keys of entries.
type keys struct{ prefix, cluster string }

func (k keys) of(resource string) string { return k.prefix + k.cluster + ":" + resource }

// write of an entry.
type write struct {
	resource string
	token    fence.Token
	holder   string
	// left is the lease's expiry; 0: it is a tombstone.
	left time.Duration
}

// put writes entries, where they are not lower than what is there.
func (m *Mirror) put(ctx context.Context, writes []write) error {
	if len(writes) == 0 {
		return nil
	}
	void := strconv.FormatInt(m.server+time.Since(m.ahead).Milliseconds()+WriteWithin.Milliseconds(), 10)
	replies, err := m.pipeline(ctx, put, len(writes), func(i int) (string, []any) {
		w := writes[i]
		st, px := tomb, Tombstone
		if w.left > 0 {
			st, px = live, min(w.left, m.cfg.MaxAge)
		}
		return w.resource, []any{w.token.String(), string(rune(st)), millis(px), tail(m.cfg.Region, w.holder), void}
	})
	for i, reply := range replies {
		switch {
		case reply == replyOK && writes[i].left > 0:
			m.metric.leases.Inc()
		case reply == replyOK:
			m.metric.tombstones.Inc()
		case reply == replyOld:
			m.metric.old.Inc()
		case reply == replyLate:
			m.metric.late.Inc()
			m.up = false // its clock is not what it was
			m.rebuild("late")
		}
	}
	return err
}

var errNoReply = errors.New("no reply")

// renewal of a lease's entry.
type renewal struct {
	Lease
	left time.Duration
}

// renew extends entries, and writes those that are missing.
func (m *Mirror) renew(ctx context.Context, due []renewal) error {
	if len(due) == 0 {
		return nil
	}
	replies, err := m.pipeline(ctx, renew, len(due), func(i int) (string, []any) {
		return due[i].Resource, []any{due[i].Token.String(), millis(min(due[i].left, m.cfg.MaxAge))}
	})
	var missing []write
	for i, reply := range replies {
		switch reply {
		case replyOK:
			m.metric.renewals.Inc()
		case replyMissing:
			missing = append(missing, write{due[i].Resource, due[i].Token, due[i].Holder, due[i].left})
		}
	}
	if err != nil || len(missing) == 0 {
		return err
	}
	m.metric.missing.Add(float64(len(missing)))
	if time.Since(m.lastMissing) > missingEvery {
		m.lastMissing = time.Now()
		m.rebuild("missing")
	}
	return m.put(ctx, missing)
}

// pipeline runs a script on up to batchMax resources in one round trip. A reply of nil
// is an error of that one; the error returned is the server's.
func (m *Mirror) pipeline(ctx context.Context, script *redis.Script, n int, call func(i int) (string, []any)) ([]any, error) {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Timeout)
	defer cancel()
	if err := m.pace.WaitN(ctx, n); err != nil {
		return nil, err
	}
	replies := make([]any, n)
	todo := make([]int, n)
	for i := range todo {
		todo[i] = i
	}
	// A server whose scripts were flushed gets them again, whole.
	for _, whole := range []bool{false, true} {
		pipe := m.client.Pipeline()
		cmds := make([]*redis.Cmd, len(todo))
		for at, i := range todo {
			resource, args := call(i)
			if key := []string{m.key.of(resource)}; whole {
				cmds[at] = script.Eval(ctx, pipe, key, args...)
			} else {
				cmds[at] = pipe.EvalSha(ctx, script.Hash(), key, args...)
			}
		}
		// Each command has its own error, of which that of Exec is the first; without a connection they
		// may have none, and no reply.
		_, execErr := pipe.Exec(ctx)
		var worst error
		again := todo[:0]
		for at, i := range todo {
			reply, err := cmds[at].Result()
			if err == nil && reply == nil {
				err = errors.Join(errNoReply, execErr)
			}
			switch {
			case err == nil:
				replies[i] = reply
			case redis.HasErrorPrefix(err, "NOSCRIPT") && !whole:
				again = append(again, i)
			default:
				m.metric.failed.Inc()
				if worst == nil && serverWide(err) {
					worst = err
				}
			}
		}
		if worst != nil {
			return replies, worst
		}
		if todo = again; len(todo) == 0 {
			break
		}
	}
	return replies, nil
}

// everything writes the ends of the last minute, and then every lease.
func (m *Mirror) everything(ctx context.Context) error {
	for rest := m.recent(); len(rest) > 0; {
		batch := rest[:min(batchMax, len(rest))]
		rest = rest[len(batch):]
		writes := make([]write, len(batch))
		for i, e := range batch {
			writes[i] = write{resource: e.resource, token: e.token}
		}
		if err := m.put(ctx, writes); err != nil {
			return err
		}
	}
	writes := make([]write, 0, batchMax)
	for s := range m.cfg.Source.Sessions() {
		left, ok := m.cfg.Source.Left(s.ID)
		if !ok || left <= 0 {
			continue
		}
		for l := range s.Leases {
			writes = append(writes, write{l.Resource, l.Token, l.Holder, left})
			if len(writes) < batchMax {
				continue
			}
			if err := m.both(ctx, m.put(ctx, writes)); err != nil {
				return err
			}
			writes = writes[:0]
		}
	}
	return m.put(ctx, writes)
}

// renewDue renews the leases of the sessions whose turn it is: each at a third of
// its expiry.
func (m *Mirror) renewDue(ctx context.Context) error {
	due := make([]renewal, 0, batchMax)
	for s := range m.cfg.Source.Sessions() {
		every := max(1, uint64(min(s.TTL, m.cfg.MaxAge)/3/passEvery))
		if (xxhash.Sum64String(s.ID)+m.pass)%every != 0 {
			continue
		}
		left, ok := m.cfg.Source.Left(s.ID)
		if !ok || left <= 0 {
			continue
		}
		for l := range s.Leases {
			due = append(due, renewal{l, left})
			if len(due) < batchMax {
				continue
			}
			if err := m.both(ctx, m.renew(ctx, due)); err != nil {
				return err
			}
			due = due[:0]
		}
	}
	return m.renew(ctx, due)
}

// both lets what waits go before the rest of a pass.
func (m *Mirror) both(ctx context.Context, err error) error {
	if err != nil {
		return err
	}
	return m.flush(ctx)
}

// recent returns the ends that are not too old to be told, oldest first.
func (m *Mirror) recent() []ending {
	m.mu.Lock()
	all := slices.Concat(m.ends[m.endsAt:], m.ends[:m.endsAt])
	m.mu.Unlock()
	oldest := time.Now().Add(-Tombstone)
	return slices.DeleteFunc(all, func(e ending) bool { return e.at.Before(oldest) })
}
