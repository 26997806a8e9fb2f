// Package scenarios has the drills that are shipped, and the JSON schema of
// scenario files for editors.
package scenarios

import (
	"embed"
	"fmt"
	"slices"
	"strings"

	"github.com/headlease/headlease/drill/plan"
)

//go:embed *.yaml schema.json
var files embed.FS

const suffix = ".yaml"

// Names of all shipped scenarios, sorted.
func Names() []string {
	entries, err := files.ReadDir(".")
	if err != nil {
		panic(err) // it is part of the binary
	}
	var out []string
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), suffix); ok {
			out = append(out, name)
		}
	}
	return out
}

// Text of a scenario as it is shipped.
func Text(name string) ([]byte, error) {
	if !slices.Contains(Names(), name) {
		return nil, fmt.Errorf("scenario %q: there is none; use %s, or name a file", name, strings.Join(Names(), ", "))
	}
	return files.ReadFile(name + suffix)
}

// Get returns a shipped scenario.
func Get(name string) (plan.Scenario, error) {
	text, err := Text(name)
	if err != nil {
		return plan.Scenario{}, err
	}
	return plan.Parse(text)
}

// Schema of scenario files.
func Schema() []byte {
	text, err := files.ReadFile("schema.json")
	if err != nil {
		panic(err) // it is part of the binary
	}
	return text
}
