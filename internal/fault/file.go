package fault

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// ParseStartup reads a start-up table: a SetFaultsRequest in protobuf's JSON,
// in which rules need not expire. NewTable judges the rules.
func ParseStartup(data []byte) (Rules, error) {
	var req pb.SetFaultsRequest
	if err := protojson.Unmarshal(data, &req); err != nil {
		return Rules{}, fmt.Errorf("start-up fault table: %w", err)
	}
	return FromProto(&req), nil
}

// FormatStartup is the inverse of ParseStartup.
func FormatStartup(r Rules) ([]byte, error) {
	list := ToProto(r)
	return protojson.MarshalOptions{Multiline: true, UseProtoNames: true}.Marshal(&pb.SetFaultsRequest{
		Faults:      list.GetFaults(),
		DiskFaults:  list.GetDiskFaults(),
		ClockFaults: list.GetClockFaults(),
	})
}
