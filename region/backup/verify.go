package backup

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// Content is what a backup has in it.
type Content struct {
	Header *pb.BackupHeader
	View   state.View
	// Bytes of the file.
	Bytes int64
}

// Load reads the backup at path as a whole and checks everything in it.
func Load(path string) (Content, error) {
	f, err := os.Open(path)
	if err != nil {
		return Content{}, fmt.Errorf("backup: %w", err)
	}
	defer func() { _ = f.Close() }()
	c, err := read(bufio.NewReaderSize(f, 1<<18))
	if err != nil {
		return Content{}, fmt.Errorf("backup %s: %w", path, err)
	}
	return c, nil
}

func read(in io.Reader) (Content, error) {
	r, err := NewReader(in)
	if err != nil {
		return Content{}, err
	}
	m, err := state.ReadSnapshot(r)
	if err != nil {
		// Where the file is damaged counts for more than what the state misses.
		if r.err != nil && !errors.Is(r.err, io.EOF) {
			return Content{}, r.err
		}
		return Content{}, &DamageError{Offset: r.Offset(), Problem: err.Error()}
	}
	h, v := r.Header(), m.View()
	switch {
	case !v.Initialised():
		return Content{}, errors.New("it is of a region without data")
	case h.GetRegion() != v.Region() || h.GetIncarnation() != uint64(v.Incarnation()) || h.GetIndex() != v.AppliedIndex():
		return Content{}, &DamageError{Offset: int64(len(magic)), Problem: fmt.Sprintf(
			"the header is of region %s (incarnation %x) at entry %d, the state of region %s (incarnation %x) at entry %d",
			h.GetRegion(), h.GetIncarnation(), h.GetIndex(), v.Region(), uint64(v.Incarnation()), v.AppliedIndex())}
	}
	return Content{Header: h, View: v, Bytes: r.next}, nil
}
