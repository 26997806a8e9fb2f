package api

import (
	"bufio"
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/backup"
	"github.com/headlease/headlease/region/state"
)

// Backups is the BackupService on the leader. It gives out one backup at a time:
// each keeps the state of its instant in memory until it has been sent.
type Backups struct {
	pb.UnimplementedBackupServiceServer
	Cluster, Region, Server string
	Version                 string
	Raft                    interface {
		Check(ctx context.Context) (term uint64, err error)
		View() state.View
	}

	turn chan struct{}
}

// NewBackups returns the service.
func NewBackups(s Backups) *Backups {
	s.turn = make(chan struct{}, 1)
	return &s
}

// SaveBackup streams the state as of an instant after the call: whatever was
// acknowledged before is in it.
func (s *Backups) SaveBackup(_ *pb.SaveBackupRequest, ss grpc.ServerStreamingServer[pb.SaveBackupResponse]) error {
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	default:
		return refused("another backup of region %s is under way; wait for its end", s.Region)
	}
	term, err := s.Raft.Check(ss.Context())
	if err != nil {
		return resultError(nil, err)
	}
	view := s.Raft.View()
	if view.Configuration() == nil {
		return uninitialised("of region " + s.Region)
	}
	put := func(f *pb.BackupFrame) error { return ss.Send(&pb.SaveBackupResponse{Frame: f}) }
	err = put(backup.Header(&pb.BackupHeader{
		Cluster: s.Cluster, ClusterId: view.Configuration().GetClusterId(), Region: s.Region, Incarnation: uint64(view.Incarnation()),
		ConfigurationVersion: view.Configuration().GetVersion(), Index: view.AppliedIndex(), Term: term, UnixMs: time.Now().UnixMilli(),
		Version: s.Version, FeatureLevel: view.Level(), Server: s.Server,
	}))
	if err != nil {
		return err
	}
	data := backup.NewData(put)
	buf := bufio.NewWriterSize(data, 64<<10)
	if err := view.WriteSnapshot(buf); err != nil {
		return fmt.Errorf("backup of region %s: %w", s.Region, err)
	}
	if err := buf.Flush(); err != nil {
		return err
	}
	return data.Close()
}
