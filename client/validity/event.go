package validity

import (
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Kind of an event.
type Kind int

// Kinds.
const (
	// Granted: an open request has got Token. Offered says that it came from a
	// queue and must be confirmed: the Table asks for a keepalive at once.
	Granted Kind = iota + 1
	// Withdrawn: the token ends at Until (zero: at once). Stop the work on it.
	Withdrawn
	// Lost: the region holds the token for this client no more, or never did
	// so under a validity that reached it. It is not believed any more.
	Lost
	// Stranger: the region holds Token for this client and nobody here asked
	// for it. It is not believed; release it [F17].
	Stranger
	// SessionEnded: the session is over and with it all its leases.
	SessionEnded
	// RequestFailed: a waiting Acquire ends without a grant; Err says why.
	RequestFailed
)

func (k Kind) String() string {
	switch k {
	case Granted:
		return "granted"
	case Withdrawn:
		return "withdrawn"
	case Lost:
		return "lost"
	case Stranger:
		return "stranger"
	case SessionEnded:
		return "session ended"
	case RequestFailed:
		return "request failed"
	}
	return "unknown"
}

// Event is something that the shell must act on.
type Event struct {
	Kind     Kind
	Session  string
	Resource string
	Token    fence.Token
	// Request of Granted and RequestFailed.
	Request   uint64
	Partition string
	Offered   bool
	// Until of Withdrawn, on the client's clock: no validity reaches further. It
	// may end before.
	Until instant.Instant
	// Withdrawal of Withdrawn.
	Withdrawal pb.WithdrawalReason
	// Reason of SessionEnded, for people.
	Reason string
	// Err of RequestFailed.
	Err *pb.ErrorDetail
}
