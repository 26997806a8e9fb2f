package client_test

import (
	"errors"
	"iter"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/region/state"
)

func TestElection(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.client("a").Election("lock/leader"), w.client("b").Election("lock/leader")
		observer := w.client("o").Election("lock/leader")
		if _, err := observer.Leader(w.Context()); !errors.Is(err, client.ErrNoLeader) {
			t.Errorf("leader of nothing: %v", err)
		}
		if err := a.Proclaim(w.Context(), nil); !errors.Is(err, client.ErrNotLeader) {
			t.Errorf("proclaim without leading: %v", err)
		}
		if err := a.Resign(w.Context()); err != nil {
			t.Errorf("resign without leading: %v", err)
		}
		next, stop := iter.Pull2(observer.Observe(w.Context()))
		defer stop()
		observed := func() client.Leader {
			l, err, ok := next()
			if err != nil || !ok {
				t.Fatal(err)
			}
			return l
		}
		if l := observed(); l.Token != 0 {
			t.Errorf("%+v leads", l)
		}
		la, err := a.Campaign(w.Context(), []byte("a:1"))
		if err != nil {
			t.Fatal(err)
		}
		if l := observed(); l.Token != la.Token() || string(l.Value) != "a:1" || l.Holder != "client/a" {
			t.Errorf("%+v leads", l)
		}
		again, err := a.Campaign(w.Context(), []byte("a:2"))
		if err != nil || again != la {
			t.Fatalf("a leader's campaign: %v", err)
		}
		if l := observed(); l.Token != la.Token() || string(l.Value) != "a:2" {
			t.Errorf("%+v leads", l)
		}
		won := make(chan *client.Lease)
		go func() {
			l, err := b.Campaign(w.Context(), []byte("b:1"))
			if err != nil {
				t.Error(err)
			}
			won <- l
		}()
		w.eu.Wait(time.Second, "a candidate", func(v state.View) bool { return waiters("lock/leader")(v) == 1 })
		if l, err := observer.Leader(w.Context()); err != nil || l.Token != la.Token() || string(l.Value) != "a:2" {
			t.Errorf("%+v, %v", l, err)
		}
		if err := a.Resign(w.Context()); err != nil {
			t.Fatal(err)
		}
		lb := <-won
		for l := observed(); l.Token != lb.Token(); l = observed() {
			if l.Token != 0 {
				t.Errorf("%+v leads", l)
			}
		}
		if err := a.Proclaim(w.Context(), nil); !errors.Is(err, client.ErrNotLeader) {
			t.Errorf("proclaim after resigning: %v", err)
		}
		w.valid(lb, 2*ttl)
	})
}
