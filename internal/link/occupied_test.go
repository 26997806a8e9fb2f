package link

import (
	"net"
	"strings"
	"testing"

	"github.com/headlease/headlease/internal/pki"
)

// An occupied port is an error with a nil listener, not a non-nil interface
// around nothing: callers close what they got.
func TestListenOnAnOccupiedPort(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	l, err := New(Config{Identity: Identity{Cluster: "c", Role: pki.RoleWitness, Name: "w"}, Insecure: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	ln, err := l.Listen(PlaneVotes, taken.Addr().String())
	if err == nil || !strings.Contains(err.Error(), taken.Addr().String()) {
		t.Errorf("error %v does not name the address", err)
	}
	if ln != nil {
		t.Errorf("listener is %#v, want nil", ln)
	}
}
