package drill

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/internal/pause"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const settleEvery = 200 * time.Millisecond

// settled waits until the cluster is as it is on a quiet day: every region
// hears every other, every partition has an owner, and every voter has accepted
// its ballot and promised no other. After a start, when regions have campaigned
// against each other, that takes an owner a new ballot, and until then it can
// lose fewer voters than a drill takes away.
func (r *rig) settled(ctx context.Context, within time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, within, fmt.Errorf("not within %v", within))
	defer cancel()
	for {
		why := unsettled(r.admin.Look(ctx))
		if why == nil {
			return nil
		}
		if pause.For(ctx, settleEvery) != nil {
			return fmt.Errorf("a settled cluster: %w (%w)", context.Cause(ctx), why)
		}
	}
}

// unsettled says what keeps a view from being settled; nil: nothing.
func unsettled(v admin.View) error {
	var errs []error
	registers := map[string]map[string]*pb.Register{} // by voter and partition
	owners := map[string]string{}
	for _, region := range v.Regions {
		if region.Err != nil {
			return region.Err
		}
		of := map[string]*pb.Register{}
		for _, p := range region.Status.GetPartitions() {
			of[p.GetName()] = p.GetRegister()
			if p.GetHeldNs() > 0 {
				owners[p.GetName()] = region.Name
			}
		}
		registers[region.Name] = of
		for _, other := range v.Regions {
			if other.Name != region.Name && !alive(peer(region.Status, other.Name).GetVerdict()) {
				errs = append(errs, fmt.Errorf("%s does not hear %s", region.Name, other.Name))
			}
		}
	}
	for _, w := range v.Witnesses {
		if w.Err != nil {
			return w.Err
		}
		of := map[string]*pb.Register{}
		for _, s := range w.Describe.GetRegisters() {
			of[s.GetPartition()] = s.GetRegister()
		}
		registers[w.Process.Name] = of
	}
	for _, p := range v.Regions[0].Status.GetPartitions() {
		owner := owners[p.GetName()]
		if owner == "" {
			errs = append(errs, fmt.Errorf("partition %s has no owner", p.GetName()))
			continue
		}
		ballot := registers[owner][p.GetName()].GetAccepted()
		for _, voter := range sortedKeys(registers) {
			if reg := registers[voter][p.GetName()]; !proto.Equal(reg.GetAccepted(), ballot) || !proto.Equal(reg.GetPromised(), ballot) {
				errs = append(errs, fmt.Errorf("%s has not the ballot of %s, which holds partition %s", voter, owner, p.GetName()))
			}
		}
	}
	return errors.Join(errs...)
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
