package state

import (
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// hasUnknownFields reports whether a command holds fields that this version
// does not know: to ignore them would be to skip a part of the command. The
// frequent commands are flat, so they are not walked.
func hasUnknownFields(cmd *pb.Command) bool {
	if len(cmd.ProtoReflect().GetUnknown()) > 0 {
		return true
	}
	var flat proto.Message
	switch k := cmd.GetKind().(type) {
	case *pb.Command_Acquire:
		flat = k.Acquire
	case *pb.Command_Cancel:
		flat = k.Cancel
	case *pb.Command_Release:
		flat = k.Release
	case *pb.Command_Pulse:
		flat = k.Pulse
	case *pb.Command_Expire:
		flat = k.Expire
	case *pb.Command_Revoke:
		flat = k.Revoke
	case *pb.Command_EndRevocation:
		flat = k.EndRevocation
	case *pb.Command_SetValue:
		flat = k.SetValue
	case *pb.Command_EndWait:
		flat = k.EndWait
	case *pb.Command_EndDelay:
		flat = k.EndDelay
	default:
		return unknownWithin(cmd.ProtoReflect())
	}
	return len(flat.ProtoReflect().GetUnknown()) > 0
}

func unknownWithin(m protoreflect.Message) (found bool) {
	if len(m.GetUnknown()) > 0 {
		return true
	}
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if f.Message() == nil || f.IsMap() { // maps here are of strings
			return true
		}
		if !f.IsList() {
			found = unknownWithin(v.Message())
			return !found
		}
		for i := range v.List().Len() {
			if found = unknownWithin(v.List().Get(i).Message()); found {
				return false
			}
		}
		return true
	})
	return found
}
