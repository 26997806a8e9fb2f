package main

import (
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// ownGroup makes the command start in a process group of its own. If this
// process is in the foreground of a terminal, the command's group takes its
// place there, to read from it and to get its interrupts, until restore is
// called.
func ownGroup(cmd *exec.Cmd) (restore func()) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	tty := int(os.Stdin.Fd())
	foreground, err := unix.IoctlGetInt(tty, unix.TIOCGPGRP)
	if err != nil || foreground != unix.Getpgrp() {
		return func() {}
	}
	cmd.SysProcAttr.Foreground, cmd.SysProcAttr.Ctty = true, tty
	return func() {
		// From the background, taking the terminal back would stop us.
		signal.Ignore(syscall.SIGTTOU)
		defer signal.Reset(syscall.SIGTTOU)
		_ = unix.IoctlSetPointerInt(tty, unix.TIOCSPGRP, foreground)
	}
}
