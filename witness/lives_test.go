package witness

import (
	"os"
	"path/filepath"
	"testing"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestF5LivesAndWritesShowOldData(t *testing.T) {
	r := newRig(t)
	r.mustAccept(t, acceptOf(eu, 1, 1, "p"))
	first := r.state(0)
	copied := copyData(t, r.dir)
	r.mustAccept(t, acceptOf(eu, 2, 1, "p"))
	last := r.state(0)
	if last.GetWrites() != first.GetWrites()+1 {
		t.Errorf("writes went from %d to %d", first.GetWrites(), last.GetWrites())
	}
	old := start(t, copied, &disk{})
	defer func() { _ = old.store.close() }()
	s := old.state(0)
	if s.GetPreviousLife() != first.GetLife() || s.GetLife() == first.GetLife() || s.GetVoter().GetIncarnation() != first.GetVoter().GetIncarnation() {
		t.Errorf("the line of lives broke: %v after %v", s, first)
	}
	if s.GetWrites() != first.GetWrites()+1 {
		t.Errorf("the start is not counted: %v after %v", s, first)
	}
}

// TestF5EveryEarlierLifeIsOfTheLine: a region that last asked many restarts
// ago still finds the life it knows; a copy's later lives are strangers to the
// original.
func TestF5EveryEarlierLifeIsOfTheLine(t *testing.T) {
	r := newRig(t)
	lives := []uint64{r.state(0).GetLife()}
	dir := r.dir
	for range 3 {
		dir = copyData(t, dir)
		again := start(t, dir, &disk{})
		if err := again.store.close(); err != nil {
			t.Fatal(err)
		}
		lives = append(lives, again.state(0).GetLife())
		for _, life := range lives {
			if !again.answering(&pb.VoteHeader{SeenLife: life}).GetContinues() {
				t.Errorf("after %d starts life %x of %x is not of the line", len(lives), life, lives)
			}
		}
		for _, strange := range []uint64{0, 12345} {
			if again.answering(&pb.VoteHeader{SeenLife: strange}).GetContinues() {
				t.Errorf("life %x is of the line", strange)
			}
		}
	}
	if r.answering(&pb.VoteHeader{SeenLife: lives[3]}).GetContinues() {
		t.Error("the original knows a life of its copy")
	}
}

// copyData is what a crash at this moment leaves behind.
func copyData(t testing_, dir string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, storeFile))
	if err != nil {
		t.Fatal(err)
	}
	to, err := os.MkdirTemp(filepath.Dir(dir), "crash")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(to, storeFile), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	return to
}
