package validity

import (
	"reflect"
	"testing"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestF17Strangers(t *testing.T) {
	r := newRig(t)
	k := tok(t, 1, 1)
	e := r.only(r.ack(1, at(0), true, []*pb.PartitionEnd{end(1, at(4*time.Second))}, named(k)), Stranger)
	if e.Resource != res || e.Token != k {
		t.Errorf("%+v", e)
	}
	r.valid(at(1*time.Second), k, false)
	r.Releasing(at(1*time.Second), sid, res, k)
	if ev := r.ack(1, at(1*time.Second), true, nil, named(k)); len(ev) != 0 {
		t.Errorf("a stranger that is being released: %+v", ev)
	}
	// A grant for a request given up is a stranger too.
	r.RequestBegun(sid, 7, res2)
	r.RequestOver(sid, 7)
	h := &pb.Held{Resource: res2, Token: uint64(tok(t, 1, 2)), Partition: partName}
	r.only(r.grant(1, at(2*time.Second), 7, h, nil), Stranger)
}

func TestF17HashFollowsTheStream(t *testing.T) {
	r, k := held(t)
	hash := func() uint64 { return r.Table.Keepalive(at(1*time.Second), sid, r.stream).TokensHash }
	if got, want := hash(), TokensHash(map[string]fence.Token{res: k}); got != want {
		t.Errorf("hash %x, want %x", got, want)
	}
	r.withdraw(1, at(1*time.Second), k, 0)
	if got := hash(); got != 0 {
		t.Errorf("hash %x of nothing", got)
	}
	if TokenHash(res, k) == TokenHash(res2, k) || TokenHash(res, k) == TokenHash(res, k+1) {
		t.Error("the hash tells resources or tokens not apart")
	}
}

func TestF17LowestOpenRequest(t *testing.T) {
	r := newRig(t)
	r.RequestBegun(sid, 3, res)
	r.RequestBegun(sid, 4, res2)
	if got := r.LowestOpenRequest(sid); got != 3 {
		t.Errorf("lowest open request %d, want 3", got)
	}
	r.RequestOver(sid, 3)
	r.RequestOver(sid, 4)
	if got := r.LowestOpenRequest(sid); got != 5 {
		t.Errorf("lowest open request %d, want 5", got)
	}
}

func TestF23OfferIsConfirmedSoon(t *testing.T) {
	r := newRig(t)
	k := tok(t, 1, 1)
	r.RequestBegun(sid, 1, res)
	r.ack(1, at(0), true, nil)
	if r.NextKeepalive(sid) == 0 {
		t.Fatal("nothing to confirm yet")
	}
	h := named(k)
	h.Until = leader(at(2 * time.Second))
	if e := r.only(r.grant(1, at(100*ms), 1, h, end(1, at(4*time.Second))), Granted); !e.Offered || e.Request != 1 {
		t.Errorf("%+v", e)
	}
	if got, want := r.NextKeepalive(sid), at(100*ms).Add(maxConfirm); got != want {
		t.Errorf("the offer is confirmed %v after it was told of, not %v", got.Sub(at(100*ms)), want.Sub(at(100*ms)))
	}
	r.valid(at(1900*ms), k, true)
	r.valid(at(2*time.Second), k, false) // [L4]
	// The ack that confirms takes the offer's end away.
	r.ack(1, at(200*ms), false, []*pb.PartitionEnd{end(1, at(4*time.Second))}, named(k))
	r.valid(at(3*time.Second), k, true)
	if got, want := r.NextKeepalive(sid), at(200*ms).Add(10*time.Second/3); got != want {
		t.Errorf("next keepalive %v, want %v", got.Sub(t0), want.Sub(t0))
	}
}

// Only what is still held is confirmed, each once.
func TestF23WhatIsReleasedIsNotConfirmed(t *testing.T) {
	r := newRig(t)
	r.ack(1, at(0), true, nil)
	due := at(0).Add(10 * time.Second / 3)
	offer := func(request uint64, resource string, token fence.Token, now instant.Instant) {
		t.Helper()
		r.RequestBegun(sid, request, resource)
		h := named(token)
		h.Resource, h.Until = resource, leader(now.Add(5*time.Second))
		r.only(r.grant(1, now, request, h, end(1, at(4*time.Second))), Granted)
	}
	next := func(want instant.Instant) {
		t.Helper()
		if got := r.NextKeepalive(sid); got != want {
			t.Errorf("next keepalive %v, want %v", got.Sub(t0), want.Sub(t0))
		}
	}
	k, k2 := tok(t, 1, 1), tok(t, 1, 2)
	offer(1, res, k, at(100*ms))
	offer(2, res2, k2, at(120*ms))
	r.Releasing(at(130*ms), sid, res, k)
	next(at(100 * ms).Add(maxConfirm)) // the other one is held
	r.Releasing(at(140*ms), sid, res2, k2)
	next(due)
	// One that a keepalive has confirmed is none any more, whatever becomes of it.
	k3, k4 := tok(t, 1, 3), tok(t, 1, 4)
	offer(3, res, k3, at(200*ms))
	r.Keepalive(at(210*ms), sid, r.stream)
	next(at(210 * ms).Add(10 * time.Second / 3))
	offer(4, res2, k4, at(220*ms))
	r.Releasing(at(230*ms), sid, res, k3)
	next(at(220 * ms).Add(maxConfirm))
}

// A clone shares nothing.
func TestCloneIsIndependent(t *testing.T) {
	r, k := held(t)
	form := r.AppendBelief(nil, at(0))
	c := &rig{T: t, Table: r.Clone(), stream: r.stream}
	if got := c.AppendBelief(nil, at(0)); string(got) != string(form) {
		t.Errorf("the clone differs: %x, %x", got, form)
	}
	c.withdraw(1, at(1*time.Second), k, 0)
	c.push(1, at(1*time.Second), end(1, at(9*time.Second)))
	c.Releasing(at(1*time.Second), sid, res2, k)
	if got := r.AppendBelief(nil, at(0)); string(got) != string(form) {
		t.Error("a change of the clone shows in the original")
	}
	if got := c.AppendBelief(nil, at(0)); string(got) == string(form) {
		t.Error("the form does not show a withdrawal")
	}
}

// Whoever adds a field must think of Clone and AppendBelief.
func TestModelKnowsEveryField(t *testing.T) {
	for typ, want := range map[reflect.Type]int{
		reflect.TypeFor[Table]():         7,
		reflect.TypeFor[stream]():        7,
		reflect.TypeFor[session]():       19,
		reflect.TypeFor[view]():          3,
		reflect.TypeFor[naming]():        4,
		reflect.TypeFor[lease]():         6,
		reflect.TypeFor[floor]():         3,
		reflect.TypeFor[sentKeepalive](): 3,
	} {
		if got := typ.NumField(); got != want {
			t.Errorf("%v has %d fields, model.go was written for %d: look at Clone and AppendBelief", typ, got, want)
		}
	}
}
