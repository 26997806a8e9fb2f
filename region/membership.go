package region

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/headlease/headlease/detector"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/api"
)

const (
	// joinEvery is how often a server that wants to join asks again, joinTimeout
	// how long one question may take.
	joinEvery   = time.Second
	joinTimeout = 5 * time.Second
)

// makeGroup is this server's view of the Raft group, used while it leads.
func (s *Server) makeGroup() *api.Group {
	return &api.Group{
		Region: s.process.Region, Raft: s.replica, Ask: s.peers.AskTerm, Logger: s.cfg.Logger,
		Known: func(server string) bool {
			_, err := s.peers.raft(server)
			return err == nil
		},
		Level: func() uint32 { return s.replica.View().Level() }, MaxLevel: s.cfg.MaxLevel,
	}
}

// followFile takes processes and addresses from the cluster file as it changes.
func (s *Server) followFile(ctx context.Context) error {
	was := s.cfg.File
	was.Name = s.process.Name
	return s.cfg.Files.Run(ctx, was, func(now clusterfile.File) {
		if err := s.detector.SetPeers(detectorPeers(now, s.process.Name)); err != nil {
			s.cfg.Logger.Error("new peers refused; those before stay", "error", err)
			return
		}
		s.peers.setFile(now)
		s.remote.SetProcesses(s.peers.voters())
		s.cfg.Logger.Info("cluster file changed; its processes and addresses are in force", "processes", len(now.Processes()))
	})
}

func detectorPeers(f clusterfile.File, self string) []detector.Peer {
	var out []detector.Peer
	for _, p := range f.Peers(self) {
		out = append(out, detector.Peer{Name: p.Name, Region: p.Region, Gossip: p.Gossip})
	}
	return out
}

// join asks the servers of the region to add this one, until it sees itself in
// the group. It asks only with a directory that was empty at the start: a
// server that was removed must not come back by itself.
func (s *Server) join(ctx context.Context) error {
	if !s.replica.Joining() {
		<-ctx.Done()
		return nil
	}
	said := ""
	for !s.isMember() {
		err := s.askToJoin(ctx)
		var old *tooOldError
		switch {
		case errors.As(err, &old):
			return err
		case err != nil && ctx.Err() == nil && err.Error() != said:
			said = err.Error()
			s.cfg.Logger.Warn("not added to the region's group yet", "reason", said)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(joinEvery):
		}
	}
	s.cfg.Logger.Info("added to the region's group", "raft_id", s.replica.RaftID())
	<-ctx.Done()
	return nil
}

func (s *Server) isMember() bool {
	for _, m := range s.replica.Servers() {
		if m.RaftID == s.replica.RaftID() {
			return true
		}
	}
	return false
}

// tooOldError ends a server whose program knows less than its region uses.
type tooOldError struct{ level, known uint32 }

func (e *tooOldError) Error() string {
	return fmt.Sprintf("the region uses feature level %d and this program knows level %d; start a newer program", e.level, e.known)
}

// checkLevel ends this server if its program knows less than the region uses.
func (s *Server) checkLevel(level uint32) {
	if level > s.cfg.MaxLevel {
		s.callDied(&tooOldError{level, s.cfg.MaxLevel})
	}
}

// askToJoin asks the other servers in turn; whichever is reached passes the
// question on to the leader.
func (s *Server) askToJoin(ctx context.Context) error {
	var errs []error
	for _, p := range s.peers.current().RegionProcesses(s.process.Region) {
		if p.Name == s.process.Name {
			continue
		}
		conn, err := s.peers.conn(link.PlaneAPI, p.Name)
		if err != nil {
			return err
		}
		call, cancel := context.WithTimeout(ctx, joinTimeout)
		res, err := pb.NewMemberServiceClient(conn).Join(call, &pb.JoinRequest{
			Name: s.process.Name, RaftId: s.replica.RaftID(), FeatureLevel: s.cfg.MaxLevel,
		})
		cancel()
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("%s: %s", p.Name, link.Reason(err)))
		case res.GetFeatureLevel() > s.cfg.MaxLevel:
			return &tooOldError{res.GetFeatureLevel(), s.cfg.MaxLevel}
		default:
			return nil
		}
	}
	if len(errs) == 0 {
		return fmt.Errorf("region %s has no other server in the cluster file to ask", s.process.Region)
	}
	return errors.Join(errs...)
}
