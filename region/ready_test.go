package region

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A server is ready once it has caught up, and stays so when leader and quorum
// are gone.
func TestReadiness(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var initialised, leading bool
		var leader string
		var own, its uint64
		var down, stopped error
		fresh := func() *readiness {
			return &readiness{
				stopped: func() error { return stopped },
				started: time.Now(), initialised: func() bool { return initialised }, leading: func() bool { return leading },
				leader: func() string { return leader }, applied: func() uint64 { return own },
				ask: func(context.Context, string) (uint64, error) { return its, down },
			}
		}
		want := func(r *readiness, text string) {
			t.Helper()
			err := r.check(t.Context())
			switch {
			case text == "" && err != nil:
				t.Errorf("not ready: %v", err)
			case text != "" && (err == nil || !strings.Contains(err.Error(), text)):
				t.Errorf("error %v, want one with %q", err, text)
			}
		}
		r := fresh()
		want(r, "headlease init")
		initialised = true
		want(r, "no leader is known")
		leader, its, own, down = "eu-2", 7, 6, errors.New("unreachable")
		want(r, "unreachable")
		down = nil
		want(r, "6 of 7")
		own = 7
		want(r, "")
		leader, its = "", 100 // the quorum is lost, and it lags
		want(r, "")
		stopped = errors.New("another era was met")
		want(r, "another era")
		stopped = nil

		r, leading = fresh(), true
		want(r, "")

		r, leading, leader = fresh(), false, ""
		time.Sleep(leaderless - time.Nanosecond)
		want(r, "no leader is known")
		time.Sleep(time.Nanosecond)
		want(r, "") // alone: an orchestrator must go on to the next server
		leader = "eu-2"
		want(r, "7 of 100") // which was not for ever
	})
}
