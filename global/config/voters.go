package config

import (
	"errors"
	"fmt"
	"strings"

	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// ErrUninitialised: this voter has no configuration and does not vote.
var ErrUninitialised = errors.New("no configuration yet; run headlease init, or replace this voter by itself if the cluster has been set up")

// OtherClusterError: the message is of another cluster.
type OtherClusterError struct {
	Own, Theirs string
}

func (e *OtherClusterError) Error() string {
	return fmt.Sprintf("message of cluster %q, this voter belongs to %q; check the addresses in the cluster file", e.Theirs, e.Own)
}

// VersionError: the message was sent under another configuration. The side
// with the lower version is behind.
type VersionError struct {
	Own, Theirs uint64
	// Newer is the receiver's configuration when it is the newer one, for the
	// sender to store; else nil, and the receiver wants the sender's.
	Newer *pb.ClusterConfiguration
}

func (e *VersionError) Error() string {
	behind := "the sender is behind"
	if e.Theirs > e.Own {
		behind = "this voter is behind"
	}
	return fmt.Sprintf("message under configuration %d, this voter has %d: %s and learns it from its peers", e.Theirs, e.Own, behind)
}

// Proto is the error as a detail of a refusal.
func (e *VersionError) Proto() *pb.VersionMismatch {
	return &pb.VersionMismatch{Version: e.Own, Newer: e.Newer}
}

// CandidateError: the candidate is no region of this configuration, or one
// under another incarnation.
type CandidateError struct {
	Region                string
	Incarnation, Recorded uint64
}

func (e *CandidateError) Error() string {
	if e.Recorded == 0 {
		return fmt.Sprintf("candidate %q is no region of the configuration", e.Region)
	}
	return fmt.Sprintf("candidate %q has incarnation %x, the configuration has %x: its data was made anew; remove the old member and add the new one",
		e.Region, e.Incarnation, e.Recorded)
}

// CheckHeader checks a vote message's header against the receiver's
// configuration. Errors: ErrUninitialised, *OtherClusterError, *EraError,
// *VersionError, *CandidateError. A header without a candidate is refused by the last.
func CheckHeader(cfg *pb.ClusterConfiguration, h *pb.VoteHeader) error {
	if err := CheckVersion(cfg, h.GetClusterId(), register.EraOf(h.GetEra()), h.GetConfigVersion()); err != nil {
		return err
	}
	recorded := VoterIncarnation(cfg, RegionVoter(h.GetCandidate()))
	if recorded == 0 || recorded != h.GetCandidateIncarnation() {
		return &CandidateError{Region: h.GetCandidate(), Incarnation: h.GetCandidateIncarnation(), Recorded: recorded}
	}
	return nil
}

// VoterIncarnation returns a voter's incarnation in the configuration, 0 if it
// is none of the voters.
func VoterIncarnation(cfg *pb.ClusterConfiguration, id string) uint64 {
	for _, v := range cfg.GetVoters() {
		if v.GetId() == id {
			return v.GetIncarnation()
		}
	}
	return 0
}

// Quorum is how many answers decide: a majority of all voters, and, for a
// promotion, also a majority of the witnesses (0 if there are none).
type Quorum struct {
	Voters, Witnesses int
}

// QuorumOf returns the majorities of a configuration.
func QuorumOf(cfg *pb.ClusterConfiguration) Quorum {
	witnesses := 0
	for _, v := range cfg.GetVoters() {
		if IsWitness(v.GetId()) {
			witnesses++
		}
	}
	q := Quorum{Voters: len(cfg.GetVoters())/2 + 1}
	if witnesses > 0 {
		q.Witnesses = witnesses/2 + 1
	}
	return q
}

// IsWitness reports whether a voter id is a witness's.
func IsWitness(id string) bool { return strings.HasPrefix(id, WitnessPrefix) }
