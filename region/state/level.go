package state

import (
	"fmt"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// MaxLevel is the highest feature level that this version knows.
//
// At level 1 a machine does what the version before levels did, command by
// command and byte by byte, and writes its snapshots: servers of both may then
// form one group. Level 2 brings values, lock delays, wait deadlines, slots,
// drains, changes of the configuration, the check of the state hash, and drops in
// pieces; level 3 eras.
const MaxLevel = 3

// levelOf returns the feature level from which on a command may be applied.
func levelOf(cmd *pb.Command) uint32 {
	switch k := cmd.GetKind().(type) {
	case *pb.Command_BeginEra, *pb.Command_StopInEra:
		return 3
	case *pb.Command_SetValue, *pb.Command_EndWait, *pb.Command_EndDelay, *pb.Command_Settle,
		*pb.Command_StartDrain, *pb.Command_AbortDrain, *pb.Command_StateHash,
		*pb.Command_ConfigPromise, *pb.Command_ConfigAccept:
		return 2
	case *pb.Command_Configure:
		if k.Configure.GetConfiguration().GetEra() != nil {
			return 3 // of a region that joins
		}
		if k.Configure.GetConfiguration().GetVersion() > 1 {
			return 2
		}
	case *pb.Command_Acquire:
		if c := k.Acquire; len(c.GetValue()) > 0 || c.GetLockDelayMs() != 0 || c.GetWaitMs() != 0 || c.GetSlots() != 0 {
			return 2
		}
	case *pb.Command_Adopt:
		if k.Adopt.GetPlanned() {
			return 2
		}
	}
	return 1
}

// raiseLevel never lowers the level. A level that this version does not know
// does not come here: see unfit.
func (m *Machine) raiseLevel(c *pb.RaiseLevelCommand) *pb.CommandResult {
	switch {
	case c.GetLevel() == 0:
		return failed(errInvalid("level", fmt.Sprintf("name the level, 1 to %d", MaxLevel)))
	case c.GetLevel() > m.level:
		m.level = c.GetLevel()
		m.emit(LevelRaised{Level: m.level})
	}
	return &pb.CommandResult{}
}

func errLevel(need, have uint32) *pb.ErrorDetail {
	return errRefused(fmt.Sprintf("this needs feature level %d and the region is at level %d; upgrade all its servers, then the leader raises the level", need, have))
}
