// Package load reads a cluster file from disk, together with the process's
// environment. It is apart from package clusterfile because that one is pure.
package load

import (
	"errors"
	"fmt"
	"os"

	"github.com/headlease/headlease/internal/clusterfile"
)

// maxSize bounds what is read as a cluster file.
const maxSize = 4 << 20

// File reads, parses and checks the cluster file at path under the process's
// environment. Warnings are for people. A file that can be read but is wrong
// gives a *clusterfile.Error that carries its path and all faults.
func File(path string) (f clusterfile.File, warnings []string, err error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return clusterfile.File{}, nil, fmt.Errorf("cluster file %s: %w; 'headlease config example' prints one", path, os.ErrNotExist)
	case err != nil:
		return clusterfile.File{}, nil, fmt.Errorf("cluster file: %w", err)
	case info.IsDir():
		return clusterfile.File{}, nil, fmt.Errorf("cluster file %s is a directory; name the file in it", path)
	case info.Size() > maxSize:
		return clusterfile.File{}, nil, fmt.Errorf("cluster file %s has %d bytes, over %d; is it the right file?", path, info.Size(), maxSize)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return clusterfile.File{}, nil, fmt.Errorf("cluster file: %w", err)
	}
	f, warnings, err = clusterfile.Parse(data, os.Environ())
	if bad := (*clusterfile.Error)(nil); errors.As(err, &bad) {
		bad.Source = path
	}
	return f, warnings, err
}
