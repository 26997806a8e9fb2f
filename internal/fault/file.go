package fault

import (
	"errors"
	"fmt"
	"os"

	"google.golang.org/protobuf/encoding/protojson"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// ParseStartup reads a start-up table: a SetFaultsRequest in protobuf's JSON,
// in which rules need not expire. NewTable judges the rules.
func ParseStartup(data []byte) (Rules, error) {
	var req pb.SetFaultsRequest
	if err := protojson.Unmarshal(data, &req); err != nil {
		return Rules{}, fmt.Errorf("start-up fault table: %w; write a SetFaultsRequest in JSON", err)
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

// Startup makes the table of a process started with or without --drills, from
// its start-up file if one is named. Without drills there is no table: nil,
// which has no faults.
func Startup(path string, drills bool) (*Table, error) {
	if !drills {
		if path != "" {
			return nil, errors.New("--faults: needs --drills")
		}
		return nil, nil
	}
	var rules Rules
	if path != "" {
		raw, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("--faults: %w; name a file that this user may read", err)
		}
		if rules, err = ParseStartup(raw); err != nil {
			return nil, fmt.Errorf("--faults %s: %w", path, err)
		}
	}
	t, err := NewTable(rules)
	if err != nil {
		return nil, fmt.Errorf("--faults %s: %w", path, err)
	}
	return t, nil
}
