package state

import (
	"fmt"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
)

// restoredLevel is the feature level that a restored region has at least:
// snapshots below it cannot hold partitions without a configuration.
const restoredLevel = 2

// Reincarnate returns the state with which a region begins that is restored from
// this View: the same region as a new incarnation of its data [F4]. It has no
// session, no lease and no cluster configuration. Of each partition it keeps
//   - the floor of its epochs, jump above the highest that the View has seen, so
//     that no token is given twice though the View may be older than the last
//     epoch used;
//   - as the own register's value, under a ballot below every real one, that the
//     incarnation before owns it: counting from this region's start, its head
//     lease must be over before anything is granted, also where no other voter
//     knows of it.
//
// It fails when the epochs of a partition are used up, and on a View without
// configuration, which knows no partition.
func (v View) Reincarnate(inc register.Incarnation, jump fence.Epoch) (*Machine, error) {
	switch {
	case inc == 0 || inc == v.r.incarnation:
		return nil, fmt.Errorf("incarnation %x is none, or that of before", uint64(inc))
	case v.r.configuration == nil:
		return nil, fmt.Errorf("region %q has no cluster configuration, and so nothing to keep; make it anew", v.r.region)
	}
	m := New()
	m.level = max(v.r.level, restoredLevel)
	m.region, m.incarnation = v.r.region, inc
	m.ballotRound, m.applied = v.r.ballotRound, v.r.applied
	before := register.Region{Name: v.r.region, Incarnation: v.r.incarnation}
	d := v.r.configuration.GetDNs()
	for p := range v.Partitions() {
		floor := max(p.Epoch, p.Dropped, p.Register.Value.Epoch)
		if floor > fence.MaxEpoch-jump {
			return nil, fmt.Errorf("partition %s: epoch %d leaves no room for %d more; epochs end at %d", p.Name, floor, jump, fence.MaxEpoch)
		}
		ballot := register.Ballot{Region: before.Name, Incarnation: before.Incarnation}
		value := register.Value{Owner: before, Epoch: max(floor, 1), D: max(time.Duration(d), p.Register.Value.D), Reason: "restored from a backup"}
		m.partitions.Set(p.Name, &partition{
			gen: m.gen, name: p.Name, phase: phaseAbsent, epoch: floor + jump, dropped: floor + jump,
			record: register.Record{Promised: ballot, Accepted: ballot, Value: value},
		})
	}
	m.rehash()
	return m, nil
}
