package filemark

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/headlease/headlease/fence"
)

const crashDir = "FILEMARK_CRASH_DIR"

// A process is killed in an effect, between its mark and its write: the mark is there when
// the journal is opened again, the write is not, and the holder before gets no further.
func TestKilledBetweenMarkAndEffect(t *testing.T) {
	low, high := tok(1, 1), tok(1, 2)
	if dir := os.Getenv(crashDir); dir != "" { // the process that is killed
		g := open(t, dir)
		if err := g.Claim(t.Context(), "lock/a", low); err != nil {
			t.Fatal(err)
		}
		err := g.Do(t.Context(), "lock/a", high, func(context.Context) error {
			fmt.Println("in the effect")
			select {}
		})
		t.Fatal(err)
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), crashDir+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.Contains(lines.Text(), "in the effect") {
		t.Log(lines.Text())
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	g := open(t, dir)
	if mark := g.Mark("lock/a"); mark != high {
		t.Fatalf("the mark is %s", mark)
	}
	data := filepath.Join(dir, "data")
	write := func(text string) func(context.Context) error {
		return func(context.Context) error { return os.WriteFile(data, []byte(text), 0o600) }
	}
	var stale *fence.StaleError
	if err := g.Do(t.Context(), "lock/a", low, write("late")); !errors.As(err, &stale) || stale.Seen != high {
		t.Errorf("write of the holder before: %v", err)
	}
	if err := g.Do(t.Context(), "lock/a", high, write("again")); err != nil {
		t.Fatal(err)
	}
	if text, _ := os.ReadFile(data); string(text) != "again" {
		t.Errorf("the data is %q", text)
	}
}
