package replica

import (
	"errors"
	"os"
	"syscall"
)

// Wait for what is being written, write the rest, wait for it.
const syncFileRangeAll = 1 | 2 | 4

// writeOut writes a part of a file to disk, without what makes it durable: an
// fsync would commit the file system's journal, and the log's fsync wait for
// that.
func writeOut(f *os.File, from, n int64) error {
	err := syscall.SyncFileRange(int(f.Fd()), from, n, syncFileRangeAll)
	if errors.Is(err, syscall.ENOSYS) || errors.Is(err, syscall.EOPNOTSUPP) {
		return f.Sync()
	}
	return err
}
