package region

import (
	"fmt"
	"sync"
	"testing"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
)

// TestAServerThatMovesWhileItIsDialled: whatever connection is kept goes where the
// cluster file in force says.
func TestAServerThatMovesWhileItIsDialled(t *testing.T) {
	links, err := link.New(link.Config{Identity: pki.Identity{Cluster: "test", Role: pki.RoleRegion, Region: "eu", Name: "eu-1"}, Insecure: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = links.Close() }()
	const moves = 500
	at := func(port int) clusterfile.File {
		return clusterfile.File{Cluster: "test", Regions: []clusterfile.Region{{Name: "eu", Servers: []clusterfile.Server{{Name: "eu-2", API: fmt.Sprintf("127.0.0.1:%d", port)}}}}}
	}
	p := newPeers(links, at(1), "eu", nil)
	var dialling sync.WaitGroup
	done := make(chan struct{})
	for range 4 {
		dialling.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				if _, err := p.conn(link.PlaneAPI, "eu-2"); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for i := range moves {
		p.setFile(at(2 + i))
		if c, err := p.conn(link.PlaneAPI, "eu-2"); err != nil || c.Target() != "passthrough:///"+at(2 + i).Regions[0].Servers[0].API {
			t.Errorf("moved to port %d, but is dialled at %v: %v", 2+i, c.Target(), err)
			break
		}
	}
	close(done)
	dialling.Wait()
	if err := p.close(); err != nil {
		t.Error(err)
	}
}
