package e2e

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
)

// TestLapseAndResume freezes the only witness of a cluster with one region:
// no majority is left, so the head lease lapses, holders let go and nothing is
// granted. When the witness is back, with no owner in between, the region goes
// on under the same epoch, with the same leases and tokens.
func TestLapseAndResume(t *testing.T) {
	c := start(t, oneRegion())
	d := c.File().D
	holder := c.client("", 30*time.Second)
	lease, err := holder.Acquire(within(t, stepTimeout), "lock/kept")
	if err != nil {
		t.Fatal(err)
	}
	frozen := time.Now()
	if err := c.Signal("w-oregon", syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	select {
	case <-lease.Context().Done():
	case <-time.After(2 * d):
		t.Fatal("the holder goes on although its region cannot renew")
	}
	if after := time.Since(frozen); after > d+time.Second {
		t.Errorf("the holder let go %v after the last vote, more than D = %v", after, d)
	}
	if !errors.Is(context.Cause(lease.Context()), client.ErrLost) {
		t.Errorf("cause: %v", context.Cause(lease.Context()))
	}
	// Longer than D: nobody may believe anything any more, and nothing is granted.
	try, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	if other, err := c.client("", 30*time.Second).Acquire(try, "lock/other"); err == nil {
		t.Errorf("granted %v while the head lease has lapsed", other.Token())
	}
	if lease.Valid() {
		t.Error("the lease is believed while the head lease has lapsed")
	}
	st, err := c.admin.RegionStatus(within(t, stepTimeout), "eu-frankfurt")
	if err != nil {
		t.Fatal(err)
	}
	before := st.GetPartitions()[0]
	if before.GetHeldNs() != 0 {
		t.Errorf("the region says that it holds the partition for %v more", time.Duration(before.GetHeldNs()))
	}

	if err := c.Signal("w-oregon", syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	healed := time.Now()
	if err := c.admin.WaitOwned(within(t, stepTimeout)); err != nil {
		t.Fatal(err)
	}
	t.Logf("held again %v after the witness was back", time.Since(healed).Round(time.Millisecond))
	st, err = c.admin.RegionStatus(within(t, stepTimeout), "eu-frankfurt")
	if err != nil {
		t.Fatal(err)
	}
	if after := st.GetPartitions()[0]; after.GetEpoch() != before.GetEpoch() {
		t.Errorf("epoch %d became %d without another owner", before.GetEpoch(), after.GetEpoch())
	}
	info, err := holder.Get(within(t, stepTimeout), "lock/kept")
	if err != nil {
		t.Fatal(err)
	}
	if info != nil && info.GetToken() != uint64(lease.Token()) {
		t.Errorf("the region has token %d for the lease %v", info.GetToken(), lease.Token())
	}
	if _, err := c.client("", 30*time.Second).Acquire(within(t, stepTimeout), "lock/other"); err != nil {
		t.Error(err)
	}
}
