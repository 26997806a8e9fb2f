package witness

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/fault"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// This file is force-quorum's part in the data of a witness that does not run.
// The lock of its store refuses a running one.

// IsData reports whether a directory is a witness's.
func IsData(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, storeFile))
	return err == nil
}

// stopped opens the data of a witness without beginning a life in it.
func stopped(dir string) (s *store, got contents, cluster, name string, err error) {
	path := filepath.Join(dir, storeFile)
	if _, err := os.Stat(path); err != nil {
		return nil, got, "", "", fmt.Errorf("data_dir: %w; name the data directory of a witness", err)
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: lockTimeout})
	if err != nil {
		return nil, got, "", "", openError(dir, path, err)
	}
	var table *fault.Table // no faults
	s = &store{db: db, path: path, disk: table}
	got.registers = map[string]register.Record{}
	err = db.View(func(tx *bolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		if meta == nil {
			return s.damaged("meta", errors.New("incomplete"))
		}
		cluster, name = string(meta.Get(keyCluster)), string(meta.Get(keyName))
		if err := s.checkOwner(meta, storeConfig{dir: dir, name: name, cluster: cluster}); err != nil {
			return err
		}
		return s.read(tx, meta, &got)
	})
	if err != nil {
		return nil, got, "", "", errors.Join(err, s.close())
	}
	return s, got, cluster, name, nil
}

// Facts of a witness that does not run. Nothing is changed.
func Facts(dir string) (f *pb.VoterFacts, err error) {
	s, got, cluster, name, err := stopped(dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	f = &pb.VoterFacts{
		Cluster: cluster, Voter: &pb.Voter{Id: config.WitnessVoter(name), Incarnation: uint64(got.incarnation)},
		Configuration: got.configuration, ConfigRegister: got.configRegister.Proto(), EraStop: got.eraStop,
	}
	for _, p := range got.configuration.GetPartitions() {
		v := got.registers[p.GetName()].Value
		f.Epochs = append(f.Epochs, &pb.EraEpoch{Partition: p.GetName(), Epoch: uint32(v.Epoch), DNs: int64(v.D)})
	}
	return f, nil
}

// BeginEra takes a witness that does not run into the era of a plan, by one
// transaction. already: it is in it. The errors are those of config.BeginEra and
// of the store.
func BeginEra(dir string, p *pb.EraPlan) (already bool, err error) {
	if err := config.CheckPlan(p); err != nil {
		return false, err
	}
	s, got, cluster, name, err := stopped(dir)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if cluster != p.GetConfiguration().GetClusterName() {
		return false, fmt.Errorf("data_dir: %s belongs to cluster %q, the plan is of %q", dir, cluster, p.GetConfiguration().GetClusterName())
	}
	self := &pb.Voter{Id: config.WitnessVoter(name), Incarnation: uint64(got.incarnation)}
	v := config.Voter{Decided: got.configuration, Register: got.configRegister, Stop: got.eraStop}
	next, stored, err := v.BeginEra(self, p)
	if err != nil || !stored {
		return err == nil, err
	}
	records := map[string]register.Record{}
	for _, spec := range next.Decided.GetPartitions() {
		partition := spec.GetName()
		if records[partition], err = config.EraRecord(p, partition, got.registers[partition].Value.Epoch); err != nil {
			return false, err
		}
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(next.Decided)
	if err != nil {
		return false, fmt.Errorf("encode configuration: %w", err)
	}
	return false, s.update("begin-era", func(tx *bolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		return errors.Join(meta.Put(keyConfiguration, raw), meta.Delete(keyConfigRegister), meta.Delete(keyEraStop), put(tx, records, got.writes+1))
	})
}

// meet makes durable that the witness met another era, if that ends its part
// in its own, and stops it. The caller has the turn.
func (v *voter) meet(theirs register.Era, by string) error {
	next, stored := v.configVoter().Meet(theirs, by)
	if !stored {
		return nil
	}
	writes := v.self.writes + 1
	if err := v.guard("configure", func() error { return v.store.stop(next.Stop, writes) }); err != nil {
		return err
	}
	v.self.writes = writes
	v.stopIn(next.Stop)
	return nil
}

// stopIn ends the voting; nil: there is no reason to.
func (v *voter) stopIn(s *pb.EraStop) {
	v.eraStop = s
	if s == nil {
		return
	}
	v.metrics.eraStopped.Set(1)
	why := v.stopError()
	v.stopped.Store(&why)
	v.logger.Error("the witness votes no more", "reason", why)
}

func (v *voter) stopError() error {
	return &config.StoppedError{Own: config.EraOf(v.configuration), Stop: v.eraStop}
}

// refuse is the gRPC error of what package config refuses. Another era may stop
// the witness. The caller has the turn.
func (v *voter) refuse(err error, by string) error {
	var era *config.EraError
	if errors.As(err, &era) {
		if err := v.meet(era.Theirs, by); err != nil {
			return err
		}
	}
	return refusalOf(err)
}

// checkStopped refuses if the witness votes no more. The caller has the turn.
func (v *voter) checkStopped() error {
	if v.eraStop != nil {
		return refusalOf(v.stopError())
	}
	return nil
}
