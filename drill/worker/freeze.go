package worker

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Freeze stops this process, as SIGSTOP from outside would, and returns after
// its SIGCONT. The signal goes to the calling thread, which takes it before
// the system call returns: no instruction of the caller runs in between.
func Freeze() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return unix.Tgkill(os.Getpid(), unix.Gettid(), unix.SIGSTOP)
}
