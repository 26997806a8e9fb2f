package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// Every command's help exits with 0 and shows how the command is used by an
// example of itself.
func TestEveryCommandHelpsWithAnExample(t *testing.T) {
	var walk func(path []string, cmd *cobra.Command)
	seen := 0
	walk = func(path []string, cmd *cobra.Command) {
		if !cmd.Hidden {
			seen++
			var stdout, stderr bytes.Buffer
			code := execute(append(path[1:len(path):len(path)], "--help"), &stdout, &stderr)
			if code != exitOK || stderr.Len() > 0 {
				t.Errorf("%s --help: exit code %d, %s", strings.Join(path, " "), code, stderr.String())
			}
			_, examples, ok := strings.Cut(stdout.String(), "Examples:\n")
			if !ok || !strings.Contains(examples, "  "+strings.Join(path, " ")) {
				t.Errorf("%s --help has no example of itself:\n%s", strings.Join(path, " "), stdout.String())
			}
		}
		for _, sub := range cmd.Commands() {
			walk(append(path[:len(path):len(path)], sub.Name()), sub)
		}
	}
	root := newRoot(&app{stdout: &bytes.Buffer{}, stderr: &bytes.Buffer{}})
	walk([]string{root.Name()}, root)
	if seen < 15 {
		t.Errorf("only %d commands found", seen)
	}
}
