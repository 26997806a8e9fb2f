// Package fsync makes changes of directories survive a crash.
package fsync

import (
	"errors"
	"os"
)

// Dir makes the names in a directory durable: a file that was made, renamed or
// removed there is found so after a crash only when its directory was synced.
func Dir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
