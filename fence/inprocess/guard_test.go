package inprocess_test

import (
	"errors"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/fencetest"
	"github.com/headlease/headlease/fence/inprocess"
	"github.com/headlease/headlease/fence/markstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var _ markstore.Store = (*inprocess.Guard)(nil)

func TestGuardAgainstModel(t *testing.T) {
	fencetest.Run(t, fencetest.Handled(inprocess.New(inprocess.Options{})), "lock/")
}

// No mark is forgotten for the sake of another one.
func TestMarksInMemoryAreBounded(t *testing.T) {
	g := inprocess.New(inprocess.Options{MaxResources: 2})
	token, err := fence.NewToken(1, 1)
	if err != nil {
		t.Fatal(err)
	}
	higher, err := fence.NewToken(1, 2)
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	if err := errors.Join(g.Claim(ctx, "lock/a", token), g.Claim(ctx, "lock/b", token)); err != nil {
		t.Fatal(err)
	}
	if err := g.Claim(ctx, "lock/c", token); err == nil || !strings.Contains(err.Error(), "MaxResources") {
		t.Errorf("a third resource: %v", err)
	}
	if err := g.Claim(ctx, "lock/a", higher); err != nil {
		t.Errorf("a known resource: %v", err)
	}
	if g.Mark("lock/a") != higher || g.Mark("lock/b") != token || g.Mark("lock/c") != 0 {
		t.Error("the marks are others")
	}
}

func TestStoreOfOneProcessIsNotForReplicas(t *testing.T) {
	g := inprocess.New(inprocess.Options{})
	if err := markstore.Check(g, 1); err != nil {
		t.Error(err)
	}
	for replicas, want := range map[int]string{0: "say how many", 2: "use a shared one"} {
		if err := markstore.Check(g, replicas); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%d replicas: %v", replicas, err)
		}
	}
	if markstore.Check(nil, 1) == nil {
		t.Error("no store is taken")
	}
}
