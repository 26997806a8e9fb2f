package redisguard

import (
	"errors"
	"strings"

	"github.com/redis/go-redis/v9"
)

// The first word of the errors by which a script refuses. What was written is replied as it
// is: a status beside it would cost half of the check.
const (
	errStale     = "HLSTALE" // and the mark
	errUnclaimed = "HLUNCLAIMED"
	errCorrupt   = "HLCORRUPT"
)

// In all scripts KEYS[1] is the mark and ARGV[1] the token in decimal. Tokens
// are compared as numbers, exact below 2^53, and stored and returned as the
// text that came: tostring would round to 14 digits. Mostly they are equal.
const (
	luaSeen = `
local seen = redis.call('GET', KEYS[1])
if seen and seen ~= ARGV[1] then
  if #seen > 16 or not string.match(seen, '^[1-9][0-9]*$') then return redis.error_reply('HLCORRUPT the mark is no token') end
  if tonumber(ARGV[1]) < tonumber(seen) then return redis.error_reply('HLSTALE ' .. seen) end
end
`
	luaHeld = luaSeen + `
if seen ~= ARGV[1] then
  if not seen then return redis.error_reply('HLUNCLAIMED') end
  redis.call('SET', KEYS[1], ARGV[1])
end
`
	// SET also takes away a TTL that somebody gave the mark.
	luaClaim = luaSeen + `
redis.call('SET', KEYS[1], ARGV[1])
return 'ok'
`
	// The body comes first and on the first line: it sees none of the
	// check's locals, and the lines of its errors are its own.
	luaBodyHead = `local headlease_body = function(KEYS, ARGV) `
	luaBodyTail = "\nend\n" + luaHeld + `
table.remove(KEYS, 1)
table.remove(ARGV, 1)
return headlease_body(KEYS, ARGV)
`
	// luaCommand runs one command, given whole as the arguments.
	luaCommand = luaHeld + `
return redis.call(unpack(ARGV, 2))
`
)

// maxCommandArgs is below where Lua's unpack fails ("too many results to
// unpack", at about 8000).
const maxCommandArgs = 7000

// Script is a Lua script that runs under the check of a token. Make it once:
// it is safe for concurrent use, and the server keeps each one it was sent.
type Script struct {
	script *redis.Script
}

// NewScript makes a guarded script of the body of an ordinary one, which sees
// its own KEYS and ARGV, from 1, and returns what it likes. The server runs
// check and body as one atomic step. The body must reach only keys that it is
// given and must not touch marks; it is code, so never built from input.
// Whether it is Lua the server says when it runs.
func NewScript(body string) (*Script, error) {
	switch {
	case strings.TrimSpace(body) == "":
		return nil, errors.New("guarded script: is empty; give the Lua that writes")
	case strings.HasPrefix(body, "#!"):
		return nil, errors.New(`guarded script: begins with "#!", which cannot follow the check; leave the line out`)
	}
	return &Script{script: redis.NewScript(luaBodyHead + body + luaBodyTail)}, nil
}
