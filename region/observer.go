package region

import (
	"time"

	"github.com/headlease/headlease/region/state"
)

// Applied feeds the leader's tables from the FSM goroutine, in log order. At
// this server's own TermBegun they are built from the View at that entry; the
// other events of that entry are in the View already.
func (s *Server) Applied(index, term uint64, events []state.Event) {
	s.audit.Applied(index, term, events)
	s.watches.Applied(index, s.process.Region, events)
	s.cacheApplied(events)
	for _, e := range events {
		switch e := e.(type) {
		case state.TermBegun:
			s.edge.LeaderChanged()
			s.ledBy(e)
			if e.Server == s.process.Name && s.replica.Begins(e.Term) {
				s.begin(e.Term)
				return
			}
		case state.Configured:
			s.configured(time.Duration(e.Configuration.GetDNs()))
		case state.LevelRaised:
			s.checkLevel(e.Level)
		}
	}
	s.metrics.applied(events)
	s.voter.Applied(events)
	s.lessor.Applied(events)
	s.campaign.Applied(events)
}

// ledBy ends calls that are on their way to the leader of before; an entry of a
// term that is over says nothing of who leads.
func (s *Server) ledBy(e state.TermBegun) {
	if _, term, _ := s.replica.Leader(); term == e.Term {
		for _, f := range s.forwards {
			f.LedBy(e.Server)
		}
	}
}

func (s *Server) begin(term uint64) {
	view := s.replica.View()
	if c := view.Configuration(); c != nil {
		s.configured(time.Duration(c.GetDNs()))
	}
	s.metrics.begin(view)
	s.cacheBegin()
	s.voter.Begin(term, view)
	s.lessor.Begin(term, view)
	s.campaign.Begin(term, view)
}

// configured makes the pulse and the detector go by the configuration's D.
func (s *Server) configured(d time.Duration) {
	s.replica.SetD(d)
	if err := s.detector.SetD(d); err != nil {
		s.cfg.Logger.Warn("the configuration's D is unusable for the failure detector; the one of the cluster file stays", "error", err)
	}
}

// Restored follows a snapshot that replaced the state of a follower, which
// keeps no tables.
func (s *Server) Restored() {
	s.audit.Restored(s.replica.View())
	s.watches.Restored()
	s.checkLevel(s.replica.View().Level())
	if c := s.replica.View().Configuration(); c != nil {
		s.configured(time.Duration(c.GetDNs()))
	}
}

// Deposed ends the tables of a term.
func (s *Server) Deposed(term uint64) {
	s.metrics.leads.Store(false)
	s.cacheEnd()
	s.campaign.Deposed(term)
	s.voter.Deposed(term)
	s.lessor.Deposed(term)
	s.edge.LeaderChanged()
}

// clockGap: this process was paused or a clock jumped; nothing that was
// measured across it counts [F19].
func (s *Server) clockGap(reason string) {
	s.cfg.Logger.Warn("clock gap: this process was paused or a clock jumped; its clocks count as restarted", "reason", reason)
	s.detector.Resume(s.cfg.Clock.Now())
	s.campaign.ClockGap()
	s.voter.ClockGap()
	s.lessor.ClockGap()
}
