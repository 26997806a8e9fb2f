package state

import (
	"fmt"

	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Apply changes the state by one command of the entry at index, written in
// term, and returns the result and what happened, in order. Owner only. The
// caller must not change cmd afterwards.
//
// A refused command (result.Error set) has changed nothing, save that a
// refused Acquire may have raised its session's lowest open request, and that
// any command removes a piece of a dropped epoch or of the queues of a
// draining partition while there are such. An unknown command, one with fields
// that this version does not know, and a hash that differs from the one
// recorded here change nothing and poison the machine: see Poisoned.
func (m *Machine) Apply(index, term uint64, cmd *pb.Command) (*pb.CommandResult, []Event) {
	if m.poison != nil {
		return failed(errRefused("the state machine is stopped: " + m.poison.Error())), nil
	}
	if m.poison = m.unfit(index, term, cmd); m.poison != nil {
		return &pb.CommandResult{}, nil
	}
	m.record(index)
	m.view = nil
	m.applied = max(m.applied, index)
	if e := m.admit(term, cmd); e != nil {
		return failed(e), nil
	}
	m.events = nil
	res := m.dispatch(index, term, cmd)
	m.sweepOn()
	m.settleHashes()
	events := m.events
	m.events = nil
	return res, events
}

// unfit returns why this machine must not go on with cmd, or nil.
func (m *Machine) unfit(index, term uint64, cmd *pb.Command) error {
	if cmd.GetKind() == nil {
		return fmt.Errorf("%w: entry %d: a command of a kind unknown here", ErrUnknownCommand, index)
	}
	if hasUnknownFields(cmd) {
		return fmt.Errorf("%w: entry %d: %T with a field unknown here", ErrUnknownCommand, index, cmd.GetKind())
	}
	switch k := cmd.GetKind().(type) {
	case *pb.Command_RaiseLevel:
		if k.RaiseLevel.GetLevel() > MaxLevel {
			return fmt.Errorf("%w: entry %d raises the feature level to %d; this version knows level %d", ErrUnknownCommand, index, k.RaiseLevel.GetLevel(), MaxLevel)
		}
	case *pb.Command_StateHash:
		if m.admit(term, cmd) == nil {
			return m.diverged(k.StateHash)
		}
	}
	return nil
}

// admit checks what holds for all commands: the term and that there is a
// region.
func (m *Machine) admit(term uint64, cmd *pb.Command) *pb.ErrorDetail {
	if cmd.GetTerm() != 0 && cmd.GetTerm() != term {
		return errWrongTerm(term) // a deposed leader's, under its successor [F2 H4]
	}
	if need := levelOf(cmd); need > m.level {
		return errLevel(need, m.level)
	}
	initialised := m.incarnation != 0
	switch cmd.GetKind().(type) {
	case *pb.Command_BeginTerm:
		return needTerm(cmd)
	case *pb.Command_Pulse, *pb.Command_InitRegion:
		return nil
	case *pb.Command_Promise, *pb.Command_Accepted, *pb.Command_Adopt, *pb.Command_Drop, *pb.Command_RecordVoters,
		*pb.Command_Expire, *pb.Command_Revoke, *pb.Command_EndRevocation, *pb.Command_EndWait, *pb.Command_EndDelay,
		*pb.Command_Settle, *pb.Command_StartDrain, *pb.Command_AbortDrain:
		if e := needTerm(cmd); e != nil {
			return e
		}
	}
	if !initialised {
		return errUninitialised()
	}
	return nil
}

// needTerm refuses a command that rests on the leader's clocks, detector or
// judgement and does not say in which term they were read.
func needTerm(cmd *pb.Command) *pb.ErrorDetail {
	if cmd.GetTerm() == 0 {
		return errInvalid("term", "stamp the command with the leader's term: it rests on that leader's clocks or judgement")
	}
	return nil
}

func (m *Machine) dispatch(index, term uint64, cmd *pb.Command) *pb.CommandResult {
	switch k := cmd.GetKind().(type) {
	case *pb.Command_BeginTerm:
		m.emit(TermBegun{Term: term, Index: index, Server: k.BeginTerm.GetServer()})
	case *pb.Command_Pulse:
		m.pulse = max(m.pulse, index)
		m.emit(PulseCommitted{Index: index})
	case *pb.Command_InitRegion:
		return m.initRegion(k.InitRegion)
	case *pb.Command_Configure:
		return m.configure(k.Configure.GetConfiguration())
	case *pb.Command_ConfigPromise:
		return m.promiseConfig(k.ConfigPromise)
	case *pb.Command_ConfigAccept:
		return m.acceptConfig(k.ConfigAccept)
	case *pb.Command_BeginEra:
		return m.beginEra(k.BeginEra.GetPlan())
	case *pb.Command_StopInEra:
		return m.stopInEra(k.StopInEra.GetStop())
	case *pb.Command_ReserveBallot:
		return m.reserveBallot(k.ReserveBallot.GetAbove())
	case *pb.Command_Promise:
		return m.promise(k.Promise)
	case *pb.Command_Accepted:
		return m.accepted(k.Accepted)
	case *pb.Command_Adopt:
		return m.adopt(k.Adopt)
	case *pb.Command_Drop:
		return m.drop(k.Drop)
	case *pb.Command_RecordVoters:
		return m.recordVoters(k.RecordVoters)
	case *pb.Command_OpenSession:
		return m.openSession(k.OpenSession)
	case *pb.Command_CloseSession:
		m.endSessions([]string{k.CloseSession.GetSessionId()}, EndClosed)
	case *pb.Command_Expire:
		m.endSessions(k.Expire.GetSessionIds(), EndExpired)
	case *pb.Command_Acquire:
		return m.acquire(k.Acquire)
	case *pb.Command_Cancel:
		return m.cancel(k.Cancel)
	case *pb.Command_Release:
		return m.release(k.Release)
	case *pb.Command_Revoke:
		return m.revoke(k.Revoke)
	case *pb.Command_EndRevocation:
		return m.endRevocation(k.EndRevocation)
	case *pb.Command_SetValue:
		return m.setValueOf(k.SetValue)
	case *pb.Command_EndWait:
		return m.endWait(k.EndWait)
	case *pb.Command_EndDelay:
		return m.endDelay(k.EndDelay)
	case *pb.Command_Settle:
		return m.settle(k.Settle)
	case *pb.Command_StartDrain:
		return m.startDrain(k.StartDrain)
	case *pb.Command_AbortDrain:
		return m.abortDrain(k.AbortDrain)
	case *pb.Command_RaiseLevel:
		return m.raiseLevel(k.RaiseLevel)
	}
	return &pb.CommandResult{}
}

// initRegion gives the region's data its incarnation, once [F4].
func (m *Machine) initRegion(c *pb.InitRegionCommand) *pb.CommandResult {
	done := func(already bool) *pb.CommandResult {
		return &pb.CommandResult{Kind: &pb.CommandResult_Init{Init: &pb.InitRegionResult{
			Incarnation: uint64(m.incarnation), Already: already,
		}}}
	}
	switch {
	case c.GetRegion() == "" || len(c.GetRegion()) > maxName:
		return failed(errInvalid("region", fmt.Sprintf("name the region in 1 to %d bytes", maxName)))
	case c.GetIncarnation() == 0:
		return failed(errInvalid("incarnation", "choose a random one that is not zero"))
	case m.incarnation == 0:
		m.region, m.incarnation = c.GetRegion(), register.Incarnation(c.GetIncarnation())
		m.emit(Initialised{Region: m.region, Incarnation: m.incarnation})
		return done(false)
	case m.region != c.GetRegion():
		return failed(errRefused(fmt.Sprintf("this is the data of region %q, not of %q; start the server with its own data directory", m.region, c.GetRegion())))
	}
	return done(true)
}

// maxName bounds the names of regions, partitions, voters, sessions and
// clients, in bytes; maxResource those of resources.
const (
	maxName     = 256
	maxResource = 300
)
