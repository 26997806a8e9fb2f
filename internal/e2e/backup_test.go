package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/devcluster"
)

// journal is a guarded resource beside the cluster, which writes down every
// token under which something was claimed or written.
type journal struct {
	t       *testing.T
	address string
}

func startJournal(t *testing.T) *journal {
	t.Helper()
	dir := t.TempDir()
	g := devcluster.NewGroup()
	t.Cleanup(func() { g.Stop(context.Background(), stepTimeout) })
	p, err := resource.StartProcess(within(t, stepTimeout), resource.ProcessOptions{
		Group: g, Binary: binary, Dir: filepath.Join(dir, "data"), Log: filepath.Join(dir, "resource.log"),
	})
	if err != nil {
		t.Fatal(err)
	}
	return &journal{t, p.Address}
}

// highest token per resource, of which the journal must never see a fall.
func (j *journal) highest() map[string]fence.Token {
	j.t.Helper()
	entries, err := resource.NewClient(j.address, "judge").Journal(within(j.t, stepTimeout))
	if err != nil {
		j.t.Fatal(err)
	}
	high := map[string]fence.Token{}
	for _, v := range resource.Violations(entries) {
		j.t.Error(v)
	}
	for _, e := range entries {
		if e.Outcome == resource.Accepted {
			high[e.Resource] = max(high[e.Resource], e.Token)
		}
	}
	return high
}

// writers take locks in turn, and claim and write what they stand for.
type writers struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu     sync.Mutex
	writes map[string]int // by lock
	first  time.Time
	errs   map[string]int
}

func (j *journal) work(c *client.Client, locks int) *writers {
	ctx, cancel := context.WithCancel(j.t.Context())
	w := &writers{cancel: cancel, writes: map[string]int{}, errs: map[string]int{}}
	for k := range locks {
		w.writes[fmt.Sprintf("lock/file-%d", k)] = 0
	}
	j.t.Cleanup(w.stop)
	for k := range locks {
		for n := range 2 {
			r := resource.NewClient(j.address, fmt.Sprintf("writer-%d", n))
			w.wg.Go(func() {
				for ctx.Err() == nil {
					if err := w.once(ctx, c, r, fmt.Sprintf("lock/file-%d", k)); err != nil {
						w.mu.Lock()
						w.errs[err.Error()]++
						w.mu.Unlock()
						select {
						case <-time.After(100 * time.Millisecond):
						case <-ctx.Done():
						}
					}
				}
			})
		}
	}
	return w
}

func (w *writers) once(ctx context.Context, c *client.Client, r *resource.Client, lock string) error {
	try, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	lease, err := c.Acquire(try, lock, client.Wait())
	if err != nil {
		return err
	}
	defer func() {
		release, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = lease.Release(release)
	}()
	if !lease.Valid() {
		return errors.New("a lease that is not valid")
	}
	if _, err := r.Claim(try, lock, lease.Token()); err != nil {
		return err
	}
	for range 3 {
		if !lease.Valid() {
			return errors.New("lost")
		}
		if _, err := r.Write(try, lock, lease.Token(), "x"); err != nil {
			return err
		}
		w.mu.Lock()
		w.writes[lock]++
		if w.first.IsZero() {
			w.first = time.Now()
		}
		w.mu.Unlock()
	}
	return nil
}

func (w *writers) stop() {
	w.cancel()
	w.wg.Wait()
}

// until waits until each lock has seen n writes and returns when the first was.
func (w *writers) until(t *testing.T, n int, within time.Duration) time.Time {
	t.Helper()
	for deadline := time.Now().Add(within); ; {
		w.mu.Lock()
		least := n
		for _, writes := range w.writes {
			least = min(least, writes)
		}
		first, all := w.first, fmt.Sprint(w.writes, w.errs)
		w.mu.Unlock()
		if least >= n {
			return first
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d writes to each lock within %v: %s", n, within, all)
		}
		<-time.After(20 * time.Millisecond)
	}
}

// anew forgets the writes that were, and waits until each lock has seen n more.
func (w *writers) anew(t *testing.T, n int, within time.Duration) {
	t.Helper()
	w.mu.Lock()
	for lock := range w.writes {
		w.writes[lock] = 0
	}
	w.mu.Unlock()
	w.until(t, n, within)
}

// higher fails unless every resource has a token now that is above all that it
// had then.
func higher(t *testing.T, then, now map[string]fence.Token) {
	t.Helper()
	if len(then) == 0 {
		t.Fatal("no token to compare with")
	}
	for name, was := range then {
		if is := now[name]; is <= was {
			t.Errorf("F4: %s: token %v after the restore, %v before", name, is, was)
		} else {
			t.Logf("%s: %v before, %v after", name, was, is)
		}
	}
}

// TestF4BackupAndRestoreOfTheOnlyVoter: saved under load, everything stopped,
// restored on new directories; the region grants again after D, and the
// resources see only higher tokens.
func TestF4BackupAndRestoreOfTheOnlyVoter(t *testing.T) {
	c := start(t, devcluster.Options{Regions: 1, Servers: 3, NoWitnesses: true, AllowEvenWitnesses: true, D: 2 * time.Second})
	j := startJournal(t)
	w := j.work(c.client("", 10*time.Second), 3)
	w.until(t, 10, stepTimeout)
	saved := filepath.Join(t.TempDir(), "eu.backup")
	c.mustCLI("backup", "save", saved)
	w.until(t, 50, stepTimeout) // the backup is older than what was granted last
	var names []string
	for _, p := range c.State().Processes {
		names = append(names, p.Name)
	}
	if err := c.Kill(within(t, stepTimeout), names...); err != nil {
		t.Fatal(err)
	}
	w.stop()
	before := j.highest()

	var content struct {
		Region     string
		Sessions   int
		Partitions []struct{ Epoch, Seq uint32 }
	}
	if err := json.Unmarshal([]byte(c.mustCLI("backup", "verify", saved, "--json")), &content); err != nil {
		t.Fatal(err)
	}
	if content.Region != "eu-frankfurt" || content.Sessions == 0 || len(content.Partitions) != 1 {
		t.Errorf("the backup has %+v", content)
	}
	damaged := saved + ".damaged"
	raw, err := os.ReadFile(saved)
	if err != nil {
		t.Fatal(err)
	}
	raw[len(raw)/2] ^= 1
	if err := os.WriteFile(damaged, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	restore := func(file string) (string, error) {
		args := []string{"backup", "restore", file, "--region", "eu-frankfurt"}
		for _, name := range names {
			p, _ := c.Process(name)
			args = append(args, "--data", name+"="+p.DataDir)
		}
		_, errs, err := c.cli(within(t, stepTimeout), args...)
		return errs, err
	}
	if errs, err := restore(saved); err == nil || !strings.Contains(errs, "not empty") {
		t.Errorf("restored over data that is there: %v\n%s", err, errs)
	}
	for _, name := range names {
		c.wipe(name)
	}
	if errs, err := restore(damaged); err == nil || !strings.Contains(errs, "damaged at offset") {
		t.Errorf("restored from a damaged file: %v\n%s", err, errs)
	}
	for _, name := range names {
		if p, _ := c.Process(name); exists(p.DataDir) {
			t.Errorf("a refused restore left %s", p.DataDir)
		}
	}
	if errs, err := restore(saved); err != nil {
		t.Fatalf("%v\n%s", err, errs)
	}
	started := time.Now()
	for _, name := range names {
		if err := c.StartProcess(name); err != nil {
			t.Fatal(err)
		}
	}
	c.mustCLI("init")
	w = j.work(c.client("", 10*time.Second), 3)
	first := w.until(t, 10, startTimeout)
	if waited := first.Sub(started); waited < c.File().D {
		t.Errorf("granted %v after the start, within D = %v", waited, c.File().D)
	}
	w.stop()
	higher(t, before, j.highest())
}

// configured waits until a server has a configuration: the command that adds a
// voter is done when a majority has it.
func (c *cluster) configured(server string) {
	c.t.Helper()
	p, _ := c.File().Process(server)
	for deadline := time.Now().Add(stepTimeout); ; {
		d, err := c.admin.DescribeServer(within(c.t, stepTimeout), p)
		if err == nil && d.GetConfiguration() != nil {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%s has no configuration: %v, %v", server, d, err)
		}
		<-time.After(100 * time.Millisecond)
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// TestF4BackupAndRestoreBesideOtherVoters: a region is lost, its partitions move
// on, and it comes back from an old backup as another incarnation: it owns
// nothing until it is a voter again, and when the others' region is lost it is
// promoted, with tokens above theirs.
func TestF4BackupAndRestoreBesideOtherVoters(t *testing.T) {
	c := start(t, devcluster.Options{Regions: 2, Servers: 1, Witnesses: 1, D: 2 * time.Second})
	const lost = "eu-frankfurt"
	var other string
	for _, name := range c.File().RegionNames() {
		if name != lost {
			other = name
		}
	}
	lostServer, otherServer := c.File().RegionProcesses(lost)[0].Name, c.File().RegionProcesses(other)[0].Name
	j := startJournal(t)
	w := j.work(c.client(lost, 10*time.Second), 4)
	w.until(t, 10, stepTimeout)
	saved := filepath.Join(t.TempDir(), "eu.backup")
	c.mustCLI("backup", "save", saved, "--region", lost)
	w.until(t, 50, stepTimeout)
	if err := c.Kill(within(t, stepTimeout), lostServer); err != nil {
		t.Fatal(err)
	}
	w.stop()
	c.wipe(lostServer)
	w = j.work(c.client(other, 10*time.Second), 4) // after the promotion
	w.until(t, 10, startTimeout)
	w.stop()
	moved := j.highest()

	p, _ := c.Process(lostServer)
	c.mustCLI("backup", "restore", saved, "--region", lost, "--data", lostServer+"="+p.DataDir)
	if err := c.StartProcess(lostServer); err != nil {
		t.Fatal(err)
	}
	c.mustCLI("region", "replace", lost)
	c.configured(lostServer)
	if err := c.Kill(within(t, stepTimeout), otherServer); err != nil {
		t.Fatal(err)
	}
	w = j.work(c.client(lost, 10*time.Second), 4)
	w.until(t, 10, startTimeout)
	w.stop()
	higher(t, moved, j.highest())
}
