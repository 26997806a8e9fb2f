package cache

import "github.com/redis/go-redis/v9"

// The scripts' replies.
const (
	replyOK = "ok"
	// replyOld: the entry is of a higher token, or the tombstone of this one.
	replyOld = "old"
	// replyLate: the write was on its way for too long.
	replyLate = "late"
	// replyMissing: there is no entry of the token to renew.
	replyMissing = "missing"
)

// KEYS[1] is the entry. Tokens are compared as numbers, exact below 2^53, as are times. Both
// times have 13 digits until the year 2286, so that a renewal overwrites them in place.
const luaHead = `
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local seen, state = string.match(redis.call('GETRANGE', KEYS[1], 0, 31), '^(%d+) ([LT]) ')
`

var (
	// put: ARGV are token, state, the expiry in milliseconds, the tail, and when the write
	// becomes void on the server's clock, in milliseconds.
	put = redis.NewScript(luaHead + `
if now > tonumber(ARGV[5]) then return 'late' end
if seen and (tonumber(seen) > tonumber(ARGV[1]) or seen == ARGV[1] and state == 'T' and ARGV[2] == 'L') then return 'old' end
local text = string.format('%s %s %.0f %.0f ', ARGV[1], ARGV[2], now, now + tonumber(ARGV[3])) .. ARGV[4]
local reply = redis.pcall('SET', KEYS[1], text, 'PX', tonumber(ARGV[3]))
if reply['err'] then
  -- No memory for the new entry: the old one is wrong, and no entry is not.
  redis.call('DEL', KEYS[1])
  return reply
end
return 'ok'
`)
	// renew: ARGV are token and the expiry in milliseconds.
	renew = redis.NewScript(luaHead + `
if seen ~= ARGV[1] or state ~= 'L' then return 'missing' end
local reply = redis.pcall('SETRANGE', KEYS[1], #seen + 3, string.format('%.0f %.0f', now, now + tonumber(ARGV[2])))
if type(reply) == 'table' and reply['err'] then return reply end
redis.call('PEXPIRE', KEYS[1], tonumber(ARGV[2]))
return 'ok'
`)
)
