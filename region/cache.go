package region

import (
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/headlease/headlease/fence/cache"
	"github.com/headlease/headlease/region/state"
)

// makeCache makes the mirror of the region's lease cache, if it has one.
func (s *Server) makeCache() (err error) {
	r, _ := s.cfg.File.Region(s.process.Region)
	if len(r.Cache.Addresses) == 0 {
		return nil
	}
	s.cache, err = cache.New(cache.Config{
		Server: cache.ServerConfig(r.Cache), Cluster: s.cfg.File.Cluster, Region: s.process.Region,
		Source:     cache.Source{Sessions: s.sessions, Left: s.lessor.SessionLeft},
		Registerer: s.cfg.Registry, Logger: s.cfg.Logger,
	})
	if err != nil {
		return fmt.Errorf("cluster file, region %s: %w", r.Name, err)
	}
	return nil
}

// sessions are those of the state as applied here, with what they hold.
func (s *Server) sessions() iter.Seq[cache.Session] {
	view := s.replica.View()
	return func(yield func(cache.Session) bool) {
		for session := range view.Sessions() {
			if session.Held == 0 {
				continue
			}
			leases := func(yield func(cache.Lease) bool) {
				for l := range view.SessionLeases(session.ID) {
					if !yield(cache.Lease{Resource: l.Resource, Holder: l.Holder, Token: l.Token}) {
						return
					}
				}
			}
			if !yield(cache.Session{ID: session.ID, TTL: time.Duration(session.TTLMillis) * time.Millisecond, Leases: leases}) {
				return
			}
		}
	}
}

func (s *Server) runCache(ctx context.Context) error {
	if s.cache == nil {
		return nil
	}
	return s.cache.Run(ctx)
}

func (s *Server) cacheBegin() {
	if s.cache != nil {
		s.cache.Begin()
	}
}

func (s *Server) cacheEnd() {
	if s.cache != nil {
		s.cache.End()
	}
}

// cacheApplied tells the cache's mirror of an entry's events, in the FSM goroutine.
func (s *Server) cacheApplied(events []state.Event) {
	if s.cache == nil {
		return
	}
	for _, e := range events {
		switch e := e.(type) {
		case state.LeaseGranted:
			s.cache.Granted(e.Session, cache.Lease{Resource: e.Resource, Holder: e.Holder, Token: e.Token})
		case state.LeaseEnded:
			s.cache.Ended(e.Resource, e.Token)
		}
	}
}
