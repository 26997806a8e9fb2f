package redisstream

import "github.com/redis/go-redis/v9"

// carried is how many messages one script carries over.
const carried = 100

// The scripts of a move. They run under no token: whoever takes a step, it is
// checked in the slot itself. See place for what they do; the property tests
// hold them to a model in Go.
var (
	lookScript     = redis.NewScript(luaRecord + luaAnswer + luaLook)
	claimedScript  = redis.NewScript(luaRecord + luaAnswer + luaClaimed)
	stayScript     = redis.NewScript(luaRecord + luaAnswer + luaStay)
	sealScript     = redis.NewScript(luaRecord + luaAnswer + luaSeal)
	drainScript    = redis.NewScript(luaRecord + luaAnswer + luaDrain)
	arriveScript   = redis.NewScript(luaRecord + luaArriveHead + luaAnswer + luaArrive)
	openMoveScript = redis.NewScript(luaRecord + luaAnswer + luaOpenMove)
)

const (
	// A record is text: generation place other last upTo floor. Numbers stay the
	// text that they are and are compared as numbers, exact below 2^53.
	luaRecord = `
local function read_record(moves, key, at, home)
  local text = redis.call('HGET', moves, key)
  if not text then
    if at == home then return {gen = '0', place = 'here', other = home, last = '0', upto = '0-0', floor = '-'} end
    return {gen = '0', place = 'away', other = home, last = '0', upto = '0-0', floor = '-'}
  end
  local r = {}
  r.gen, r.place, r.other, r.last, r.upto, r.floor = string.match(text, '^(%d+) (%l+) (%d+) (%d+) (%d+%-%d+) ([%d%-]+)$')
  if not r.gen then error('the record of a move in ' .. moves .. ' is ' .. text) end
  return r
end
local function write_record(moves, key, r)
  redis.call('HSET', moves, key, table.concat({r.gen, r.place, r.other, r.last, r.upto, r.floor}, ' '))
end
`
	luaArriveHead = `
local function arrive(moves, seq, arriving, key, gen, from, last)
  local r = {gen = gen, place = 'arriving', other = from, last = last, upto = '0-0', floor = '-'}
  write_record(moves, key, r)
  redis.call('HSET', seq, key, last)
  redis.call('SADD', arriving, key)
  return r
end
`
	// KEYS: moves, stream, seq, parked, arriving, arriving:KEY, mark. ARGV: key,
	// this shard, the key's hash shard, …
	luaAnswer = `
local key = ARGV[1]
local r = read_record(KEYS[1], key, ARGV[2], ARGV[3])
local function answer(word, left)
  return {word, r.gen, r.place, r.other, r.last, r.upto, r.floor, tostring(left or 0)}
end
`
	luaLook    = `return answer('said')`
	luaClaimed = `return answer(redis.call('EXISTS', KEYS[7]) == 1 and 'said' or 'unmarked')`
	// ARGV: … generation.
	luaStay = `
if tonumber(r.gen) >= tonumber(ARGV[4]) then return answer('newer') end
if r.place ~= 'here' then return answer('busy') end
r.gen = ARGV[4]
write_record(KEYS[1], key, r)
return answer('said')
`
	// ARGV: … generation, to.
	luaSeal = `
if tonumber(r.gen) > tonumber(ARGV[4]) then return answer('newer') end
if r.gen == ARGV[4] then
  if r.place == 'away' then return answer('said') end
  return answer('newer')
end
if r.place ~= 'here' then return answer('busy') end
local n = tonumber(redis.call('HGET', KEYS[4], key) or 0)
if n > 0 then return answer('parked', n) end
r = {gen = ARGV[4], place = 'away', other = ARGV[5], last = redis.call('HGET', KEYS[3], key) or '0', upto = '0-0', floor = '-'}
if redis.call('EXISTS', KEYS[2]) == 1 then
  local info = redis.call('XINFO', 'STREAM', KEYS[2])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then r.upto = info[i + 1] end
  end
end
write_record(KEYS[1], key, r)
return answer('said')
`
	// All up to the seal is handled when no group has any of it pending or before
	// it. Parked messages are not handled. ARGV: … generation.
	luaDrain = `
if r.gen ~= ARGV[4] then return answer('newer') end
if r.place ~= 'away' then return answer('busy') end
if r.floor ~= '-' then return answer('said') end
local n = tonumber(redis.call('HGET', KEYS[4], key) or 0)
if n > 0 then return answer('parked', n) end
if r.last == '0' then
  r.floor = '0'
  write_record(KEYS[1], key, r)
  return answer('said')
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  local groups = redis.call('XINFO', 'GROUPS', KEYS[2])
  if #groups == 0 and #redis.call('XRANGE', KEYS[2], '-', r.upto, 'COUNT', 1) > 0 then return answer('busy') end
  for _, g in ipairs(groups) do
    local group = {}
    for i = 1, #g, 2 do group[g[i]] = g[i + 1] end
    local open = #redis.call('XPENDING', KEYS[2], group['name'], '-', r.upto, 100)
    open = open + #redis.call('XRANGE', KEYS[2], '(' .. group['last-delivered-id'], r.upto, 'COUNT', 1000)
    if open > 0 then return answer('busy', open) end
  end
end
local mark = redis.call('GET', KEYS[7])
if not mark then return answer('unmarked') end
r.floor = mark
write_record(KEYS[1], key, r)
return answer('said')
`
	// ARGV: … generation, from, last.
	luaArrive = `
if tonumber(r.gen) > tonumber(ARGV[4]) then return answer('newer') end
if r.gen ~= ARGV[4] then r = arrive(KEYS[1], KEYS[3], KEYS[5], key, ARGV[4], ARGV[5], ARGV[6]) end
return answer('said')
`
	// ARGV: … generation, floor, most, channel, resource.
	luaOpenMove = `
if r.gen ~= ARGV[4] then return answer('newer') end
if r.place ~= 'arriving' then return answer('said') end
local mark, floor = redis.call('GET', KEYS[7]), tonumber(ARGV[5])
if floor > 0 and (not mark or tonumber(mark) <= floor) then return answer(mark and 'lease' or 'unmarked') end
for _, entry in ipairs(redis.call('XRANGE', KEYS[6], '-', '+', 'COUNT', ARGV[6])) do
  redis.call('XADD', KEYS[2], '*', unpack(entry[2]))
  redis.call('XDEL', KEYS[6], entry[1])
end
redis.call('PUBLISH', ARGV[7], ARGV[8])
local left = redis.call('XLEN', KEYS[6])
if left > 0 then return answer('more', left) end
redis.call('DEL', KEYS[6])
redis.call('SREM', KEYS[5], key)
r.place = 'here'
write_record(KEYS[1], key, r)
return answer('said')
`
)
