package config

import (
	"fmt"

	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// FieldError is a vote message that says what it may not.
type FieldError struct {
	Field, Remedy string
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Remedy }

// CheckPrepare checks what a Prepare says against itself; the header is
// CheckHeader's. The error is a *FieldError.
func CheckPrepare(req *pb.PrepareRequest) error {
	if err := checkNames("partitions", req.GetPartitions()); err != nil {
		return err
	}
	if req.GetDry() {
		return nil
	}
	return checkBallot("ballot", req.GetBallot(), req.GetHeader())
}

// CheckAccept checks what an Accept says against itself; the header is
// CheckHeader's. The error is a *FieldError.
func CheckAccept(req *pb.AcceptRequest) error {
	names := make([]string, 0, len(req.GetItems()))
	for i, item := range req.GetItems() {
		field := fmt.Sprintf("items[%d]", i)
		names = append(names, item.GetPartition())
		if err := checkBallot(field+".ballot", item.GetBallot(), req.GetHeader()); err != nil {
			return err
		}
		value := register.ValueOf(item.GetValue())
		if err := value.Check(); err != nil {
			return &FieldError{field + ".value", err.Error()}
		}
		if value.Era != register.EraOf(req.GetHeader().GetEra()) {
			return &FieldError{field + ".value.era", fmt.Sprintf("is %v, the message is of era %v", value.Era, register.EraOf(req.GetHeader().GetEra()))}
		}
		if !value.Released() && value.Owner != register.CandidateOf(req.GetHeader()) {
			return &FieldError{field + ".value.owner", fmt.Sprintf("a candidate proposes itself or a release, not %q", value.Owner.Name)}
		}
	}
	return checkNames("items", names)
}

func checkBallot(field string, b *pb.Ballot, h *pb.VoteHeader) error {
	switch {
	case register.EraOf(b.GetEra()) != register.EraOf(h.GetEra()):
		return &FieldError{field + ".era", fmt.Sprintf("is %v, the message is of era %v", register.EraOf(b.GetEra()), register.EraOf(h.GetEra()))}
	case b.GetRound() == 0:
		return &FieldError{field + ".round", "is 0; reserve a ballot first"}
	case b.GetRegion() != h.GetCandidate() || b.GetIncarnation() != h.GetCandidateIncarnation():
		return &FieldError{field, fmt.Sprintf("is of region %q, not of the candidate %q; ballots are not shared", b.GetRegion(), h.GetCandidate())}
	}
	return nil
}

func checkNames(field string, names []string) error {
	if len(names) == 0 {
		return &FieldError{field, "names no partition"}
	}
	seen := make(map[string]bool, len(names))
	for _, p := range names {
		if seen[p] {
			return &FieldError{field, fmt.Sprintf("names partition %q twice; once per message", p)}
		}
		seen[p] = true
	}
	return nil
}

// Operator is the region in the ballots of an operator's command, which no
// region can have.
const Operator = "~operator"

// CheckPrepareAgain checks what a PrepareAgain says against itself. The error
// is a *FieldError.
func CheckPrepareAgain(req *pb.PrepareAgainRequest) error {
	b := req.GetBallot()
	if b.GetRound() == 0 || b.GetRegion() != Operator || b.GetIncarnation() == 0 {
		return &FieldError{"ballot", fmt.Sprintf("needs a round, region %q and a random incarnation", Operator)}
	}
	if e := register.EraOf(b.GetEra()); e != register.EraOf(req.GetEra()) {
		return &FieldError{"ballot.era", fmt.Sprintf("is %v, the message is of era %v", e, register.EraOf(req.GetEra()))}
	}
	return checkNames("partitions", req.GetPartitions())
}

// CheckAcceptAgain checks what an AcceptAgain says against itself. The error is
// a *FieldError.
func CheckAcceptAgain(req *pb.AcceptAgainRequest) error {
	names := make([]string, 0, len(req.GetItems()))
	for i, item := range req.GetItems() {
		field := fmt.Sprintf("items[%d]", i)
		names = append(names, item.GetPartition())
		b, v := register.BallotOf(item.GetBallot()), register.ValueOf(item.GetValue())
		if b.Round == 0 || b.Region == "" || b.Incarnation == 0 {
			return &FieldError{field + ".ballot", "is not one that a value was accepted under"}
		}
		if e := register.EraOf(req.GetEra()); b.Era != e || v.Era != e {
			return &FieldError{field + ".ballot.era", fmt.Sprintf("ballot and value are of eras %v and %v, the message is of era %v", b.Era, v.Era, e)}
		}
		if v.Released() && v.Epoch == 0 {
			v.Epoch = 1 // of a register that nobody has owned yet
		}
		if err := v.Check(); err != nil {
			return &FieldError{field + ".value", err.Error()}
		}
	}
	return checkNames("items", names)
}
