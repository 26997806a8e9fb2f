package config

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Voter is what a voter keeps of the configuration: the decided one, by which
// it votes, and the register that decides on the next. It is a value; its
// methods judge a message and return what is to be made durable before the
// answer is sent. The next configuration c+1 is decided by single-decree Paxos
// with V1 only, among a majority of the voters of c [F20 H9]; nobody uses or
// gives out c+1 before it is decided.
type Voter struct {
	// Decided is nil before init, or before the voter joined.
	Decided  *pb.ClusterConfiguration
	Register Register
	// Stop, if set: the voter met another era, and answers nothing more [F16].
	Stop *pb.EraStop
}

// ConflictError: two configurations claim to be decided under one version, or
// one ballot came with two proposals. Neither can happen while every voter
// keeps its data.
type ConflictError struct {
	Version uint64
	Reason  string
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("configuration %d: %s; nothing was changed, compare what the voters have with `headlease config show`", e.Version, e.Reason)
}

// JoinError: a voter without configuration is given one that it is no member
// of.
type JoinError struct {
	ID                    string
	Incarnation, Recorded uint64
	Version               uint64
}

func (e *JoinError) Error() string {
	if e.Recorded == 0 {
		return fmt.Sprintf("%s is no member of configuration %d; add it first", e.ID, e.Version)
	}
	return fmt.Sprintf("configuration %d has %s with incarnation %x, its data now has %x: it was made anew; remove the old member and add the new one",
		e.Version, e.ID, e.Recorded, e.Incarnation)
}

// CheckVersion reports whether a message of that cluster, era and version may
// be answered here. Errors: ErrUninitialised, *OtherClusterError, *EraError,
// *VersionError.
func CheckVersion(decided *pb.ClusterConfiguration, clusterID string, era register.Era, version uint64) error {
	switch {
	case decided == nil:
		return ErrUninitialised
	case clusterID != decided.GetClusterId():
		return &OtherClusterError{Own: decided.GetClusterId(), Theirs: clusterID}
	case era != EraOf(decided): // before the version: versions of two eras say nothing of each other
		return &EraError{Own: EraOf(decided), Theirs: era}
	case version != decided.GetVersion():
		e := &VersionError{Own: decided.GetVersion(), Theirs: version}
		if version < e.Own {
			e.Newer = decided
		}
		return e
	}
	return nil
}

// Prepare promises a ballot for the version after the given one, or reports
// that a higher one is promised. next is what must be durable before the
// answer. Errors: those of CheckVersion, and *FieldError.
func (v Voter) Prepare(clusterID string, era register.Era, version uint64, b Ballot) (next Register, promised bool, err error) {
	if err := v.check(clusterID, era, version, b); err != nil {
		return v.Register, false, err
	}
	next = v.Register
	if b.Less(next.Promised) {
		return next, false, nil
	}
	next.Promised = b // the same again is a retransmission
	return next, true, nil
}

// Accept takes a proposal that has passed CheckChange against the decided
// configuration, or reports that a higher ballot is promised. next is what must
// be durable before the answer. Errors: those of CheckVersion, *FieldError,
// *ConflictError.
func (v Voter) Accept(clusterID string, era register.Era, version uint64, b Ballot, proposed *pb.ClusterConfiguration) (next Register, accepted bool, err error) {
	if err := v.check(clusterID, era, version, b); err != nil {
		return v.Register, false, err
	}
	next = v.Register
	switch {
	case b.Less(next.Promised):
		return next, false, nil
	case b == next.Accepted && !proto.Equal(proposed, next.Proposed):
		return next, false, &ConflictError{Version: version + 1, Reason: fmt.Sprintf("ballot %v came with two proposals", b)}
	case b == next.Accepted:
		return next, true, nil
	}
	if proposed.GetVersion() != version+1 || proposed.GetClusterId() != clusterID || EraOf(proposed) != era {
		return next, false, &FieldError{"proposed.version", fmt.Sprintf("is %d of cluster %q; the decision is on version %d of %q", proposed.GetVersion(), proposed.GetClusterId(), version+1, clusterID)}
	}
	return Register{Promised: b, Accepted: b, Proposed: proto.CloneOf(proposed)}, true, nil
}

func (v Voter) check(clusterID string, era register.Era, version uint64, b Ballot) error {
	if v.Stop != nil {
		return &StoppedError{Own: EraOf(v.Decided), Stop: v.Stop}
	}
	if err := CheckVersion(v.Decided, clusterID, era, version); err != nil {
		return err
	}
	const maxProposer, maxRound = 64, 1 << 62
	if b.Round == 0 || b.Round > maxRound || b.Proposer == "" || len(b.Proposer) > maxProposer {
		return &FieldError{"ballot", fmt.Sprintf("needs a round from 1 to 2^62 and a proposer of up to %d bytes", maxProposer)}
	}
	return nil
}

// Learn takes a decided configuration that has passed Check: the first one, or a newer one than it
// has, which begins the register afresh. self is the voter under its present
// incarnation. stored is false when there is nothing to do: it has this very
// one, or a newer one. Another era is entered by BeginEra only. Errors:
// *OtherClusterError, *EraError, *StoppedError, *JoinError, *ConflictError.
func (v Voter) Learn(self *pb.Voter, c *pb.ClusterConfiguration) (next Voter, stored bool, err error) {
	if v.Decided == nil {
		if got := VoterIncarnation(c, self.GetId()); got == 0 || got != self.GetIncarnation() {
			return v, false, &JoinError{ID: self.GetId(), Incarnation: self.GetIncarnation(), Recorded: got, Version: c.GetVersion()}
		}
		return Voter{Decided: proto.CloneOf(c)}, true, nil
	}
	have := v.Decided
	switch {
	case have.GetClusterId() != c.GetClusterId():
		return v, false, &OtherClusterError{Own: have.GetClusterId(), Theirs: c.GetClusterId()}
	case EraOf(have) != EraOf(c):
		return v, false, &EraError{Own: EraOf(have), Theirs: EraOf(c)}
	case v.Stop != nil:
		return v, false, &StoppedError{Own: EraOf(have), Stop: v.Stop}
	case have.GetVersion() > c.GetVersion():
		return v, false, nil
	case have.GetVersion() < c.GetVersion():
		return Voter{Decided: proto.CloneOf(c)}, true, nil
	case !proto.Equal(have, c):
		return v, false, &ConflictError{Version: c.GetVersion(), Reason: "another one of the same version is in force here"}
	}
	return v, false, nil
}
