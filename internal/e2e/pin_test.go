package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/connect"
	"github.com/headlease/headlease/client/group"
	"github.com/headlease/headlease/fence/redisguard"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/pause"
	"github.com/headlease/headlease/internal/redisserver"
	"github.com/headlease/headlease/shard"
	"github.com/headlease/headlease/worker"
	"github.com/headlease/headlease/worker/redisstream"
)

// pinVar makes a process of this test a worker.
const pinVar = "HEADLEASE_E2E_PIN_WORKER"

type pinStage struct {
	Dir, Redis, Name string
	Shard            uint32
}

var pins = redisstream.Stream{Name: "pins", Shards: shard.DefaultCount}

const (
	pinTTL = 3 * time.Second
	// effects is a list to which the handlers of all shards append: the order in
	// which messages took effect.
	effects    = "effects"
	luaEffects = `
for i = 3, #ARGV, 2 do
  redis.call('RPUSH', 'effects', table.concat({ARGV[1], ARGV[2], ARGV[i], ARGV[i + 1]}, ' '))
end
return #ARGV`
)

// pinWorker is a worker process of one hash shard and what is pinned from it.
func pinWorker(raw string) error {
	var s pinStage
	if err := json.Unmarshal([]byte(raw), &s); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	c, err := connect.Open(connect.Options{
		File: filepath.Join(s.Dir, "cluster.yaml"), Certs: filepath.Join(s.Dir, "certs"), Name: devcluster.DefaultClient,
		Client: client.Config{TTL: pinTTL, Logger: log},
	})
	if err != nil {
		return err
	}
	store := redis.NewClient(&redis.Options{Network: "unix", Addr: s.Redis, ContextTimeoutEnabled: true})
	guard, err := redisguard.New(store, redisguard.Options{Logger: log})
	if err != nil {
		return err
	}
	source, err := redisstream.NewSource(redisstream.Config{Client: store, Guard: guard, Stream: pins, Logger: log, Poll: 100 * time.Millisecond})
	if err != nil {
		return err
	}
	write, err := redisstream.NewApplyScript(luaEffects)
	if err != nil {
		return err
	}
	return worker.Run(ctx, worker.Config{
		Group:  group.Config{Client: c, Name: "pins", Member: s.Name, Shards: []uint32{s.Shard}},
		Source: source, Logger: log,
		Handle: func(ctx context.Context, b *worker.Batch) error {
			args := []any{b.Number, uint64(b.Token())}
			for _, m := range b.Messages {
				args = append(args, m.Key, m.Seq)
			}
			_, err := write.Apply(ctx, b, nil, args...)
			return err
		},
	})
}

// process is one that the test started.
type process struct {
	*exec.Cmd
	out  bytes.Buffer
	done chan struct{}
}

func startProcess(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{Cmd: cmd, done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = &p.out, &p.out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = cmd.Wait() // its end is all that counts, or what it printed
		close(p.done)
	}()
	t.Cleanup(func() {
		p.kill()
		if out := p.out.String(); t.Failed() {
			t.Logf("---- %v\n%s", cmd.Args, out[max(0, len(out)-4000):])
		}
	})
	return p
}

func (p *process) kill() {
	_ = p.Process.Signal(syscall.SIGCONT)
	_ = p.Process.Kill()
	<-p.done
}

// TestAKeyIsPinnedAndUnpinned pins a key and brings it back by the shipped
// command, which is killed again and again and goes on in the next one, while
// workers are killed and frozen and producers write all the time. Each message
// takes effect once, in order, in one shard at a time, under tokens that rise.
func TestAKeyIsPinnedAndUnpinned(t *testing.T) {
	c := start(t, oneRegion())
	server, err := redisserver.New(filepath.Join(t.TempDir(), "redis"), redisserver.Durable()...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	store := redis.NewClient(&redis.Options{Network: "unix", Addr: server.Socket(), ContextTimeoutEnabled: true})
	t.Cleanup(func() { _ = store.Close() })

	const hot = "account/whale"
	home := shard.HashShard(hot, pins.Shards)
	neighbour := ""
	for i := 0; neighbour == ""; i++ {
		if k := fmt.Sprintf("account/%d", i); shard.HashShard(k, pins.Shards) == home {
			neighbour = k
		}
	}
	work := func(name string) *process {
		raw, err := json.Marshal(pinStage{c.Dir(), server.Socket(), name, home})
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), pinVar+"="+string(raw))
		return startProcess(t, cmd)
	}
	workers := []*process{work("a"), work("b")}

	ctx := within(t, 4*time.Minute)
	var mu sync.Mutex
	var sent [2]uint64 // the highest number, of the hot key and the other
	produced := make(chan struct{})
	var producers sync.WaitGroup
	for range 2 {
		producers.Go(func() {
			p, err := redisstream.NewProducer(store, pins)
			for i := 0; err == nil; i++ {
				select {
				case <-produced:
					return
				case <-time.After(5 * time.Millisecond):
				}
				key := i % 4 / 3 // three of four for the hot key
				var s redisstream.Sent
				if s, err = p.Send(ctx, []string{hot, neighbour}[key], nil); err == nil {
					mu.Lock()
					sent[key] = max(sent[key], s.Seq)
					mu.Unlock()
				}
			}
			t.Error(err)
		})
	}
	command := func(verb string) *exec.Cmd {
		return exec.CommandContext(ctx, binary, "shard", verb, hot, "--stream", pins.Name, "--redis", server.Socket(),
			"-f", filepath.Join(c.Dir(), "cluster.yaml"), "--certs", filepath.Join(c.Dir(), "certs"), "--timeout", "2m", "--json")
	}
	c.awaitEffects(ctx, t, store, 20, home)
	for i, verb := range []string{"pin", "unpin"} {
		if verb == "unpin" {
			c.unpinElsewhere(t, hot)
		}
		// Commands that die, each later than the one before.
		for _, after := range []time.Duration{100, 300, 700, 1500} {
			p := startProcess(t, command(verb))
			select {
			case <-p.done:
			case <-time.After(after * time.Millisecond):
			}
			p.kill()
		}
		workers[i].kill()
		workers[i] = work([]string{"a", "b"}[i])
		if err := workers[1-i].Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		thaw := time.AfterFunc(2*pinTTL, func() { _ = workers[1-i].Process.Signal(syscall.SIGCONT) })
		out, err := command(verb).Output()
		var got struct {
			Shard uint32
			Left  []string
		}
		if exit := new(exec.ExitError); errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		if jsonErr := json.Unmarshal(out, &got); err != nil || jsonErr != nil || len(got.Left) > 0 || (got.Shard >= shard.FirstDedicated) != (verb == "pin") {
			t.Fatalf("%s: %s %v %v", verb, out, err, jsonErr)
		}
		c.awaitEffects(ctx, t, store, 20, got.Shard)
		thaw.Stop()
		_ = workers[1-i].Process.Signal(syscall.SIGCONT)
	}
	close(produced)
	producers.Wait()
	want := map[string]uint64{hot: sent[0], neighbour: sent[1]}
	for {
		n, err := store.LLen(ctx, effects).Uint64()
		if err != nil {
			t.Fatal(err)
		}
		if n >= want[hot]+want[neighbour] {
			break
		}
		_ = pause.For(ctx, 50*time.Millisecond) // the next call ends with ctx
	}
	checkEffects(ctx, t, store, want, hot)
	list, err := exec.CommandContext(ctx, binary, "shards", "list", "--json", "-f", filepath.Join(c.Dir(), "cluster.yaml"), "--certs", filepath.Join(c.Dir(), "certs")).Output()
	if err != nil || strings.TrimSpace(string(list)) != "[]" {
		t.Errorf("shards list: %s, %v", list, err)
	}
}

// unpinElsewhere brings a pinned key back at a Redis that is not its stream's: it
// must stay pinned.
func (c *cluster) unpinElsewhere(t *testing.T, key string) {
	t.Helper()
	server, err := redisserver.New(filepath.Join(t.TempDir(), "redis"))
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	files := []string{"-f", filepath.Join(c.Dir(), "cluster.yaml"), "--certs", filepath.Join(c.Dir(), "certs")}
	for want, args := range map[string][]string{
		"--redis: the Redis at":            nil,
		"--stream pins: the Redis at":      {"--stream", pins.Name},
		"--stream pin: " + key + " is not": {"--stream", "pin"},
		"--unmoved: needs --stream":        {"--unmoved"},
	} {
		args = slices.Concat([]string{"shard", "unpin", key, "--redis", server.Socket()}, args, files)
		if _, errs, err := headlease(t, args...); err == nil || !strings.Contains(errs, want) {
			t.Errorf("%v: %v, %s; want %q", args, err, errs, want)
		}
	}
	list, errs, err := headlease(t, append([]string{"shard", "list", "--json"}, files...)...)
	if err != nil || !strings.Contains(list, `"pinned"`) {
		t.Errorf("shard list: %v, %s%s", err, list, errs)
	}
}

// awaitEffects waits until so many more messages took effect, the last one in
// that shard.
func (c *cluster) awaitEffects(ctx context.Context, t *testing.T, store *redis.Client, more uint64, at uint32) {
	t.Helper()
	first, err := store.LLen(ctx, effects).Uint64()
	for err == nil {
		var n uint64
		var last []string
		if n, err = store.LLen(ctx, effects).Uint64(); err != nil {
			break
		}
		last, err = store.LRange(ctx, effects, -8, -1).Result()
		for _, line := range last {
			if n >= first+more && strings.HasPrefix(line, strconv.FormatUint(uint64(at), 10)+" ") {
				return
			}
		}
		_ = pause.For(ctx, 50*time.Millisecond) // the next call ends with ctx
	}
	t.Fatalf("shard %d: %v", at, err)
}

func checkEffects(ctx context.Context, t *testing.T, store *redis.Client, want map[string]uint64, hot string) {
	t.Helper()
	lines, err := store.LRange(ctx, effects, 0, -1).Result()
	if err != nil {
		t.Fatal(err)
	}
	seqs, tokens, way := map[string]uint64{}, map[string]uint64{}, []uint32{}
	for i, line := range lines {
		var at uint32
		var token, seq uint64
		var key string
		if _, err := fmt.Sscan(line, &at, &token, &key, &seq); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if seq != seqs[key]+1 || token < tokens[key] {
			t.Errorf("line %d: message %d of %s in shard %d under %d, after %d under %d", i, seq, key, at, token, seqs[key], tokens[key])
		}
		seqs[key], tokens[key] = seq, token
		if key == hot && (len(way) == 0 || way[len(way)-1] != at) {
			way = append(way, at)
		}
	}
	if !maps.Equal(seqs, want) || len(way) != 3 || way[0] != way[2] || way[1] < shard.FirstDedicated {
		t.Errorf("took effect: %v of %v; the key was in shards %v", seqs, want, way)
	}
	t.Logf("%v, in shards %v", seqs, way)
}
