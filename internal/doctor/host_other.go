//go:build !linux

package doctor

import (
	"errors"
	"os"
	"time"
)

func datasync(f *os.File) error { return f.Sync() }

func sameDevice(string, string) bool { return true }

func examineHost(string) []Check { return nil }

var errNotLinux = errors.New("needs Linux")

func synchronised() (bool, time.Duration, error) { return false, 0, errNotLinux }

func suspends() (time.Duration, error) { return 0, errNotLinux }
