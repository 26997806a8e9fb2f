package filemark

import (
	"context"
	"sync"
	"testing"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/fencetest"
	"github.com/headlease/headlease/fence/markstore"
)

var _ markstore.Store = (*Guard)(nil)

type data struct {
	*Guard
	mu     sync.Mutex
	values map[string]string
}

func (d *data) Write(ctx context.Context, resource string, token fence.Token, value string) error {
	return d.Do(ctx, resource, token, func(context.Context) error {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.values[resource] = value
		return nil
	})
}

func (d *data) Value(_ context.Context, resource string) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.values[resource], nil
}

// unsynced is the journal's file without the wait for the disk, which thousands of marks
// would take minutes for; TestMarkIsWrittenBeforeEffect and the crash tests have it.
type unsynced struct{ writer }

func (unsynced) Sync() error { return nil }

func TestGuardAgainstTheCommonModel(t *testing.T) {
	g := open(t, t.TempDir())
	g.journal.file = unsynced{g.journal.file}
	fencetest.Run(t, &data{Guard: g, values: map[string]string{}}, "lock/")
}
