package admin

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/reconfigure"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// grace is how long a round waits for more answers once it has enough.
	grace = 200 * time.Millisecond
	// spreading is how long a command goes on giving out what is decided.
	spreading = 5 * time.Second
	// pause is about how long an attempt waits for the next one.
	pause = 300 * time.Millisecond
)

// Change is a change of the cluster's configuration.
type Change struct {
	Goal reconfigure.Goal
	// Confirm is asked before the first step, with what changes; nil: yes.
	Confirm func(diff []string) error
	// Progress is told each step; nil: nobody.
	Progress func(string)
}

// errNewer: somebody has decided on a newer configuration meanwhile.
var errNewer = errors.New("a newer configuration is in force")

// Change takes the steps to a goal, one member at a time, each decided by a
// majority of the voters (package reconfigure). Everything that it knows it has
// from the voters, so it may be broken off at any point and begun again
// anywhere; it may run beside campaigns and beside another one of its kind. It
// returns the configuration in which the goal is reached. What does not answer
// is asked again until ctx ends.
func (c *Cluster) Change(ctx context.Context, change Change) (*pb.ClusterConfiguration, error) {
	say := change.Progress
	if say == nil {
		say = func(string) {}
	}
	r := &reconfigurer{Cluster: c, say: say, proposer: uuid.NewString()}
	confirmed, changed := false, false
	for {
		conf, err := r.current(ctx)
		if err != nil {
			return nil, err
		}
		step, err := change.Goal(conf)
		if err != nil {
			return nil, err
		}
		if step != nil && !confirmed && change.Confirm != nil {
			if err := change.Confirm(config.Diff(conf, step.Next)); err != nil {
				return nil, err
			}
			confirmed = true
		}
		err = r.settle(ctx, conf)
		if err == nil && step == nil {
			if !changed {
				say("nothing had to change")
			}
			r.spread(ctx, conf)
			return conf, nil
		}
		if err == nil {
			changed = true
			err = r.decide(ctx, conf, step)
		}
		if err != nil && !errors.Is(err, errNewer) {
			return nil, err
		}
	}
}

// Configuration returns the newest decided configuration that any voter has,
// and what each voter of the file says (nil where it did not answer).
func (c *Cluster) Configuration(ctx context.Context) (*pb.ClusterConfiguration, map[string]*pb.DescribeVoterResponse, error) {
	ids := voterIDs(c.file)
	described := map[string]*pb.DescribeVoterResponse{}
	var conf *pb.ClusterConfiguration
	errs := c.everyVoter(ctx, ids, nil, func(ctx context.Context, id string) (func(), error) {
		var d *pb.DescribeVoterResponse
		err := c.askVoter(ctx, id, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
			d, err = pb.NewVoteServiceClient(conn).DescribeVoter(ctx, &pb.DescribeVoterRequest{})
			return err
		})
		return func() { described[id] = d }, err
	})
	for _, id := range ids {
		have := described[id].GetConfiguration()
		switch {
		case have == nil:
		case conf != nil && have.GetClusterId() != conf.GetClusterId():
			return nil, nil, fmt.Errorf("voters belong to different clusters (%s and %s); correct the addresses in the cluster file", conf.GetClusterId(), have.GetClusterId())
		case config.Newer(have, conf):
			conf = have
		}
	}
	if conf == nil {
		if len(described) == len(ids) {
			return nil, nil, errors.New("no voter has a configuration; run `headlease init`")
		}
		return nil, nil, fmt.Errorf("no voter that answers has a configuration: %w", errors.Join(errs...))
	}
	return conf, described, nil
}

func voterIDs(f clusterfile.File) (ids []string) {
	for _, p := range f.Processes() {
		if id := p.Voter(); !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// askVoter asks the processes that speak for a voter in turn, until one
// answers.
func (c *Cluster) askVoter(ctx context.Context, id string, call func(context.Context, *grpc.ClientConn) error) error {
	var errs []error
	for _, p := range c.file.Processes() {
		if p.Voter() != id {
			continue
		}
		err := c.ask(ctx, link.PlaneVotes, p, askTimeout, call)
		if err == nil {
			return nil
		}
		errs = append(errs, err)
		if mismatch(err) != nil || ctx.Err() != nil {
			return err
		}
	}
	if len(errs) == 0 {
		return fmt.Errorf("%s is not in the cluster file", id)
	}
	return errors.Join(errs...)
}

// everyVoter asks all voters at once. call returns what to do with the answer,
// which is done here, one after the other. When enough, if not nil, says so,
// the round goes on for a moment only, and later answers are dropped. The
// errors are by voter, nil where it answered.
func (c *Cluster) everyVoter(ctx context.Context, ids []string, enough func() bool, call func(context.Context, string) (func(), error)) []error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type answer struct {
		i    int
		take func()
		err  error
	}
	answers := make(chan answer, len(ids))
	for i, id := range ids {
		go func() { // ends with its call, at the latest at the end of ctx
			take, err := call(ctx, id)
			answers <- answer{i, take, err}
		}()
	}
	errs := make([]error, len(ids))
	for i, id := range ids {
		errs[i] = fmt.Errorf("%s did not answer", id)
	}
	var late <-chan time.Time
	for range ids {
		select {
		case a := <-answers:
			if errs[a.i] = a.err; a.err == nil {
				a.take()
			}
		case <-late:
			return errs
		}
		if late == nil && enough != nil && enough() {
			late = time.After(grace)
		}
	}
	return errs
}

// mismatch is what a refusal says of the configuration's version; nil if it is
// about something else.
func mismatch(err error) *pb.VersionMismatch {
	var refused *Refused
	if !errors.As(err, &refused) {
		return nil
	}
	for _, d := range status.Convert(refused.Err).Details() {
		if m, ok := d.(*pb.VersionMismatch); ok {
			return m
		}
	}
	return nil
}

// reconfigurer is one run of a command.
type reconfigurer struct {
	*Cluster
	say      func(string)
	proposer string
	// above is the highest round of a configuration's ballot that was seen.
	above uint64
	// newest is the newest configuration that a refusal brought.
	newest *pb.ClusterConfiguration
	told   string
}

// once says what was not the last thing said.
func (r *reconfigurer) once(text string) {
	if text != r.told {
		r.told = text
		r.say(text)
	}
}

func (r *reconfigurer) current(ctx context.Context) (*pb.ClusterConfiguration, error) {
	for {
		conf, _, err := r.Configuration(ctx)
		if err == nil {
			if r.newest.GetVersion() > conf.GetVersion() {
				conf = r.newest
			}
			return conf, nil
		}
		if !errors.As(err, new(*Unreachable)) {
			return nil, err
		}
		if err := r.again(ctx, err); err != nil {
			return nil, err
		}
	}
}

// again waits before the next attempt, or returns why there is none.
func (r *reconfigurer) again(ctx context.Context, err error) error {
	r.once("waiting: " + firstLine(err))
	select {
	case <-ctx.Done():
		return fmt.Errorf("%w; the change may be half done: run the command again to go on\n%w", context.Cause(ctx), err)
	case <-time.After(pause/2 + rand.N(pause)):
		return nil
	}
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// learn keeps a newer configuration that errors bring, and says if there is
// one.
func (r *reconfigurer) learn(conf *pb.ClusterConfiguration, errs []error) bool {
	for _, err := range errs {
		if newer := mismatch(err).GetNewer(); newer.GetVersion() > max(conf.GetVersion(), r.newest.GetVersion()) {
			r.newest = newer
		}
	}
	return r.newest.GetVersion() > conf.GetVersion()
}

// ids are the voters of conf, and with previous those of the version before
// too.
func ids(conf *pb.ClusterConfiguration, previous bool) (out []string) {
	voters := conf.GetVoters()
	if previous {
		voters = slices.Concat(voters, conf.GetPreviousVoters())
	}
	for _, v := range voters {
		if !slices.Contains(out, v.GetId()) {
			out = append(out, v.GetId())
		}
	}
	return out
}

// store gives conf, which is decided, to its voters and to those before, until
// majorities of both have it [H10 a].
func (r *reconfigurer) store(ctx context.Context, conf *pb.ClusterConfiguration) error {
	for {
		var by []*pb.Voter
		newer := false
		errs := r.everyVoter(ctx, ids(conf, true), func() bool { return reconfigure.Stored(conf, by) }, func(ctx context.Context, id string) (func(), error) {
			var res *pb.ConfigureResponse
			err := r.askVoter(ctx, id, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
				res, err = pb.NewVoteServiceClient(conn).Configure(ctx, &pb.ConfigureRequest{Configuration: conf})
				return err
			})
			return func() {
				by = append(by, res.GetVoter())
				newer = newer || res.GetVersion() > conf.GetVersion()
			}, err
		})
		switch {
		case newer, r.learn(conf, errs):
			return errNewer
		case reconfigure.Stored(conf, by):
			return nil
		}
		err := fmt.Errorf("configuration %d is not stored by majorities yet: %w", conf.GetVersion(), errors.Join(errs...))
		if err := r.again(ctx, err); err != nil {
			return err
		}
	}
}

// spread gives conf, in the end, to the voters that did not take it in time: one
// that has just joined may be starting. Who does not take it now is given it by
// the regions that ask it.
func (r *reconfigurer) spread(ctx context.Context, conf *pb.ClusterConfiguration) {
	ctx, cancel := context.WithTimeout(ctx, spreading)
	defer cancel()
	left := ids(conf, false)
	for {
		has := map[string]bool{}
		errs := r.everyVoter(ctx, left, nil, func(ctx context.Context, id string) (func(), error) {
			err := r.askVoter(ctx, id, func(ctx context.Context, conn *grpc.ClientConn) error {
				_, err := pb.NewVoteServiceClient(conn).Configure(ctx, &pb.ConfigureRequest{Configuration: conf})
				return err
			})
			return func() { has[id] = true }, err
		})
		if left = slices.DeleteFunc(left, func(id string) bool { return has[id] }); len(left) == 0 {
			return
		}
		select {
		case <-ctx.Done():
			r.say(fmt.Sprintf("note: %s did not take configuration %d yet, and will be given it when it is asked to vote: %s",
				strings.Join(left, ", "), conf.GetVersion(), firstLine(errors.Join(errs...))))
			return
		case <-time.After(pause):
		}
	}
}

// settle makes conf such that the next one may be decided: it is stored, and
// after that each register is accepted once more [H10].
func (r *reconfigurer) settle(ctx context.Context, conf *pb.ClusterConfiguration) error {
	if conf.GetVersion() == 1 {
		return nil // nothing was before
	}
	if err := r.store(ctx, conf); err != nil {
		return err
	}
	s := reconfigure.NewSettling(conf, rand.Uint64()|1)
	for {
		errs := r.everyVoter(ctx, ids(conf, false), nil, func(ctx context.Context, id string) (func(), error) {
			var d *pb.DescribeVoterResponse
			err := r.askVoter(ctx, id, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
				d, err = pb.NewVoteServiceClient(conn).DescribeVoter(ctx, &pb.DescribeVoterRequest{})
				return err
			})
			return func() { s.Found(d) }, err
		})
		errs = append(errs, r.acceptAgain(ctx, conf, s, s.Resend())...)
		if len(s.Open()) > 0 {
			errs = append(errs, r.prepareAgain(ctx, conf, s)...)
			errs = append(errs, r.acceptAgain(ctx, conf, s, s.Accept())...)
		}
		open := s.Open()
		switch {
		case r.learn(conf, errs):
			return errNewer
		case len(open) == 0:
			r.say(fmt.Sprintf("configuration %d: stored by a majority, every register carried over", conf.GetVersion()))
			return nil
		}
		if partition, alarm := s.Alarm(); alarm != "" {
			return fmt.Errorf("partition %s: its register has an alarm, which an operator must clear before the members can change further: %s", partition, alarm)
		}
		err := fmt.Errorf("configuration %d: %d registers are not carried over yet (%s): %w", conf.GetVersion(), len(open), strings.Join(open, ", "), errors.Join(errs...))
		if err := r.again(ctx, err); err != nil {
			return err
		}
	}
}

func (r *reconfigurer) acceptAgain(ctx context.Context, conf *pb.ClusterConfiguration, s *reconfigure.Settling, req *pb.AcceptAgainRequest) []error {
	if req == nil {
		return nil
	}
	return r.everyVoter(ctx, ids(conf, false), func() bool { return len(s.Open()) == 0 }, func(ctx context.Context, id string) (func(), error) {
		var res *pb.AcceptAgainResponse
		err := r.askVoter(ctx, id, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
			res, err = pb.NewConfigServiceClient(conn).AcceptAgain(ctx, req)
			return err
		})
		return func() { s.Accepted(res) }, err
	})
}

func (r *reconfigurer) prepareAgain(ctx context.Context, conf *pb.ClusterConfiguration, s *reconfigure.Settling) []error {
	req := s.Prepare()
	if req == nil {
		return nil
	}
	return r.everyVoter(ctx, ids(conf, false), nil, func(ctx context.Context, id string) (func(), error) {
		var res *pb.PrepareAgainResponse
		err := r.askVoter(ctx, id, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
			res, err = pb.NewConfigServiceClient(conn).PrepareAgain(ctx, req)
			return err
		})
		return func() { s.Promised(res) }, err
	})
}

// decide has a majority of conf's voters decide on the step, or on what another
// one has left half accepted, and stores what is decided.
func (r *reconfigurer) decide(ctx context.Context, conf *pb.ClusterConfiguration, step *reconfigure.Step) error {
	r.say(fmt.Sprintf("configuration %d: %s", step.Next.GetVersion(), step.What))
	for {
		d := reconfigure.NewDecision(conf, config.Ballot{Round: r.above + 1, Proposer: r.proposer}, step.Next)
		need := config.QuorumOf(conf).Voters
		errs := r.everyVoter(ctx, ids(conf, false), func() bool { return d.Promising() >= need }, func(ctx context.Context, id string) (func(), error) {
			var res *pb.PrepareConfigResponse
			err := r.askVoter(ctx, id, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
				res, err = pb.NewConfigServiceClient(conn).PrepareConfig(ctx, d.Prepare())
				return err
			})
			return func() { d.Promised(res) }, err
		})
		if req := d.Accept(); req != nil {
			errs = r.everyVoter(ctx, ids(conf, false), func() bool { return d.Accepting() >= need }, func(ctx context.Context, id string) (func(), error) {
				var res *pb.AcceptConfigResponse
				err := r.askVoter(ctx, id, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
					res, err = pb.NewConfigServiceClient(conn).AcceptConfig(ctx, req)
					return err
				})
				return func() { d.Accepted(res) }, err
			})
		}
		r.above = d.Above()
		decided, ok := d.Decided()
		switch {
		case ok:
			for _, line := range config.Diff(conf, decided) {
				r.say(fmt.Sprintf("configuration %d is decided: %s", decided.GetVersion(), line))
			}
			r.newest = decided
			return r.store(ctx, decided)
		case r.learn(conf, errs):
			return errNewer
		}
		err := fmt.Errorf("configuration %d is not decided: %d of the %d voters needed have promised, %d accepted: %w",
			step.Next.GetVersion(), d.Promising(), need, d.Accepting(), errors.Join(errs...))
		if err := r.again(ctx, err); err != nil {
			return err
		}
	}
}
