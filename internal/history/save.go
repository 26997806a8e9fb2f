package history

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/anishathalye/porcupine"
)

// Save writes a history, and porcupine's picture of each lock that has no
// order, into a directory, which it makes.
func Save(dir string, h History, v *Verdict) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(dir, "history.json"))
	if err != nil {
		return err
	}
	err = errors.Join(json.NewEncoder(f).Encode(h), f.Close())
	if e := os.WriteFile(filepath.Join(dir, "verdict.txt"), []byte(v.String()), 0o644); e != nil {
		err = errors.Join(err, e)
	}
	for resource, info := range v.info {
		name := strings.NewReplacer("/", "-", "#", "-").Replace(resource) + ".html"
		if e := porcupine.VisualizePath(Model(v.slots[resource]), info, filepath.Join(dir, name)); e != nil {
			err = errors.Join(err, fmt.Errorf("picture of %s: %w", resource, e))
		}
	}
	return err
}

// Load reads a history that Save has written.
func Load(dir string) (History, error) {
	var h History
	b, err := os.ReadFile(filepath.Join(dir, "history.json"))
	if err == nil {
		err = json.Unmarshal(b, &h)
	}
	return h, err
}
