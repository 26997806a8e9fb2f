package state

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// maxConfiguration bounds the encoded configuration, in bytes.
const maxConfiguration = 4 << 20

// configVoter is the region's part in the decision on configurations.
func (m *Machine) configVoter() config.Voter {
	return config.Voter{Decided: m.configuration, Register: m.configRegister, Stop: m.eraStop}
}

// configure stores a decided configuration: the first one, or a newer one. One
// that it has, or has left behind, changes nothing.
func (m *Machine) configure(c *pb.ClusterConfiguration) *pb.CommandResult {
	if m.level < 2 {
		return m.configureOnce(c)
	}
	if e := checkConfiguration(c); e != nil {
		return failed(e)
	}
	next, stored, err := m.configVoter().Learn(m.self(), c)
	if err != nil {
		return failed(m.errConfig(err))
	}
	if stored {
		m.install(next)
	}
	return &pb.CommandResult{Kind: &pb.CommandResult_Configure{Configure: &pb.ConfigureResult{Already: !stored}}}
}

// configureOnce is configure at level 1: it takes configuration 1, once; taking
// it again changes nothing. A newer one does not come here: see levelOf.
func (m *Machine) configureOnce(c *pb.ClusterConfiguration) *pb.CommandResult {
	if cur := m.configuration; cur != nil {
		switch {
		case cur.GetClusterId() != c.GetClusterId():
			return failed(errOtherCluster(cur))
		case !proto.Equal(cur, c):
			return failed(errRefused(fmt.Sprintf("configuration %d is in force and differs from the one given (version %d)", cur.GetVersion(), c.GetVersion())))
		}
	} else {
		if e := checkConfiguration(c); e != nil {
			return failed(e)
		}
		m.install(config.Voter{Decided: proto.CloneOf(c)})
		return &pb.CommandResult{Kind: &pb.CommandResult_Configure{Configure: &pb.ConfigureResult{}}}
	}
	return &pb.CommandResult{Kind: &pb.CommandResult_Configure{Configure: &pb.ConfigureResult{Already: true}}}
}

func (m *Machine) self() *pb.Voter {
	return &pb.Voter{Id: config.RegionVoter(m.region), Incarnation: uint64(m.incarnation)}
}

// install puts a decided configuration in force. The register of a partition
// that it no longer has stays, and so do its epoch and seq.
func (m *Machine) install(v config.Voter) {
	m.configuration, m.configRegister, m.eraStop = v.Decided, v.Register, v.Stop
	m.configurationHash = m.hashConfiguration()
	for name := range partitionNames(m.configuration) {
		if _, ok := m.partitions.Get(name); !ok {
			p := &partition{gen: m.gen, name: name, phase: phaseAbsent, recordHash: recordHash(register.Record{}), dirty: true}
			m.dirtyPartitions = append(m.dirtyPartitions, p)
			m.partitions.Set(name, p)
		}
	}
	var gone []string
	m.voters.Scan(func(id string, r VoterRecord) bool {
		if config.VoterIncarnation(m.configuration, id) != uint64(r.Incarnation) {
			gone = append(gone, id)
		}
		return true
	})
	for _, id := range gone {
		if r, ok := m.voters.Delete(id); ok {
			m.sum -= r.digest()
		}
	}
	m.emit(Configured{Configuration: m.configuration})
}

// partitionNames are the partitions of which the state keeps a record.
func partitionNames(c *pb.ClusterConfiguration) map[string]struct{} {
	names := make(map[string]struct{}, len(c.GetPartitions()))
	for _, p := range c.GetPartitions() {
		names[p.GetName()] = struct{}{}
	}
	for _, name := range c.GetRetiredPartitions() {
		names[name] = struct{}{}
	}
	return names
}

func (m *Machine) promiseConfig(c *pb.ConfigPromiseCommand) *pb.CommandResult {
	next, done, err := m.configVoter().Prepare(c.GetClusterId(), register.EraOf(c.GetEra()), c.GetVersion(), config.BallotOf(c.GetBallot()))
	return m.configVote(next, done, err)
}

func (m *Machine) acceptConfig(c *pb.ConfigAcceptCommand) *pb.CommandResult {
	next, done, err := m.configVoter().Accept(c.GetClusterId(), register.EraOf(c.GetEra()), c.GetVersion(), config.BallotOf(c.GetBallot()), c.GetProposed())
	if err == nil && done {
		if e := checkConfiguration(c.GetProposed()); e != nil {
			return failed(e)
		}
	}
	return m.configVote(next, done, err)
}

func (m *Machine) configVote(next config.Register, done bool, err error) *pb.CommandResult {
	if err != nil {
		return failed(m.errConfig(err))
	}
	m.configRegister = next
	m.configurationHash = m.hashConfiguration()
	return &pb.CommandResult{Kind: &pb.CommandResult_ConfigVote{ConfigVote: &pb.ConfigVoteResult{Done: done, Register: next.Proto()}}}
}

func (m *Machine) errConfig(err error) *pb.ErrorDetail {
	var field *config.FieldError
	switch {
	case errors.Is(err, config.ErrUninitialised):
		return errUninitialised()
	case errors.As(err, new(*config.OtherClusterError)), errors.As(err, new(*config.VersionError)):
		return errOtherCluster(m.configuration)
	case errors.As(err, &field):
		return errInvalid(field.Field, field.Remedy)
	}
	return errRefused(err.Error())
}

// underVersion reports whether a vote was judged under the configuration in
// force; one that does not say so is of level 1, where there is only the first.
func (m *Machine) underVersion(version uint64) bool {
	return m.eraStop == nil && max(version, 1) == m.configuration.GetVersion()
}

// checkConfiguration checks what the state rests on; global/config checks the
// rest before it is proposed.
func checkConfiguration(c *pb.ClusterConfiguration) *pb.ErrorDetail {
	switch {
	case c.GetClusterId() == "":
		return errInvalid("configuration.cluster_id", "init makes a random one")
	case c.GetVersion() == 0:
		return errInvalid("configuration.version", "the first is 1")
	case proto.Size(c) > maxConfiguration:
		return errInvalid("configuration", fmt.Sprintf("keep it under %d bytes", maxConfiguration))
	case len(c.GetPartitions())+len(c.GetRetiredPartitions()) > MaxPartitions:
		return errInvalid("configuration.partitions", fmt.Sprintf("use at most %d partitions, the retired ones included", MaxPartitions))
	}
	names := make(map[string]struct{}, len(c.GetPartitions()))
	check := func(field, name string) *pb.ErrorDetail {
		if name == "" || len(name) > maxName {
			return errInvalid(field, fmt.Sprintf("name each partition in 1 to %d bytes", maxName))
		}
		if _, twice := names[name]; twice {
			return errInvalid(field, fmt.Sprintf("name %q is given twice", name))
		}
		names[name] = struct{}{}
		return nil
	}
	for _, p := range c.GetPartitions() {
		if e := check("configuration.partitions", p.GetName()); e != nil {
			return e
		}
	}
	for _, name := range c.GetRetiredPartitions() {
		if e := check("configuration.retired_partitions", name); e != nil {
			return e
		}
	}
	return nil
}

// ConfigRegister is what the region has promised and accepted for the next
// configuration. What it points to must not be changed.
func (v View) ConfigRegister() config.Register { return v.r.configRegister }

// checkConfigRegister reports whether a snapshot's register can follow its
// configuration.
func checkConfigRegister(c *pb.ClusterConfiguration, r config.Register) error {
	switch {
	case r.Promised.Less(r.Accepted):
		return errors.New("header: the configuration's register has accepted above what it promised")
	case r.Accepted.IsZero() != (r.Proposed == nil), r.Proposed != nil && r.Proposed.GetVersion() != c.GetVersion()+1, c == nil && !r.Promised.IsZero():
		return errors.New("header: the configuration's register does not go with the configuration")
	}
	return nil
}

// configuration hashes a configuration. What came after the first release is
// hashed only where it is set, so that the snapshots of before still match their
// hash. What servers of feature level 2 need not know is left out, since they
// would come to another hash: auto_failback, last_dedicated, and how far an
// exception's move is.
func (h *hasher) configuration(c *pb.ClusterConfiguration) {
	h.strs(c.GetClusterId(), c.GetClusterName())
	h.nums(c.GetVersion(), uint64(c.GetShards()), uint64(c.GetDNs()))
	h.bool(c.GetAllowEvenWitnesses())
	h.voters(c.GetVoters())
	h.num(uint64(len(c.GetPartitions())))
	for _, p := range c.GetPartitions() {
		h.str(p.GetName())
		h.num(uint64(len(p.GetShards())))
		for _, s := range p.GetShards() {
			h.nums(uint64(s.GetFirst()), uint64(s.GetLast()))
		}
		h.num(uint64(len(p.GetPrefer())))
		h.strs(p.GetPrefer()...)
	}
	if len(c.GetPreviousVoters())+len(c.GetExceptions())+len(c.GetRetiredPartitions()) == 0 {
		return
	}
	h.str("configuration, more")
	h.voters(c.GetPreviousVoters())
	h.num(uint64(len(c.GetExceptions())))
	for _, e := range c.GetExceptions() {
		h.str(e.GetKey())
		h.num(uint64(e.GetShard()))
	}
	h.num(uint64(len(c.GetRetiredPartitions())))
	h.strs(c.GetRetiredPartitions()...)
}

func (h *hasher) voters(vs []*pb.Voter) {
	h.num(uint64(len(vs)))
	for _, v := range vs {
		h.str(v.GetId())
		h.num(v.GetIncarnation())
	}
}

func (h *hasher) configRegister(r config.Register) {
	if r == (config.Register{}) {
		return
	}
	h.str("configuration's register")
	for _, b := range [...]config.Ballot{r.Promised, r.Accepted} {
		h.num(b.Round)
		h.str(b.Proposer)
	}
	h.configuration(r.Proposed)
	h.era(r.Proposed)
}
