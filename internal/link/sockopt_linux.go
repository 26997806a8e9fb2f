package link

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// setUserTimeout bounds how long sent bytes may stay unacknowledged before the
// kernel ends the connection [F50].
func setUserTimeout(raw syscall.RawConn, d time.Duration) error {
	var err error
	ctlErr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d/time.Millisecond))
	})
	if ctlErr != nil {
		return ctlErr
	}
	return err
}
