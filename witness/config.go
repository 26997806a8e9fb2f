package witness

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// This file is the witness's part in the decision on configurations and in
// their changes.

// voter is who this witness is under its present data.
func (v *voter) voter() *pb.Voter {
	return &pb.Voter{Id: v.id, Incarnation: uint64(v.self.incarnation)}
}

func (v *voter) configVoter() config.Voter {
	return config.Voter{Decided: v.configuration, Register: v.configRegister, Stop: v.eraStop}
}

// configure takes a decided configuration: the first one, or a newer one. A
// newer one is stored before anything is answered under it.
func (v *voter) configure(ctx context.Context, c *pb.ClusterConfiguration, by string) (*pb.ConfigureResponse, error) {
	if err := v.enter(ctx); err != nil {
		return nil, err
	}
	defer v.leave()
	if have := v.configuration; have != nil && have.GetClusterId() != c.GetClusterId() {
		return nil, v.refuseConfiguration(&config.OtherClusterError{Own: have.GetClusterId(), Theirs: c.GetClusterId()})
	}
	if err := v.checkConfiguration(c); err != nil {
		return nil, refusal(codes.InvalidArgument, nil, "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	next, stored, err := v.configVoter().Learn(v.voter(), c)
	if errors.As(err, new(*config.EraError)) {
		return nil, v.refuse(err, by)
	}
	if err != nil {
		return nil, v.refuseConfiguration(err)
	}
	if stored {
		writes := v.self.writes + 1
		if err := v.guard("configure", func() error { return v.store.configure(next, writes) }); err != nil {
			return nil, err
		}
		v.self.writes = writes
		v.configRegister = next.Register
		v.setConfiguration(next.Decided)
		v.logger.Info("configured", "cluster_id", c.GetClusterId(), "version", c.GetVersion(), "voters", len(c.GetVoters()), "partitions", len(c.GetPartitions()))
	}
	return &pb.ConfigureResponse{Already: !stored, Voter: v.voter(), Version: v.configuration.GetVersion()}, nil
}

// checkConfiguration reports all that is wrong with a configuration for this
// witness.
func (v *voter) checkConfiguration(c *pb.ClusterConfiguration) error {
	errs := []error{config.Check(c)}
	if c.GetClusterName() != v.cluster {
		errs = append(errs, fmt.Errorf("configuration.cluster_name: is %q, this witness is of %q", c.GetClusterName(), v.cluster))
	}
	return errors.Join(errs...)
}

// refuseConfiguration says why a configuration is not taken.
func (v *voter) refuseConfiguration(err error) error {
	have := v.configuration
	var cluster *config.OtherClusterError
	if errors.As(err, &cluster) {
		return refusal(codes.FailedPrecondition, otherCluster(have.GetClusterId(), have.GetVersion()),
			"configuration.cluster_id: witness %s belongs to cluster %q already, not to %q; give it an empty data directory to make it a member of a new cluster",
			v.name, cluster.Own, cluster.Theirs)
	}
	if errors.As(err, new(*config.StoppedError)) {
		return refusalOf(err)
	}
	if errors.As(err, new(*config.ConflictError)) {
		v.logger.Error("two configurations of one version", "error", err)
		return refusal(codes.FailedPrecondition, otherCluster(have.GetClusterId(), have.GetVersion()), "configuration: witness %s: %v", v.name, err)
	}
	return refusal(codes.InvalidArgument, nil, "configuration.voters: %v", err)
}

func (v *voter) prepareConfig(ctx context.Context, req *pb.PrepareConfigRequest) (*pb.PrepareConfigResponse, error) {
	if err := v.enter(ctx); err != nil {
		return nil, err
	}
	defer v.leave()
	next, promised, err := v.configVoter().Prepare(req.GetClusterId(), register.EraOf(req.GetEra()), req.GetVersion(), config.BallotOf(req.GetBallot()))
	if err := v.decide(next, err); err != nil {
		return nil, err
	}
	return &pb.PrepareConfigResponse{Voter: v.voter(), Promised: promised, Register: next.Proto()}, nil
}

func (v *voter) acceptConfig(ctx context.Context, req *pb.AcceptConfigRequest) (*pb.AcceptConfigResponse, error) {
	if err := v.enter(ctx); err != nil {
		return nil, err
	}
	defer v.leave()
	err := v.underVersion(req.GetClusterId(), req.GetEra(), req.GetVersion())
	if err == nil {
		err = config.CheckChange(v.configuration, req.GetProposed())
	}
	if err != nil {
		return nil, refusalOf(err)
	}
	next, accepted, err := v.configVoter().Accept(req.GetClusterId(), register.EraOf(req.GetEra()), req.GetVersion(), config.BallotOf(req.GetBallot()), req.GetProposed())
	if err := v.decide(next, err); err != nil {
		return nil, err
	}
	return &pb.AcceptConfigResponse{Voter: v.voter(), Accepted: accepted, Register: next.Proto()}, nil
}

// decide makes the register of the next configuration durable, and then
// installs it.
func (v *voter) decide(next config.Register, err error) error {
	if err != nil {
		return refusalOf(err)
	}
	if next.Equal(v.configRegister) {
		return nil
	}
	writes := v.self.writes + 1
	if err := v.guard("configure", func() error { return v.store.decide(next, writes) }); err != nil {
		return err
	}
	v.self.writes, v.configRegister = writes, next
	return nil
}

// prepareAgain judges by V1 alone, see register.PrepareAgain.
func (v *voter) prepareAgain(ctx context.Context, req *pb.PrepareAgainRequest) (*pb.PrepareAgainResponse, error) {
	if err := v.enter(ctx); err != nil {
		return nil, err
	}
	defer v.leave()
	if err := v.underVersion(req.GetClusterId(), req.GetEra(), req.GetVersion()); err != nil {
		return nil, refusalOf(err)
	}
	ballot := register.BallotOf(req.GetBallot())
	answers, err := v.judgePrepare(req.GetPartitions(), func(r register.Register, _ register.Verdict) register.Decision { return r.PrepareAgain(ballot) })
	if err != nil {
		return nil, err
	}
	return &pb.PrepareAgainResponse{Voter: v.voter(), Answers: answers}, nil
}

// acceptAgain takes values that were proposed before, under the configuration
// in force: it restarts their clocks at full D.
func (v *voter) acceptAgain(ctx context.Context, req *pb.AcceptAgainRequest) (*pb.AcceptAgainResponse, error) {
	if err := v.enter(ctx); err != nil {
		return nil, err
	}
	defer v.leave()
	if err := v.underVersion(req.GetClusterId(), req.GetEra(), req.GetVersion()); err != nil {
		return nil, refusalOf(err)
	}
	answers, err := v.judgeAccept(req.GetItems())
	if err != nil {
		return nil, err
	}
	return &pb.AcceptAgainResponse{Voter: v.voter(), Answers: answers}, nil
}

// underVersion checks a message that has no header. The caller has the turn.
func (v *voter) underVersion(clusterID string, era *pb.Era, version uint64) error {
	if v.eraStop != nil {
		return v.stopError()
	}
	return config.CheckVersion(v.configuration, clusterID, register.EraOf(era), version)
}
