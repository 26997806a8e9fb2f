package filemark

import (
	"testing"

	"github.com/headlease/headlease/fence/fencetest"
	"github.com/headlease/headlease/fence/markstore"
)

var _ markstore.Store = (*Guard)(nil)

// unsynced is the journal's file without the wait for the disk, which thousands of marks
// would take minutes for; TestMarkIsWrittenBeforeEffect and the crash tests have it.
type unsynced struct{ writer }

func (unsynced) Sync() error { return nil }

func TestGuardAgainstTheCommonModel(t *testing.T) {
	g := open(t, t.TempDir())
	g.journal.file = unsynced{g.journal.file}
	fencetest.Run(t, fencetest.Handled(g), "lock/")
}
