package backup

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/headlease/headlease/internal/fsync"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Save writes a backup to path: fill gives its frames in order. The file gets its
// name when it is complete and synced; what was there before is replaced then,
// and only then. progress is told of the bytes written.
func Save(path string, fill func(put func(*pb.BackupFrame) error) error, progress func(bytes int64)) (err error) {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("backup: %s is not a file; name one", path)
	}
	dir := filepath.Dir(path)
	tmp, err := os.CreateTemp(dir, "."+filepath.Base(path)+".tmp-*")
	if err != nil {
		return fmt.Errorf("backup: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("backup %s: %w", path, err), os.Remove(tmp.Name()))
		}
	}()
	buf := bufio.NewWriterSize(tmp, 1<<18)
	w, err := NewWriter(buf)
	if err == nil {
		err = fill(func(f *pb.BackupFrame) error {
			err := w.Put(f)
			progress(w.Bytes())
			return err
		})
	}
	if err == nil && !w.Complete() {
		err = errors.New("the stream ended before the footer")
	}
	if err == nil {
		err = buf.Flush()
	}
	if err == nil {
		err = tmp.Sync()
	}
	err = errors.Join(err, tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return err
	}
	return fsync.Dir(dir)
}
