package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	cluster "github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/fence/cache"
	"github.com/headlease/headlease/fence/redisguard"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/reconfigure"
	"github.com/headlease/headlease/internal/pause"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/shard"
	"github.com/headlease/headlease/worker/redisstream"
)

const (
	// stepPause is between two looks at a move that waits.
	stepPause = 200 * time.Millisecond
	// redisTimeout bounds one command to Redis.
	redisTimeout = 2 * time.Second
)

// streamFlags say in which streams, on which server, a command acts.
type streamFlags struct {
	streams []string
	redis   cache.ServerConfig
	marks   string
	timeout time.Duration
	json    bool
	// unmoved of unpin: streams of which Redis has no record count as done.
	unmoved bool
}

func (f *streamFlags) add(cmd *cobra.Command, streams string) {
	flags := cmd.Flags()
	flags.StringSliceVar(&f.streams, "stream", nil, streams)
	flags.StringSliceVar(&f.redis.Addresses, "redis", nil, "the streams' Redis: host:port or a unix socket's path; nodes with --redis-cluster, sentinels with --redis-master")
	flags.BoolVar(&f.redis.Cluster, "redis-cluster", false, "it is a Redis Cluster")
	flags.StringVar(&f.redis.Master, "redis-master", "", "name under which sentinels watch it")
	flags.StringVar(&f.redis.Username, "redis-username", "", "user of its ACL")
	flags.StringVar(&f.redis.PasswordFile, "redis-password-file", "", "file with the user's password")
	flags.BoolVar(&f.redis.TLS, "redis-tls", false, "talk TLS to it")
	flags.StringVar(&f.redis.CAFile, "redis-ca", "", "trust this file's authority instead of the system's")
	flags.StringVar(&f.marks, "mark-prefix", redisguard.DefaultKeyPrefix, "what the workers' guard has as KeyPrefix")
	flags.DurationVar(&f.timeout, "timeout", 10*time.Minute, "how long to wait; what is begun goes on when the command is run again")
	flags.BoolVar(&f.json, "json", false, "print JSON")
}

// open connects to Redis.
func (f *streamFlags) open(ctx context.Context) (redis.UniversalClient, error) {
	if len(f.redis.Addresses) == 0 {
		return nil, errors.New("--redis: missing; name the server that has the streams, as host:port")
	}
	client, err := f.redis.Client(redisTimeout, nil)
	if err != nil {
		return nil, fmt.Errorf("--redis: %w", err)
	}
	if err := client.Ping(ctx).Err(); err != nil {
		return nil, errors.Join(fmt.Errorf("--redis %s: %w", strings.Join(f.redis.Addresses, ","), err), client.Close())
	}
	return client, nil
}

func (f *streamFlags) mover(client redis.UniversalClient, stream string, conf *pb.ClusterConfiguration) (*redisstream.Mover, error) {
	guard, err := redisguard.New(client, redisguard.Options{KeyPrefix: f.marks})
	if err != nil {
		return nil, err
	}
	return redisstream.NewMover(client, guard, redisstream.Stream{Name: stream, Shards: conf.GetShards()})
}

func checkKey(key string) error {
	if r, err := shard.Parse("lock/" + key); err != nil || r.Key != key {
		return fmt.Errorf("key %q: use 1 to %d characters of A-Z, a-z, 0-9 and ._:/-", key, shard.MaxKey)
	}
	return nil
}

func newShardPinCmd(a *app) *cobra.Command {
	var flags streamFlags
	cmd := &cobra.Command{
		Use:   "pin KEY",
		Short: "Give a hot key a shard of its own",
		Long: `Pin moves the messages of a key from its hash shard to a dedicated one, numbered from
2^24, in the same partition. The voters decide on the exception; groups of workers
take the new shard within seconds; then each stream that is named moves the key:
from one message to the next producers write to the new shard, numbers go on, and
the first message there is handled when the last one in the old shard is, under a
higher token. Nothing is handled twice at once or out of order, and no producer
waits.

What is decided is in the configuration, how far a stream is in its Redis. So it may
be broken off at any point and run again from any machine; a stream whose move has
begun ends it without the command. Run it again to add streams.`,
		Example: `  headlease shard pin account/whale --stream orders --redis 10.1.0.9:6379
  headlease shard pin account/whale --stream orders,payments --redis 10.1.0.9:6379 --json`,
		Args: usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(flags.streams) == 0 {
				return &usageError{cmd.CommandPath(), errors.New("--stream: missing; name the streams in which the key has messages")}
			}
			return a.moveKey(cmd.Context(), args[0], &flags, false)
		},
	}
	flags.add(cmd, "streams in which the key is moved")
	return cmd
}

func newShardUnpinCmd(a *app) *cobra.Command {
	var flags streamFlags
	cmd := &cobra.Command{
		Use:   "unpin KEY",
		Short: "Bring a pinned key back to its hash shard",
		Long: `Unpin is the move of 'headlease shard pin' the other way round, with the same
promises. The hash shard is leased anew for it, which takes a moment, if its holder
has an older token than the one that handled the key. When the key is back in all
streams the exception ends; the number of the dedicated shard is never used again.

A stream of which this Redis has no record that the key was moved in it stays pinned:
it is on another Redis. If it is not, since its pin was broken off before it began
there, name it with --stream and give --unmoved. Should it be on another one all the
same, nobody handles the key's messages in the dedicated shard any more.`,
		Example: `  headlease shard unpin account/whale --redis 10.1.0.9:6379`,
		Args:    usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if flags.unmoved && len(flags.streams) == 0 {
				return &usageError{cmd.CommandPath(), errors.New("--unmoved: needs --stream; name the streams in which the key was never moved")}
			}
			return a.moveKey(cmd.Context(), args[0], &flags, true)
		},
	}
	flags.add(cmd, "streams in which the key is moved back; default all in which it was moved on this Redis")
	cmd.Flags().BoolVar(&flags.unmoved, "unmoved", false, "with --stream: the key was never moved in these streams, whose Redis has no record of it")
	return cmd
}

// pinSummary is the JSON form of shard pin and unpin.
type pinSummary struct {
	Key           string   `json:"key"`
	Shard         uint32   `json:"shard"`
	HashShard     uint32   `json:"hash_shard"`
	Partition     string   `json:"partition"`
	Configuration uint64   `json:"configuration"`
	Streams       []string `json:"streams"`
	// Left are the streams in which the key is still in its dedicated shard.
	Left []string `json:"left,omitempty"`
}

// moveKey pins or unpins a key, from wherever that is.
func (a *app) moveKey(ctx context.Context, key string, flags *streamFlags, back bool) error {
	if err := checkKey(key); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, flags.timeout, errors.New("the time given by --timeout is over; run the command again to go on"))
	defer cancel()
	client, err := flags.open(ctx)
	if err != nil {
		return err
	}
	defer client.Close() //nolint:errcheck // nothing is lost
	return a.withCluster(func(c *cluster.Cluster) error {
		p := newProgress(a.stderr)
		defer p.end()
		m := keyMove{c: c, key: key, flags: flags, client: client, progress: p}
		do := m.pin
		if back {
			do = m.unpin
		}
		s, err := do(ctx)
		p.end()
		if err != nil {
			return err
		}
		if flags.json {
			return json.NewEncoder(a.stdout).Encode(s)
		}
		if err := a.printf("%s: shard/%d, partition %s (configuration %d)\n", s.Key, s.Shard, s.Partition, s.Configuration); err != nil || len(s.Left) == 0 {
			return err
		}
		return a.printf("it is still pinned in streams %s; run this again with their --redis\n", strings.Join(s.Left, ", "))
	})
}

// keyMove is one run of shard pin or unpin.
type keyMove struct {
	c        *cluster.Cluster
	key      string
	flags    *streamFlags
	client   redis.UniversalClient
	progress *progress
}

func (m *keyMove) change(ctx context.Context, goal reconfigure.Goal) (*pb.ClusterConfiguration, error) {
	return m.c.Change(ctx, cluster.Change{Goal: goal, Progress: func(step string) { m.progress.show(m.key, step, "") }})
}

func (m *keyMove) pin(ctx context.Context) (s pinSummary, err error) {
	conf, _, err := m.c.Configuration(ctx)
	if err != nil {
		return s, err
	}
	if err := m.check(conf); err != nil {
		return s, err
	}
	if conf, err = m.change(ctx, reconfigure.Pin(m.key, m.flags.streams)); err != nil {
		return s, err
	}
	e := config.Exception(conf, m.key)
	if err := m.streams(ctx, conf, e, m.flags.streams); err != nil {
		return s, err
	}
	return m.summary(conf, m.flags.streams)
}

func (m *keyMove) unpin(ctx context.Context) (s pinSummary, err error) {
	conf, _, err := m.c.Configuration(ctx)
	if err != nil {
		return s, err
	}
	if err := m.check(conf); err != nil {
		return s, err
	}
	e := config.Exception(conf, m.key)
	if e == nil {
		return m.summary(conf, nil)
	}
	streams, err := m.here(ctx, conf, e)
	if err != nil {
		return s, err
	}
	if conf, err = m.change(ctx, reconfigure.Unpin(m.key)); err != nil {
		return s, err
	}
	if e = config.Exception(conf, m.key); e == nil {
		return m.summary(conf, nil)
	}
	if err := m.streams(ctx, conf, e, streams); err != nil {
		return s, err
	}
	if conf, err = m.change(ctx, reconfigure.Unpinned(m.key, e.GetSince(), streams)); err != nil {
		return s, err
	}
	return m.summary(conf, streams)
}

// here are the streams in which the key is to be brought back: those of which
// this Redis knows that it was moved. Those of another one must not count as
// done: the exception would end while the key's messages are in its shard.
func (m *keyMove) here(ctx context.Context, conf *pb.ClusterConfiguration, e *pb.ShardException) (streams []string, err error) {
	named := m.flags.streams
	for _, name := range e.GetStreams() {
		if len(named) > 0 && !slices.Contains(named, name) {
			continue
		}
		mover, err := m.flags.mover(m.client, name, conf)
		if err != nil {
			return nil, err
		}
		moved, err := mover.Moved(ctx, m.key)
		switch {
		case err != nil:
			return nil, err
		case moved || m.flags.unmoved:
			streams = append(streams, name)
		case len(named) > 0:
			return nil, fmt.Errorf("--stream %s: the Redis at %s has no record that %s was ever moved in it; name the stream's own with --redis, or give --unmoved if its pin was broken off before it began there",
				name, strings.Join(m.flags.redis.Addresses, ","), m.key)
		}
	}
	for _, name := range named {
		if !slices.Contains(e.GetStreams(), name) {
			return nil, fmt.Errorf("--stream %s: %s is not pinned in it; it is in %s", name, m.key, strings.Join(e.GetStreams(), ", "))
		}
	}
	if len(streams) == 0 {
		return nil, fmt.Errorf("--redis: the Redis at %s has no record that %s was moved in any of its streams, %s; name the one that has them, or name the streams with --stream and give --unmoved if the pin was broken off before it began there",
			strings.Join(m.flags.redis.Addresses, ","), m.key, strings.Join(e.GetStreams(), ", "))
	}
	return streams, nil
}

// check refuses what could be begun and not be ended.
func (m *keyMove) check(conf *pb.ClusterConfiguration) error {
	var errs []error
	for _, name := range m.flags.streams {
		if err := (redisstream.Stream{Name: name, Shards: conf.GetShards()}).Validate(); err != nil {
			errs = append(errs, fmt.Errorf("--stream: %w", err))
		}
	}
	return errors.Join(errs...)
}

// streams moves the key in each of the streams, one after the other.
func (m *keyMove) streams(ctx context.Context, conf *pb.ClusterConfiguration, e *pb.ShardException, streams []string) error {
	mv := redisstream.Move{Key: m.key, Dedicated: e.GetShard(), Generation: e.GetSince(), Back: e.GetLeaving(), Unmoved: m.flags.unmoved}
	for _, name := range streams {
		mover, err := m.flags.mover(m.client, name, conf)
		if err != nil {
			return err
		}
		if err := m.stream(ctx, name, mover, mv); err != nil {
			return fmt.Errorf("stream %s: %w", name, err)
		}
	}
	return nil
}

func (m *keyMove) stream(ctx context.Context, name string, mover *redisstream.Mover, mv redisstream.Move) error {
	subject := m.key + " in stream " + name
	for {
		p, err := mover.Step(ctx, mv)
		waits := fmt.Sprintf("%s (shard/%d)", p.Stage, p.Shard)
		switch {
		case errors.Is(err, redisstream.ErrSuperseded):
			return fmt.Errorf("%w; another command has moved it on, see `headlease shard list`", err)
		case errors.Is(err, redisstream.ErrNotMoved):
			return err
		case err != nil:
			waits = "waits: " + err.Error()
		case p.Stage == redisstream.StageDone:
			m.progress.show(subject, fmt.Sprintf("is in shard/%d", p.Shard), "")
			return nil
		case p.Stage == redisstream.StageParked:
			waits += "; deal with them and then run `headlease shard unpark " + m.key + "`"
		}
		detail := ""
		if p.Left > 0 {
			detail = count(int(p.Left), "message") + " left" //nolint:gosec // at most some thousand
		}
		m.progress.show(subject, waits, detail)
		if pause.For(ctx, stepPause) != nil {
			return fmt.Errorf("%w; it %s", context.Cause(ctx), waits)
		}
	}
}

func (m *keyMove) summary(conf *pb.ClusterConfiguration, streams []string) (pinSummary, error) {
	s, err := summariseShard(m.key, conf)
	return pinSummary{
		Key: m.key, Shard: s.Shard, HashShard: s.HashShard, Partition: s.Partition, Configuration: conf.GetVersion(),
		Streams: streams, Left: slices.DeleteFunc(slices.Clone(config.Exception(conf, m.key).GetStreams()), func(name string) bool { return slices.Contains(streams, name) }),
	}, err
}

func newShardUnparkCmd(a *app) *cobra.Command {
	var flags streamFlags
	cmd := &cobra.Command{
		Use:   "unpark KEY",
		Short: "Let the messages of a key be handled again after some were parked",
		Long: `Unpark ends that messages of a key are parked because one before them is. Deal with
the parked ones first, in the order in which they are in the stream
{shard/N}:NAME:dead, and delete each (XDEL): while one is left it is refused, and
says which.`,
		Example: `  headlease shard unpark account/1042 --stream orders --redis 10.1.0.9:6379`,
		Args:    usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(flags.streams) != 1 {
				return &usageError{cmd.CommandPath(), errors.New("--stream: name the one stream in which messages of the key are parked")}
			}
			if err := checkKey(args[0]); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeoutCause(cmd.Context(), flags.timeout, errors.New("the time given by --timeout is over"))
			defer cancel()
			client, err := flags.open(ctx)
			if err != nil {
				return err
			}
			defer client.Close() //nolint:errcheck // nothing is lost
			conf, err := a.shardConfiguration(cmd, false)
			if err != nil {
				return err
			}
			was, err := redisstream.Unpark(ctx, client, redisstream.Stream{Name: flags.streams[0], Shards: conf.GetShards()}, args[0])
			switch {
			case err != nil:
				return err
			case flags.json:
				return json.NewEncoder(a.stdout).Encode(map[string]any{"key": args[0], "stream": flags.streams[0], "was_parked": was})
			case !was:
				return a.printf("%s: no message of it is parked in stream %s\n", args[0], flags.streams[0])
			}
			return a.printf("%s: its messages in stream %s are handled again\n", args[0], flags.streams[0])
		},
	}
	flags.add(cmd, "the stream in which they are parked")
	return cmd
}

func newShardListCmd(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"exceptions"},
		Short:   "Show the keys that have shards of their own",
		Long: `List prints the exception table of the configuration that the voters have decided:
each pinned key with its dedicated shard, its hash shard, the partition that has
both, and the streams in which it is moved. A key that is leaving is on its way back:
run 'headlease shard unpin' again if that was broken off.`,
		Example: `  headlease shard list
  headlease shard list --json | jq -r '.[].key'`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			conf, err := a.shardConfiguration(cmd, false)
			if err != nil {
				return err
			}
			table := make([]exceptionRow, 0, len(conf.GetExceptions()))
			for _, e := range conf.GetExceptions() {
				s, err := summariseShard(e.GetKey(), conf)
				if err != nil {
					return err
				}
				state := "pinned"
				if e.GetLeaving() {
					state = "leaving"
				}
				table = append(table, exceptionRow{e.GetKey(), e.GetShard(), s.HashShard, s.Partition, state, e.GetSince(), e.GetStreams()})
			}
			if asJSON {
				enc := json.NewEncoder(a.stdout)
				enc.SetIndent("", "  ")
				return enc.Encode(table)
			}
			if len(table) == 0 {
				return a.printf("no key has a shard of its own; `headlease shard pin KEY` gives it one\n")
			}
			w := tabwriter.NewWriter(a.stdout, 0, 0, 3, ' ', 0)
			fmt.Fprintln(w, "KEY\tSHARD\tHASH SHARD\tPARTITION\tSTATE\tSINCE\tSTREAMS")
			for _, r := range table {
				fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\t%d\t%s\n", r.Key, r.Shard, r.HashShard, r.Partition, r.State, r.Since, strings.Join(r.Streams, ", "))
			}
			return w.Flush()
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// exceptionRow is the JSON form of an entry of shard list.
type exceptionRow struct {
	Key       string `json:"key"`
	Shard     uint32 `json:"shard"`
	HashShard uint32 `json:"hash_shard"`
	Partition string `json:"partition"`
	// State is pinned, or leaving.
	State string `json:"state"`
	// Since is the version of the configuration that began the key's present move.
	Since   uint64   `json:"since"`
	Streams []string `json:"streams"`
}
