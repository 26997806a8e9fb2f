package redisstream

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"
)

// The lowest entry that some group has not acknowledged stays, and all above
// it: the lowest pending one, or else the last delivered one.
var trimScript = redis.NewScript(`
local function less(a, b)
  local am, as = string.match(a, '^(%d+)-(%d+)$')
  local bm, bs = string.match(b, '^(%d+)-(%d+)$')
  am, as, bm, bs = tonumber(am), tonumber(as), tonumber(bm), tonumber(bs)
  return am < bm or am == bm and as < bs
end
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local lowest
for _, g in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for i = 1, #g, 2 do group[g[i]] = g[i + 1] end
  local needed = group['last-delivered-id']
  if group['pending'] > 0 then
    needed = redis.call('XPENDING', KEYS[1], group['name'])[2]
  end
  if not lowest or less(needed, lowest) then lowest = needed end
end
if not lowest then return 0 end
return redis.call('XTRIM', KEYS[1], 'MINID', '=', lowest)
`)

// Trim drops from a stream what every consumer group has acknowledged, and
// returns how many entries that were. Of a stream without groups it drops
// nothing.
func Trim(ctx context.Context, client redis.UniversalClient, stream string) (int64, error) {
	n, err := trimScript.Run(ctx, client, []string{stream}).Int64()
	if err != nil {
		return 0, fmt.Errorf("trim %s: %w", stream, err)
	}
	return n, nil
}
