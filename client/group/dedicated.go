package group

import (
	"context"
	"slices"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/group/plan"
	"github.com/headlease/headlease/internal/pause"
	"github.com/headlease/headlease/internal/wake"
	"github.com/headlease/headlease/shard"
)

// tablePause is how often the assigner asks for the dedicated shards.
const tablePause = 2 * time.Second

// followTable keeps the table of dedicated shards while this member assigns. It
// never goes back to an older one, which a region that is behind may have.
func (m *member) followTable(ctx context.Context) {
	for pause.For(ctx, tablePause) == nil {
		m.mu.Lock()
		lead, had := m.lead, m.table.Version
		m.mu.Unlock()
		if lead == nil {
			continue
		}
		limited, cancel := context.WithTimeout(ctx, tellLimit)
		table, err := m.cfg.Client.ShardTable(limited)
		cancel()
		if err != nil {
			m.cfg.Logger.Debug("group: no region says which shards are dedicated", "group", m.cfg.Name, "error", err)
			continue
		}
		if table.Version > had {
			m.mu.Lock()
			m.table = table
			m.mu.Unlock()
			wake.Up(m.heard)
		}
	}
}

// serve returns the shards to assign: the configured ones, and the dedicated
// ones of keys whose hash shard is among these. As long as the table is not known
// those of the assignment stay.
func (c Config) serve(table client.ShardTable, now plan.Assignment) []uint32 {
	if !c.dedicated {
		return c.Shards
	}
	var more []uint32
	if table.Version == 0 {
		for s := range now {
			if s >= shard.FirstDedicated && !slices.Contains(c.Shards, s) {
				more = append(more, s)
			}
		}
	}
	for key, s := range table.Exceptions {
		home := shard.HashShard(key, table.Shards)
		if slices.Contains(c.Shards, home) && !slices.Contains(c.Shards, s) {
			more = append(more, s)
		}
	}
	if len(more) == 0 {
		return c.Shards
	}
	slices.Sort(more)
	return slices.Concat(c.Shards, more)
}
