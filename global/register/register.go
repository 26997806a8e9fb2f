// Package register is the pure voter: one quorum register per partition that
// decides which region owns it (single-decree Paxos per ballot with
// read-modify-write, as in CASPaxos, arXiv:1802.07000; with the voter's clock
// as in PaxosLease, arXiv:1209.4187).
//
// A Register is a value: the durable Record, and what its voter keeps in
// memory. Judging (Prepare, Accept) never changes it; it returns what must be
// made durable. Update is the one function that changes a Record, run where
// the voter is durable: a witness's disk transaction, or a region's Raft
// Apply. After the write, Written installs the new record and starts the clock.
//
// The caller serialises all calls on one register.
package register

import (
	"cmp"
	"fmt"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// Incarnation is a random id of a region's or a witness's data, made anew when
// the data is. Zero: none.
type Incarnation uint64

// Region is a candidate or owner: a region under one incarnation of its data.
type Region struct {
	Name        string
	Incarnation Incarnation
}

// Ballot orders the proposals for a register. The zero ballot is below all.
type Ballot struct {
	Round       uint64
	Region      string
	Incarnation Incarnation
	Era         Era
}

// Compare orders ballots by era, round, region, incarnation.
func (b Ballot) Compare(o Ballot) int {
	return cmp.Or(b.Era.Compare(o.Era), cmp.Compare(b.Round, o.Round), cmp.Compare(b.Region, o.Region), cmp.Compare(b.Incarnation, o.Incarnation))
}

// Less reports whether b is below o.
func (b Ballot) Less(o Ballot) bool { return b.Compare(o) < 0 }

// IsZero reports whether b is no ballot.
func (b Ballot) IsZero() bool { return b == Ballot{} }

func (b Ballot) String() string {
	if b.IsZero() {
		return "none"
	}
	if b.Era.IsZero() {
		return fmt.Sprintf("%d.%s", b.Round, b.Region)
	}
	return fmt.Sprintf("%v:%d.%s", b.Era, b.Round, b.Region)
}

// Value is what a register decides.
type Value struct {
	// Owner is empty when the partition is released.
	Owner Region
	Epoch fence.Epoch
	// D is the head lease's length; owner and voter count the same one.
	D time.Duration
	// Successor alone may take a released partition before D has passed;
	// empty: any.
	Successor string
	Reason    string
	// Era of the ballot.
	Era Era
}

// Reasons of values that those who take a partition over go by.
const (
	// ReasonDrained: released after a drain that left no lease and no lock
	// delay, so that the next owner need not wait any delay out.
	ReasonDrained = "drained"
	// ReasonDelayed: released after a drain that left lock delays.
	ReasonDelayed = "drained, lock delays run on"
	// ReasonTransferred: the owner has it by a planned transfer, and no automatic
	// one takes it from there.
	ReasonTransferred = "transferred"
	// ReasonRaised: the owner of the epoch before raised it itself.
	ReasonRaised = "epoch raised"
)

// Released reports whether nobody owns the partition by this value.
func (v Value) Released() bool { return v.Owner == Region{} }

// Record is the durable part of a register. It is comparable.
type Record struct {
	Promised, Accepted Ballot
	Value              Value
	// Alarm: one ballot came with two values. The register answers nothing
	// more until an operator clears it.
	Alarm string
}

// Register is a register as its voter sees it.
type Register struct {
	Record
	// Since is when the value was accepted or last renewed on this voter's
	// clock; it is volatile.
	Since instant.Instant
	// Pending is set from the V2 check until the promise's fate is known
	// [H3]: meanwhile no Accept and no renewal is proposed or answered.
	Pending bool
}

// Restart returns the register as a voter must see it after its start, at the
// start of a leader's term, or after a clock gap: every accepted value,
// released ones included, counts as accepted just now [H5].
func Restart(rec Record, now instant.Instant) Register {
	return Register{Record: rec, Since: now}
}

// Remaining is how long the accepted value's D still runs on this voter's
// clock; zero when over or when nothing was accepted.
func (r Register) Remaining(now instant.Instant) time.Duration {
	if r.Accepted.IsZero() {
		return 0
	}
	return max(0, r.Since.Add(r.Value.D).Sub(now))
}

// Verdict is what the voter's failure detector says of the owner's region: a
// suspicion, never authority.
type Verdict int

// Verdicts. Healthy and Slow both mean "alive" to V3.
const (
	VerdictUnknown Verdict = iota
	VerdictHealthy
	VerdictSlow
	VerdictCrashed
)

// Alive reports whether the detector holds the region alive.
func (v Verdict) Alive() bool { return v == VerdictHealthy || v == VerdictSlow }

func (v Verdict) String() string {
	return [...]string{"unknown", "healthy", "slow", "crashed"}[v]
}

// Rule names why a voter refused.
type Rule int

// Rules, as in the design, §2.
const (
	RuleNone Rule = iota
	RuleV1Ballot
	RuleV2Running
	RuleV3Alive
	RulePending
	RuleAlarm
	RuleConflict
	RuleRetry
	RuleUnknownPartition
)

func (r Rule) String() string {
	return [...]string{"", "V1 (ballot not above the promised one)", "V2 (head lease running)", "V3 (owner heard alive)",
		"promise in flight", "register alarmed", "ballot with two values", "try again", "unknown partition"}[r]
}

// Guard is what a change was checked against: it takes effect only while the
// record still has both [H3].
type Guard struct {
	Promised, Accepted Ballot
}

// Guard returns the guard of the present record.
func (r Record) Guard() Guard { return Guard{r.Promised, r.Accepted} }

// Action is what a voter has to do about a message.
type Action int

// Actions.
const (
	// Refuse: answer with Rule. Writes nothing.
	Refuse Action = iota
	// Answer: yes, without a write (a dry Prepare, a retransmission).
	Answer
	// Renew: yes, without a write; a region answers only after a leadership
	// check begun after the message arrived, then calls Renewed.
	Renew
	// Write: make Change durable, then answer.
	Write
	// WriteAlarm: make Change durable, then refuse with RuleConflict.
	WriteAlarm
)

// Change is a durable step of a register.
type Change struct {
	Guard  Guard
	Ballot Ballot
	// Accept: take Value under Ballot; otherwise promise Ballot.
	Accept bool
	Value  Value
	// Alarm is recorded instead, when set.
	Alarm string
}

// Decision is a voter's judgement of one message.
type Decision struct {
	Action Action
	Rule   Rule
	Change Change
}

func refuse(r Rule) Decision { return Decision{Action: Refuse, Rule: r} }

// PrepareInput is a Prepare as it reaches a voter.
type PrepareInput struct {
	Candidate Region
	Ballot    Ballot
	// Dry asks only [F31]; V1 is judged against the ballot the candidate
	// would take, see Prepare.
	Dry bool
	// Verdict is the voter's detector on the owner's region.
	Verdict Verdict
}

// Prepare judges a Prepare by V1, V2 and V3. A dry Prepare has no ballot yet:
// V1 passes, since ReserveBallot will go above what it is told is promised.
func (r Register) Prepare(now instant.Instant, in PrepareInput) Decision {
	if r.Alarm != "" {
		return refuse(RuleAlarm)
	}
	if r.Pending {
		return refuse(RulePending)
	}
	if !in.Dry {
		if in.Ballot == r.Promised && in.Ballot.Region == in.Candidate.Name && in.Ballot.Incarnation == in.Candidate.Incarnation {
			return Decision{Action: Answer} // a retransmission: nothing below it was accepted since
		}
		if !r.Promised.Less(in.Ballot) {
			return refuse(RuleV1Ballot)
		}
	}
	if !r.passesV2(now, in.Candidate) {
		return refuse(RuleV2Running)
	}
	if !r.passesV3(now, in.Candidate, in.Verdict) {
		return refuse(RuleV3Alive)
	}
	if in.Dry {
		return Decision{Action: Answer}
	}
	return Decision{Action: Write, Change: Change{Guard: r.Guard(), Ballot: in.Ballot}}
}

// PrepareAgain judges, by V1 alone, the Prepare of a ballot under which the
// value found is accepted as it is: that changes neither owner nor epoch, so a
// running head lease does not stand in its way [H10].
func (r Register) PrepareAgain(b Ballot) Decision {
	switch {
	case r.Alarm != "":
		return refuse(RuleAlarm)
	case r.Pending:
		return refuse(RulePending)
	case b == r.Promised:
		return Decision{Action: Answer}
	case b.Less(r.Promised):
		return refuse(RuleV1Ballot)
	}
	return Decision{Action: Write, Change: Change{Guard: r.Guard(), Ballot: b}}
}

func (r Register) passesV2(now instant.Instant, candidate Region) bool {
	switch {
	case r.Accepted.IsZero(), r.Value.Owner == candidate, r.Remaining(now) == 0:
		return true
	case r.Value.Released():
		return r.Value.Successor == "" || r.Value.Successor == candidate.Name
	}
	return false
}

func (r Register) passesV3(now instant.Instant, candidate Region, verdict Verdict) bool {
	if r.Accepted.IsZero() || r.Value.Released() || r.Value.Owner.Name == candidate.Name || !verdict.Alive() {
		return true
	}
	return now.Sub(r.Since) >= 3*r.Value.D // over for 2D more
}

// Accept judges an Accept: first ones and renewals are under one condition,
// ballot >= promised.
func (r Register) Accept(b Ballot, v Value) Decision {
	switch {
	case r.Alarm != "":
		return refuse(RuleAlarm)
	case b == r.Accepted && v != r.Value:
		alarm := fmt.Sprintf("ballot %v came with two values: %+v and %+v", b, r.Value, v)
		return Decision{Action: WriteAlarm, Rule: RuleConflict, Change: Change{Guard: r.Guard(), Ballot: b, Alarm: alarm}}
	case b.Less(r.Promised):
		return refuse(RuleV1Ballot)
	case r.Pending:
		return refuse(RulePending)
	case b == r.Accepted:
		return Decision{Action: Renew}
	}
	return Decision{Action: Write, Change: Change{Guard: r.Guard(), Ballot: b, Accept: true, Value: v}}
}

// Update is the durable step: it returns the changed record, or false with the
// record unchanged when the guard does not hold. It never panics, whatever the
// change holds.
func Update(rec Record, c Change) (Record, bool) {
	if rec.Guard() != c.Guard || rec.Alarm != "" {
		return rec, false
	}
	switch {
	case c.Alarm != "":
		rec.Alarm = c.Alarm
	case c.Ballot.Less(rec.Promised), !c.Accept && c.Ballot == rec.Promised:
		return rec, false
	case c.Accept:
		rec.Promised, rec.Accepted, rec.Value = c.Ballot, c.Ballot, c.Value
	default:
		rec.Promised = c.Ballot
	}
	return rec, true
}

// Written returns the register after a durable change of its record; a newly
// accepted value starts the clock at full D.
func (r Register) Written(now instant.Instant, rec Record) Register {
	if rec.Accepted != r.Accepted {
		r.Since = now
	}
	r.Record = rec
	return r
}

// Renewed restarts the clock for a renewal whose leadership check has passed,
// or reports false: the record moved on or a promise is in flight.
func (r Register) Renewed(now instant.Instant, b Ballot, v Value) (Register, bool) {
	if r.Accept(b, v).Action != Renew {
		return r, false
	}
	r.Since = now
	return r, true
}
