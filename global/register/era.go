package register

import (
	"cmp"
	"fmt"
	"time"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Era counts how often an operator has declared a majority of the voters
// destroyed (force-quorum). It orders before ballots: what the voters declared
// destroyed may still propose, should they live, must never win over what the
// survivors decided since [F16]. The zero era is the one that init began.
type Era struct {
	Counter uint64
	// ID is random: two eras of one counter are two operators' that did not know
	// of each other.
	ID uint64
}

// IsZero reports whether e is the era that init began.
func (e Era) IsZero() bool { return e == Era{} }

// Compare orders eras by counter, then id.
func (e Era) Compare(o Era) int {
	return cmp.Or(cmp.Compare(e.Counter, o.Counter), cmp.Compare(e.ID, o.ID))
}

func (e Era) String() string {
	if e.IsZero() {
		return "0"
	}
	return fmt.Sprintf("%d-%08x", e.Counter, e.ID>>32)
}

// Proto returns e as a message; nil for the zero era.
func (e Era) Proto() *pb.Era {
	if e.IsZero() {
		return nil
	}
	return &pb.Era{Counter: e.Counter, Id: e.ID}
}

// EraOf reads an era; nil is the zero era.
func EraOf(m *pb.Era) Era { return Era{Counter: m.GetCounter(), ID: m.GetId()} }

const (
	// nobody is a successor that no region can be, so that nobody takes the
	// partition before D has passed on the voter's clock.
	nobody = "~nobody"
	// eraRegion is the region in the ballot that an era begins with.
	eraRegion = "~era"
	// ReasonForced is the reason of the value that an era begins with.
	ReasonForced = "force-quorum"
)

// EraRecord is a register at the beginning of an era: released at the epoch,
// which is far above all that the survivors have seen, and taken by nobody
// before d has passed on the voter's clock. A head lease of the era before was
// renewed by a majority that has one of those declared destroyed in it, which
// stood still before this record was made: so it is over by then. The record is
// the same at every survivor, so that its ballot has one value.
func EraRecord(e Era, epoch fence.Epoch, d time.Duration) Record {
	b := Ballot{Era: e, Round: 1, Region: eraRegion, Incarnation: Incarnation(e.ID)}
	return Record{Promised: b, Accepted: b, Value: Value{Epoch: epoch, D: d, Successor: nobody, Reason: ReasonForced, Era: e}}
}
