package state

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// beginEra puts the region into the era of a plan that force-quorum left in the
// data of its servers, which the proposer has checked (config.CheckPlan). No
// lease of before is left: whether another region has owned the partition since,
// nobody of the survivors need know. The epochs go on above the plan's.
func (m *Machine) beginEra(p *pb.EraPlan) *pb.CommandResult {
	c := p.GetConfiguration()
	if e := checkConfiguration(c); e != nil {
		return failed(e)
	}
	next, stored, err := m.configVoter().BeginEra(m.self(), p)
	if err != nil {
		return failed(m.errConfig(err))
	}
	if !stored {
		return &pb.CommandResult{Kind: &pb.CommandResult_Configure{Configure: &pb.ConfigureResult{Already: true}}}
	}
	records := make([]register.Record, len(c.GetPartitions()))
	for i, spec := range c.GetPartitions() {
		var seen fence.Epoch
		if q, ok := m.partitions.Get(spec.GetName()); ok {
			seen = max(q.epoch, q.dropped, q.record.Value.Epoch)
		}
		if records[i], err = config.EraRecord(p, spec.GetName(), seen); err != nil {
			return failed(errRefused(err.Error()))
		}
	}
	var live []*partition
	m.partitions.Scan(func(_ string, q *partition) bool {
		if q.live() {
			live = append(live, q)
		}
		return true
	})
	for _, q := range live {
		m.dropEpoch(q, m.errNotOwner(q))
	}
	before := config.EraOf(m.configuration)
	m.install(next)
	for i, spec := range c.GetPartitions() {
		q, _ := m.partitions.Get(spec.GetName())
		q = m.editPartition(q)
		q.record, q.recordHash = records[i], recordHash(records[i])
		m.emit(RegisterChanged{Partition: q.name, Record: q.record})
	}
	m.emit(EraBegun{Configuration: m.configuration, Before: before})
	return &pb.CommandResult{Kind: &pb.CommandResult_Configure{Configure: &pb.ConfigureResult{}}}
}

// stopInEra makes durable that the region met another era, not below its own:
// from here on it neither votes nor adopts [F16]. Again, or for a lower one, it
// changes nothing.
func (m *Machine) stopInEra(s *pb.EraStop) *pb.CommandResult {
	if len(s.GetBy()) > maxName {
		return failed(errInvalid("stop.by", fmt.Sprintf("name who told in up to %d bytes", maxName)))
	}
	if next, stored := m.configVoter().Meet(register.EraOf(s.GetEra()), s.GetBy()); stored {
		m.eraStop = next.Stop
		m.configurationHash = m.hashConfiguration()
		m.emit(EraStopped{Stop: proto.CloneOf(m.eraStop)})
	}
	return &pb.CommandResult{}
}

// EraStop is why the region votes no more; nil: it votes. It must not be
// changed.
func (v View) EraStop() *pb.EraStop { return v.r.eraStop }

// era hashes what an era adds to a configuration, where there is one.
func (h *hasher) era(c *pb.ClusterConfiguration) {
	if e := c.GetEra(); e != nil || len(c.GetDestroyedVoters()) > 0 {
		h.str("era")
		h.nums(e.GetCounter(), e.GetId())
		h.voters(c.GetDestroyedVoters())
	}
}
