package devcluster

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/fault"
	"github.com/headlease/headlease/internal/pki"
)

// faultsOf is a process's start-up table: half a round trip of delay to each
// site but its own.
func faultsOf(f clusterfile.File, p clusterfile.Process, m Matrix) fault.Rules {
	var table fault.Rules
	seen := map[string]bool{site(p): true}
	for _, peer := range f.Peers(p.Name) {
		there := site(peer)
		if seen[there] {
			continue
		}
		seen[there] = true
		if delay := oneWay(m.RTT(site(p), there)); delay > 0 {
			name := there
			if peer.Role == clusterfile.RoleRegion {
				name = peer.Voter() // region/NAME: all its servers
			}
			table.Links = append(table.Links, fault.LinkRule{ID: "wan-" + there, Peer: name, Link: fault.Link{Delay: delay}})
		}
	}
	return table
}

func writeFaults(dir string, f clusterfile.File, m Matrix) error {
	for _, p := range f.Processes() {
		text, err := fault.FormatStartup(faultsOf(f, p, m))
		if err != nil {
			return fmt.Errorf("start-up faults of %s: %w", p.Name, err)
		}
		if err := writeAtomic(filepath.Join(dir, p.Name+".json"), append(text, '\n')); err != nil {
			return err
		}
	}
	return nil
}

// makeCerts makes what is missing of the certificates.
func makeCerts(dir string, f clusterfile.File, clients []string) error {
	identities := []pki.Identity{{Role: pki.RoleAdmin}, {Role: pki.RoleClient, Name: DefaultClient}}
	for _, name := range clients {
		identities = append(identities, pki.Identity{Role: pki.RoleClient, Name: name})
	}
	for _, p := range f.Processes() {
		identities = append(identities, pki.Identity{Role: pki.Role(p.Role), Region: p.Region, Name: p.Name})
	}
	if _, err := pki.Generate(pki.Config{Dir: dir, Cluster: f.Cluster, Identities: identities}); err != nil {
		return fmt.Errorf("certificates of the cluster: %w", err)
	}
	return nil
}

// writeAtomic replaces a file as a whole: a reader sees the old or the new.
func writeAtomic(path string, data []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = tmp.Write(data)
	err = errors.Join(err, tmp.Chmod(0o644), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), os.Remove(tmp.Name()))
	}
	return nil
}

func mkdir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("dir: %w", err)
	}
	return nil
}
