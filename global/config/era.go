package config

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// EraOf is a configuration's era; nil has the zero era.
func EraOf(c *pb.ClusterConfiguration) register.Era { return register.EraOf(c.GetEra()) }

// Newer reports whether a is of a higher era than b, or of the same one and of a
// higher version.
func Newer(a, b *pb.ClusterConfiguration) bool {
	if d := EraOf(a).Compare(EraOf(b)); d != 0 {
		return d > 0
	}
	return a.GetVersion() > b.GetVersion()
}

// EraError: a message of another era. Nobody answers it [F16].
type EraError struct {
	Own, Theirs register.Era
}

// Stops reports whether who got the message votes no more: its own era is over,
// or there are two of one counter. Of a lower era it is the sender that stops.
func (e *EraError) Stops() bool { return e.Theirs != e.Own && e.Theirs.Counter >= e.Own.Counter }

func (e *EraError) Error() string {
	switch {
	case e.Theirs.Counter > e.Own.Counter:
		return fmt.Sprintf("message of era %v, this voter is in era %v, which force-quorum has ended: %s", e.Theirs, e.Own, endedRemedy)
	case e.Theirs.Counter < e.Own.Counter:
		return fmt.Sprintf("message of era %v, which force-quorum has ended: this voter is in era %v; stop the sender, which was declared destroyed, and add it anew with an empty data directory", e.Theirs, e.Own)
	}
	return fmt.Sprintf("message of era %v, this voter is in era %v: %s", e.Theirs, e.Own, twoErasRemedy)
}

const (
	endedRemedy   = "if this voter is a survivor, apply the plan of that era to its data; else it was declared destroyed: stop it, give it an empty data directory and add it anew"
	twoErasRemedy = "two operators have forced a quorum on two sides, and both sides stop; choose one, stop the other's voters for good, and run force-quorum once more on the one chosen"
)

// Proto is the error as a detail of a refusal.
func (e *EraError) Proto() *pb.EraMismatch { return &pb.EraMismatch{Era: e.Own.Proto()} }

// StoppedError: the voter has met another era and votes no more.
type StoppedError struct {
	Own  register.Era
	Stop *pb.EraStop
}

func (e *StoppedError) Error() string {
	met := register.EraOf(e.Stop.GetEra())
	remedy := endedRemedy
	if met.Counter == e.Own.Counter {
		remedy = twoErasRemedy
	}
	return fmt.Sprintf("this voter of era %v has met era %v (told by %s) and votes no more: %s", e.Own, met, e.Stop.GetBy(), remedy)
}

// Proto is the error as a detail of a refusal: who asks in the same era meets the
// other one too.
func (e *StoppedError) Proto() *pb.EraMismatch { return &pb.EraMismatch{Era: e.Stop.GetEra()} }

// Meet returns the voter after it met another era, told by somebody, and
// whether that is to be made durable: it stops, unless the other era is below its
// own, or it has stopped before for as high a one.
func (v Voter) Meet(theirs register.Era, by string) (next Voter, stored bool) {
	own := EraOf(v.Decided)
	if v.Decided == nil || theirs == own || theirs.Counter < own.Counter || v.Stop.GetEra().GetCounter() >= theirs.Counter && v.Stop != nil {
		return v, false
	}
	v.Stop = &pb.EraStop{Era: theirs.Proto(), By: by}
	return v, true
}

// CheckPlan checks a plan by itself. The error is an *InvalidError with all
// faults.
func CheckPlan(p *pb.EraPlan) error {
	if err := Check(p.GetConfiguration()); err != nil {
		return err
	}
	var faults []string
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	if e := EraOf(p.GetConfiguration()); e.Counter == 0 || e.ID == 0 {
		fault("era is %v; plan one with `headlease force-quorum plan`", e)
	}
	planned := map[string]bool{}
	for _, e := range p.GetEpochs() {
		if planned[e.GetPartition()] {
			fault("epochs names partition %q twice", e.GetPartition())
		}
		planned[e.GetPartition()] = true
		if err := (register.Value{Epoch: fence.Epoch(e.GetEpoch()), D: time.Duration(e.GetDNs())}).Check(); err != nil {
			fault("partition %q: %s", e.GetPartition(), strings.ReplaceAll(err.Error(), "\n", ", "))
		}
	}
	for _, s := range p.GetConfiguration().GetPartitions() {
		if !planned[s.GetName()] {
			fault("epochs has no partition %q", s.GetName())
		}
		delete(planned, s.GetName())
	}
	for name := range planned {
		fault("epochs names %q, which is no partition", name)
	}
	if len(faults) > 0 {
		return &InvalidError{Faults: faults}
	}
	return nil
}

// PlanError: a plan does not fit a voter's data.
type PlanError struct{ Reason string }

func (e *PlanError) Error() string { return "plan of force-quorum: " + e.Reason }

// BeginEra takes the voter into a plan's era. It has stopped no more then, and
// the decision on the next configuration begins afresh. stored is false when it
// is in that era already. The plan has passed CheckPlan. Errors:
// ErrUninitialised, *OtherClusterError, *EraError, *PlanError.
func (v Voter) BeginEra(self *pb.Voter, p *pb.EraPlan) (next Voter, stored bool, err error) {
	c, have := p.GetConfiguration(), v.Decided
	switch {
	case have == nil:
		return v, false, ErrUninitialised
	case have.GetClusterId() != c.GetClusterId():
		return v, false, &OtherClusterError{Own: have.GetClusterId(), Theirs: c.GetClusterId()}
	case EraOf(have) == EraOf(c):
		return v, false, nil
	case EraOf(c).Counter <= EraOf(have).Counter:
		return v, false, &EraError{Own: EraOf(have), Theirs: EraOf(c)}
	case !Member(c, self):
		return v, false, &PlanError{fmt.Sprintf("%s (incarnation %x) is no survivor by it: it was declared destroyed, or its data was made anew since; do not start it again", self.GetId(), self.GetIncarnation())}
	case have.GetVersion() >= c.GetVersion():
		return v, false, &PlanError{fmt.Sprintf("it makes configuration %d, and this data has %d: it was made without this data; inspect it and plan again", c.GetVersion(), have.GetVersion())}
	}
	return Voter{Decided: proto.CloneOf(c)}, true, nil
}

// EraRecord is the register of a partition at the beginning of the plan's era,
// of a voter that has seen epochs up to seen. The error is a *PlanError.
func EraRecord(p *pb.EraPlan, partition string, seen fence.Epoch) (register.Record, error) {
	for _, e := range p.GetEpochs() {
		if e.GetPartition() != partition {
			continue
		}
		if fence.Epoch(e.GetEpoch()) <= seen {
			return register.Record{}, &PlanError{fmt.Sprintf("partition %s is at epoch %d here, and the plan releases it at %d: it was made without this data; inspect it and plan again", partition, seen, e.GetEpoch())}
		}
		return register.EraRecord(EraOf(p.GetConfiguration()), fence.Epoch(e.GetEpoch()), time.Duration(e.GetDNs())), nil
	}
	return register.Record{}, &PlanError{fmt.Sprintf("it has no partition %s", partition)}
}
