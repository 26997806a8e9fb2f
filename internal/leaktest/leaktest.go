// Package leaktest checks for goroutines that outlive their owners in tests
// that run gossip.
package leaktest

import (
	"testing"

	"go.uber.org/goleak"
)

// VerifyTestMain is goleak.VerifyTestMain for packages that run memberlist: its
// prober may wait for one probe's answer, up to its probe interval, after
// Shutdown has returned, and nothing tells when it is gone.
func VerifyTestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/hashicorp/memberlist.(*Memberlist).probeNode"))
}
