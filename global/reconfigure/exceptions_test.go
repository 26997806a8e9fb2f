package reconfigure

import (
	"slices"
	"strings"
	"testing"

	"github.com/headlease/headlease/global/config"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestPinAndUnpinAreStepsOfTheConfiguration(t *testing.T) {
	_, c := example(t)
	take := func(goal Goal, want int) {
		t.Helper()
		var did []string
		if did, c = steps(t, c, goal); len(did) != want {
			t.Fatalf("took %q, want %d steps", did, want)
		}
	}
	take(Pin("hot", []string{"orders"}), 1)
	e := config.Exception(c, "hot")
	if e.GetShard() != config.FirstException || e.GetSince() != c.GetVersion() || e.GetLeaving() {
		t.Fatalf("%v", e)
	}
	pinned := e.GetSince()
	take(Pin("hot", []string{"orders"}), 0)
	take(Pin("hot", []string{"payments", "orders"}), 1)
	if e = config.Exception(c, "hot"); e.GetSince() != pinned || !slices.Equal(e.GetStreams(), []string{"orders", "payments"}) {
		t.Fatalf("%v: a stream more is no other move", e)
	}
	take(Pin("warm", []string{"orders"}), 1)
	take(Unpin("hot"), 1)
	take(Unpin("hot"), 0)
	e = config.Exception(c, "hot")
	if !e.GetLeaving() || e.GetSince() != c.GetVersion() {
		t.Fatalf("%v", e)
	}
	if _, err := Pin("hot", []string{"orders"})(c); err == nil || !strings.Contains(err.Error(), "headlease shard unpin hot") {
		t.Errorf("pinned while it leaves: %v", err)
	}
	if _, err := Unpinned("warm", c.GetVersion(), []string{"orders"})(c); err == nil {
		t.Error("an exception that does not leave ended")
	}
	leaving := e.GetSince()
	take(Unpinned("hot", leaving, []string{"orders"}), 1)
	take(Unpinned("hot", leaving, []string{"orders"}), 0)
	take(Unpinned("hot", leaving, []string{"payments"}), 1)
	if config.Exception(c, "hot") != nil {
		t.Fatalf("%v", c.GetExceptions())
	}
	take(Unpinned("hot", leaving, []string{"payments"}), 0)
	take(Unpin("hot"), 0)
	// A number is not used again, and an old command does not end the new move.
	take(Pin("hot", []string{"orders"}), 1)
	if e = config.Exception(c, "hot"); e.GetShard() != config.FirstException+2 {
		t.Fatalf("%v", e)
	}
	take(Unpinned("hot", leaving, []string{"orders"}), 0)
	take(Unpin("hot"), 1)
	take(Unpinned("hot", leaving, []string{"orders"}), 0)
	if config.Exception(c, "hot") == nil {
		t.Error("an old command ended a newer move")
	}
}

func TestPinIsBounded(t *testing.T) {
	_, c := example(t)
	c.LastDedicated = config.FirstException
	for i := range config.MaxExceptions {
		c.LastDedicated++
		c.Exceptions = append(c.Exceptions, &pb.ShardException{Key: "k" + strings.Repeat("x", i%200) + string(rune('a'+i/200)), Shard: c.LastDedicated, Since: 1})
	}
	if _, err := Pin("hot", []string{"orders"})(c); err == nil || !strings.Contains(err.Error(), "unpin one") {
		t.Error(err)
	}
}
