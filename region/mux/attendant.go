package mux

import (
	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor/run"
)

// Prove checks that a caller may speak for a session. known is false, without an
// error, for a session that is not there: the lessor says so, after a leadership
// check.
type Prove func(caller policy.Caller, session string, secret []byte) (known bool, err error)

// maxProven bounds the sessions that a stream is remembered to have proven; then
// each shows its secret once more.
const maxProven = maxSessions

// attendant is the leader's side of one client stream. One goroutine at a time
// calls it.
type attendant struct {
	prove  Prove
	caller policy.Caller
	stream *run.Stream
	proven map[string]struct{}
}

func newAttendant(prove Prove, caller policy.Caller) *attendant {
	return &attendant{prove: prove, caller: caller, proven: map[string]struct{}{}}
}

// admit turns what the client says into an input of the shell; ok is false if it
// is nothing, and an error ends the stream.
func (a *attendant) admit(req *pb.AttachRequest) (in run.Input, ok bool, err error) {
	switch k := req.GetKind().(type) {
	case *pb.AttachRequest_Keepalive:
		id := k.Keepalive.GetSessionId()
		if _, done := a.proven[id]; !done {
			known, err := a.prove(a.caller, id, k.Keepalive.GetSecret())
			if err != nil {
				return in, false, err
			}
			if len(a.proven) >= maxProven {
				clear(a.proven)
			}
			if known {
				a.proven[id] = struct{}{}
			}
		}
		return run.Input{Stream: a.stream, Keepalive: k.Keepalive}, true, nil
	case *pb.AttachRequest_Detach:
		id := k.Detach.GetSessionId()
		if _, done := a.proven[id]; !done {
			return in, false, nil
		}
		delete(a.proven, id)
		return run.Input{Stream: a.stream, Detach: id}, true, nil
	}
	return in, false, invalid("kind", "is missing; send a keepalive or a detach")
}
