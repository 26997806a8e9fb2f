package redisstream

import "github.com/headlease/headlease/fence/redisguard"

// The scripts that run under the check of a token.
var (
	openScript  = mustScript(luaOpen)
	claimScript = mustScript(luaClaim)
	readScript  = mustScript(luaRead)
	ackScript   = mustScript(luaAck)
	parkScript  = mustScript(luaPark)
)

const (
	// KEYS: stream. ARGV: group.
	luaOpen = `
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if type(made) == 'table' and made['err'] and not string.find(made['err'], 'BUSYGROUP') then
  return made
end
return 'OK'
`
	// Both replies end with the keys that are arriving. KEYS: stream, parked,
	// arriving. ARGV: group, consumer, cursor, count.
	luaClaim = `
local reply = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], '0', ARGV[3], 'COUNT', ARGV[4])
return {reply[1], reply[2], reply[3] or {}, redis.call('HKEYS', KEYS[2]), redis.call('SMEMBERS', KEYS[3])}
`
	// What is pending after the last entry that the feed has was delivered by a call
	// whose answer was lost, and comes first: the client calls again by itself then,
	// and what comes after it would be handled before it. The last
	// entry itself is asked for and left out, because the embedded Redis knows no
	// open range here. KEYS: stream, parked, arriving. ARGV: group, consumer, count,
	// id of the last entry.
	luaRead = `
local entries, gone = {}, {}
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[4], '+', ARGV[3] + 1, ARGV[2])
if pending[1] and pending[1][1] == ARGV[4] then table.remove(pending, 1) end
for _, p in ipairs(pending) do
  local found = redis.call('XRANGE', KEYS[1], p[1], p[1])
  if found[1] then
    entries[#entries + 1] = found[1]
  else
    gone[#gone + 1] = p[1]
    redis.call('XACK', KEYS[1], ARGV[1], p[1])
  end
end
if #pending == 0 then
  local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[1], '>')
  if reply then entries = reply[1][2] end
end
return {'', entries, gone, redis.call('HKEYS', KEYS[2]), redis.call('SMEMBERS', KEYS[3])}
`
	// KEYS: stream. ARGV: group, id, id, …
	luaAck = `return redis.call('XACK', KEYS[1], unpack(ARGV))`
	// Nothing is parked twice: an entry that is acknowledged already was parked by
	// the call whose answer was lost. KEYS: stream, parked, dead. ARGV: group, id,
	// key, seq, body, reason.
	luaPark = `
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('HINCRBY', KEYS[2], ARGV[3], 1)
redis.call('XADD', KEYS[3], '*', 'id', ARGV[2], 'key', ARGV[3], 'seq', ARGV[4], 'body', ARGV[5], 'reason', ARGV[6])
return 1
`
	// luaApply runs a body and acknowledges in the same step, unless that was done
	// by a call whose answer was lost. KEYS: the body's and the stream. ARGV: the body's, the ids, the group, the number of ids.
	luaApplyHead = `local headlease_apply = function(KEYS, ARGV) `
	luaApplyTail = "\nend\n" + `
local keys, args, ack = {}, {}, {}
local n = tonumber(ARGV[#ARGV])
for i = 1, #KEYS - 1 do keys[i] = KEYS[i] end
for i = 1, #ARGV - 2 - n do args[i] = ARGV[i] end
for i = 1, n do ack[i] = ARGV[#ARGV - 2 - n + i] end
local pending = 0
for i = 1, n do
  pending = pending + #redis.call('XPENDING', KEYS[#KEYS], ARGV[#ARGV - 1], ack[i], ack[i], 1)
end
if pending == 0 then return {0} end
if pending < n then
  return redis.error_reply('PARTIAL some entries of the batch are acknowledged already, and not with this script')
end
local reply = headlease_apply(keys, args)
if type(reply) == 'table' and reply['err'] then return reply end
redis.call('XACK', KEYS[#KEYS], ARGV[#ARGV - 1], unpack(ack))
return {1, reply}
`
)

func mustScript(body string) *redisguard.Script {
	s, err := redisguard.NewScript(body)
	if err != nil {
		panic(err) // a constant of this file
	}
	return s
}
