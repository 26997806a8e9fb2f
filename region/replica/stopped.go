package replica

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/internal/fsync"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// This file is force-quorum's part in the data of a region server that does not
// run: what it knows, and the plan of an era that is left in it. The lock of the
// directory refuses a running server.

// planName is the plan that a server finds at its next start.
const planName = "era.plan"

// IsData reports whether a directory is a region server's.
func IsData(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, metaName))
	return err == nil
}

// Stopped is what a server's data knows.
type Stopped struct {
	Cluster, Region, Server string
	// View is the state with every entry of the log applied. The last ones may not
	// be committed.
	View state.View
	// Voters are the names of the Raft group's voters, as of the same entries.
	Voters []string
}

// openStopped locks the data of a server that does not run, whosever it is.
func openStopped(dir string) (*dataDir, error) {
	raw, err := os.ReadFile(filepath.Join(dir, metaName))
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %w; name the data directory of a region server", dir, err)
	}
	m, err := parseMeta(raw)
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %s: %w", dir, metaName, err)
	}
	return openDataDir(dir, meta{Cluster: m.Cluster, Region: m.Region, Server: m.Server})
}

// ReadStopped reads the data of a server that does not run. It repairs what the
// next start would repair, and changes nothing else.
func ReadStopped(dir string) (out Stopped, err error) {
	d, err := openStopped(dir)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, d.close()) }()
	quiet := slog.New(slog.DiscardHandler)
	stores, err := openStores(storeOptions{
		dir: dir, segmentSize: defaultSegmentSize, logCache: logCacheSize, log: quiet, logger: newHlog(quiet, "raft"),
		guard: newGuard(nil, func(error) {}, func(string, time.Duration, error) {}),
	})
	if err != nil {
		return out, fmt.Errorf("data directory %s: %w", dir, err)
	}
	defer func() { err = errors.Join(err, stores.close()) }()
	out = Stopped{Cluster: d.meta.Cluster, Region: d.meta.Region, Server: d.meta.Server}
	if out.View, out.Voters, err = stores.replay(); err != nil {
		return out, fmt.Errorf("data directory %s: %w", dir, err)
	}
	return out, nil
}

// replay applies the newest snapshot and the log after it.
func (s *stores) replay() (view state.View, voters []string, err error) {
	if err := s.reconcile(); err != nil {
		return view, nil, err
	}
	m, index, conf := state.New(), uint64(0), raft.Configuration{}
	names, err := s.snaps.names()
	if err != nil {
		return view, nil, err
	}
	if len(names) > 0 {
		meta, f, err := s.snaps.openSound(names[0].String())
		if err != nil {
			return view, nil, err
		}
		m, err = state.ReadSnapshot(bufio.NewReaderSize(f, 1<<18))
		if err = errors.Join(err, f.Close()); err != nil {
			return view, nil, err
		}
		index, conf = meta.Index, meta.Configuration
	}
	last, err := s.logs.LastIndex()
	if err != nil {
		return view, nil, err
	}
	for index++; index <= last; index++ {
		var l raft.Log
		if err := s.logs.GetLog(index, &l); err != nil {
			return view, nil, fmt.Errorf("read log entry %d: %w", index, err)
		}
		switch l.Type {
		case raft.LogConfiguration:
			conf = raft.DecodeConfiguration(l.Data)
		case raft.LogCommand:
			var entry pb.Entry
			if err := proto.Unmarshal(l.Data, &entry); err != nil {
				return view, nil, fmt.Errorf("entry %d cannot be decoded: %w", index, err)
			}
			for _, cmd := range entry.GetCommands() {
				if m.Apply(l.Index, l.Term, cmd); m.Poisoned() != nil {
					return view, nil, fmt.Errorf("entry %d: %w", index, m.Poisoned())
				}
			}
		}
	}
	for _, srv := range conf.Servers {
		if srv.Suffrage == raft.Voter {
			voters = append(voters, string(srv.Address))
		}
	}
	return m.View(), voters, nil
}

// LeavePlan leaves the plan of an era in the data of a server that does not run:
// it is there as a whole and synced, or not at all, and replaces one before it.
// The server proposes it when it leads.
func LeavePlan(dir string, p *pb.EraPlan) (err error) {
	d, err := openStopped(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.close()) }()
	if name := p.GetConfiguration().GetClusterName(); d.meta.Cluster != name {
		return fmt.Errorf("data directory %s: belongs to cluster %q, the plan is of %q", dir, d.meta.Cluster, name)
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(p)
	if err != nil {
		return fmt.Errorf("encode the plan: %w", err)
	}
	temp := filepath.Join(dir, planName+".tmp")
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("data directory %s: %w", dir, err)
	}
	if err := writeSynced(temp, raw); err != nil {
		return fmt.Errorf("data directory %s: %w", dir, err)
	}
	if err := os.Rename(temp, filepath.Join(dir, planName)); err != nil {
		return fmt.Errorf("data directory %s: %w", dir, err)
	}
	return fsync.Dir(dir)
}

// Plan is the plan that was left in a server's data; nil: none.
func Plan(dir string) (*pb.EraPlan, error) {
	raw, err := os.ReadFile(filepath.Join(dir, planName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	p := &pb.EraPlan{}
	if err == nil {
		err = proto.Unmarshal(raw, p)
	}
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %s: %w; apply the plan again with `headlease force-quorum apply`", dir, planName, err)
	}
	return p, nil
}

// DropPlan removes a plan that has taken effect.
func DropPlan(dir string) error {
	if err := os.Remove(filepath.Join(dir, planName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("data directory %s: %w", dir, err)
	}
	return fsync.Dir(dir)
}
