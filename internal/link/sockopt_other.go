//go:build !linux

package link

import (
	"syscall"
	"time"
)

// setUserTimeout has no portable counterpart; clients on other systems rely on
// gRPC's keepalive.
func setUserTimeout(syscall.RawConn, time.Duration) error { return nil }
