package region

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/status"

	globalconfig "github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/era"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/replica"
)

const (
	// planEvery is how often a server that has a plan looks whether it leads.
	planEvery = 200 * time.Millisecond
	// tellEvery is how often a leader tells the voters declared destroyed that they
	// are, should they run again; tellTimeout is for one of them.
	tellEvery   = 3 * time.Second
	tellTimeout = 2 * time.Second
)

// beginEra proposes the plan that force-quorum left in this server's data, once
// it leads, until the region is in that era or a higher one. Every server of the
// region has been given it, and whichever leads first proposes it.
func (s *Server) beginEra(ctx context.Context) error {
	said := ""
	for s.plan != nil {
		own, planned := globalconfig.EraOf(s.replica.View().Configuration()), globalconfig.EraOf(s.plan.GetConfiguration())
		if own.Counter >= planned.Counter {
			if own != planned {
				s.cfg.Logger.Error("a plan of force-quorum is not applied: the region is in another era", "planned", planned.String(), "own", own.String())
			}
			if err := replica.DropPlan(s.cfg.DataDir); err != nil {
				return err
			}
			break
		}
		if _, leads := s.replica.Leading(); leads {
			res, err := s.replica.Propose(ctx, &pb.Command{Kind: &pb.Command_BeginEra{BeginEra: &pb.BeginEraCommand{Plan: s.plan}}})
			if reason := res.GetError().GetRefused().GetReason(); err == nil && reason != "" {
				err = errors.New(reason)
			}
			if err == nil && res.GetError() == nil {
				for _, line := range era.Summary(s.plan) {
					s.cfg.Logger.Warn("force-quorum: " + line)
				}
				continue
			}
			if text := fmt.Sprint(err, res.GetError()); ctx.Err() == nil && text != said {
				said = text
				s.cfg.Logger.Error("the plan of force-quorum does not take effect yet", "era", planned.String(), "reason", text)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(planEvery):
		}
	}
	<-ctx.Done()
	return nil
}

// metEra makes durable that somebody is in an era that ends this region's part
// in its own. It does not block.
func (s *Server) metEra(e register.Era, by string) {
	select {
	case s.met <- &pb.EraStop{Era: e.Proto(), By: by}:
	default: // one is on its way, or comes again
	}
}

// followEras stops the region when it meets another era, and tells the voters
// that were declared destroyed, should one of them be back: neither side asks
// the other to vote, so they would not meet [F16].
func (s *Server) followEras(ctx context.Context) error {
	ticker := time.NewTicker(tellEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case stop := <-s.met:
			view := s.replica.View()
			if _, news := (globalconfig.Voter{Decided: view.Configuration(), Stop: view.EraStop()}).Meet(register.EraOf(stop.GetEra()), stop.GetBy()); !news {
				continue
			}
			res, err := s.replica.ProposeUrgent(ctx, &pb.Command{Kind: &pb.Command_StopInEra{StopInEra: &pb.StopInEraCommand{Stop: stop}}})
			if (err != nil || res.GetError() != nil) && ctx.Err() == nil {
				s.cfg.Logger.Error("another era was met, and to stop for it is not committed; it is tried again when it is met again", "error", err, "refused", res.GetError())
			}
		case <-ticker.C:
			s.tellDestroyed(ctx)
		}
	}
}

func (s *Server) tellDestroyed(ctx context.Context) {
	view := s.replica.View()
	conf := view.Configuration()
	if _, leads := s.replica.Leading(); !leads || view.EraStop() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, tellTimeout)
	defer cancel()
	errs := make([]error, len(conf.GetDestroyedVoters()))
	var calls sync.WaitGroup
	for i, v := range conf.GetDestroyedVoters() {
		if remote := s.remote.Voter(v.GetId()); remote != nil && globalconfig.VoterIncarnation(conf, v.GetId()) == 0 {
			calls.Go(func() { _, errs[i] = remote.Configure(ctx, &pb.ConfigureRequest{Configuration: conf}) })
		}
	}
	calls.Wait()
	for i, v := range conf.GetDestroyedVoters() {
		for _, d := range status.Convert(errs[i]).Details() {
			m, ok := d.(*pb.EraMismatch)
			if !ok {
				continue
			}
			theirs := register.EraOf(m.GetEra())
			if (&globalconfig.EraError{Own: globalconfig.EraOf(conf), Theirs: theirs}).Stops() {
				s.metEra(theirs, v.GetId())
			} else if !s.told[v.GetId()] {
				s.told[v.GetId()] = true
				s.cfg.Logger.Error("a voter that was declared destroyed runs again; it is refused: stop it, give it an empty data directory and add it anew", "voter", v.GetId(), "its-era", theirs.String())
			}
		}
	}
}
