package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
)

func init() {
	registerSystem("etcd", func() System { return &etcdSystem{name: "etcd", base: 12300} })
	registerSystem("etcdfast", func() System {
		return &etcdSystem{name: "etcdfast", base: 12400, heartbeat: "20", election: "200"}
	})
	open := func(mode string) func(context.Context, System, Opts) (Driver, error) {
		return func(ctx context.Context, s System, o Opts) (Driver, error) {
			return openEtcd(ctx, s.(*etcdSystem), o, mode)
		}
	}
	register(&Spec{Name: "etcd", System: "etcd", Open: open("txn"), Workloads: "W1 W2 W3 W4 W5 W6 W7 W8", Share: 100,
		Note: "one lease per client session; acquire = Txn create-if-absent, release = Txn delete-if-mine, queue = concurrency.Mutex"})
	register(&Spec{Name: "etcd-leader", System: "etcd", Open: open("txn"), Workloads: "W2", LeaderPin: true,
		Note: "as etcd, every client connected to the leader"})
	register(&Spec{Name: "etcd-perlease", System: "etcd", Open: open("lease"), Workloads: "W1 W2",
		Note: "a TTL lease per acquire: LeaseGrant + Txn, release = LeaseRevoke"})
	register(&Spec{Name: "etcd-v3lock", System: "etcd", Open: open("v3lock"), Workloads: "W1 W3",
		Note: "server-side Lock service (v3lock), one lease per client session"})
	register(&Spec{Name: "etcd-1conn", System: "etcd", Open: open("txn"), Workloads: "W4", Share: 1,
		Note: "as etcd, every session on its own connection"})
	register(&Spec{Name: "etcd-fast", System: "etcdfast", Open: open("txn"), Workloads: "W5 W7", Share: 100,
		Note: "as etcd with heartbeat 20 ms, election timeout 200 ms"})
}

// ---- cluster

type etcdSystem struct {
	name                string
	base                int
	heartbeat, election string
	env                 *Env
	procs               []*Proc
	ids                 []uint64
	version             string
}

func (s *etcdSystem) clientURL(i int) string {
	return fmt.Sprintf("http://%s:%d", s.env.host(i), s.base+10*i)
}
func (s *etcdSystem) peerURL(i int) string {
	return fmt.Sprintf("http://%s:%d", s.env.host(i), s.base+10*i+1)
}

func (s *etcdSystem) Start(ctx context.Context, env *Env) error {
	s.env = env
	if out, err := exec.Command(*flagEtcd, "--version").Output(); err == nil {
		s.version = strings.TrimPrefix(strings.SplitN(string(out), "\n", 2)[0], "etcd Version: ")
	}
	root := filepath.Join(env.Root, s.name+env.Tag)
	if err := os.RemoveAll(root); err != nil {
		return err
	}
	var ic []string
	for i := 0; i < 3; i++ {
		ic = append(ic, fmt.Sprintf("n%d=%s", i, s.peerURL(i)))
	}
	for i := 0; i < 3; i++ {
		dir := filepath.Join(root, fmt.Sprintf("n%d", i))
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		if err := portFree(env.ns(i), strings.TrimPrefix(s.clientURL(i), "http://")); err != nil {
			return err
		}
		args := []string{*flagEtcd, "--name", fmt.Sprintf("n%d", i), "--data-dir", filepath.Join(dir, "d"),
			"--listen-client-urls", s.clientURL(i), "--advertise-client-urls", s.clientURL(i),
			"--listen-peer-urls", s.peerURL(i), "--initial-advertise-peer-urls", s.peerURL(i),
			"--initial-cluster", strings.Join(ic, ","), "--initial-cluster-state", "new",
			"--initial-cluster-token", s.name, "--logger", "zap", "--log-level", "error"}
		hb, el := s.heartbeat, s.election
		if v := env.Tune["heartbeat"]; v != "" {
			hb, el = v, env.Tune["election"]
		}
		if hb != "" {
			args = append(args, "--heartbeat-interval", hb, "--election-timeout", el)
		}
		args = append(args, strings.Fields(*flagEtcdArgs)...)
		p, err := startProc(fmt.Sprintf("%s-n%d", s.name, i), filepath.Join(dir, "log"), env.ns(i), args...)
		if err != nil {
			return err
		}
		s.procs = append(s.procs, p)
	}
	if err := poll(ctx, 100*time.Millisecond, 40*time.Second, s.Ready); err != nil {
		return err
	}
	// Let the leader publish and all members settle.
	time.Sleep(500 * time.Millisecond)
	return nil
}

func (s *etcdSystem) Stop() {
	for _, p := range s.procs {
		p.resume()
		p.kill()
	}
	s.procs = nil
}

func (s *etcdSystem) Procs() []*Proc { return s.procs }
func (s *etcdSystem) Info() string {
	hb, el := "100", "1000"
	if s.heartbeat != "" {
		hb, el = s.heartbeat, s.election
	}
	return fmt.Sprintf("etcd %s, 3 members, fsync on, heartbeat %s ms, election %s ms", s.version, hb, el)
}

func (s *etcdSystem) client(nodes []int, dial DialCtx, extra ...grpc.DialOption) (*clientv3.Client, error) {
	var eps []string
	for _, n := range nodes {
		eps = append(eps, s.clientURL(n))
	}
	cfg := clientv3.Config{Endpoints: eps, DialTimeout: 5 * time.Second, Logger: zap.NewNop(), DialOptions: extra}
	if dial != nil {
		cfg.DialOptions = append(cfg.DialOptions, grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return dial(ctx, "tcp", addr)
		}))
	}
	return clientv3.New(cfg)
}

func (s *etcdSystem) Leader(ctx context.Context) (int, error) {
	for i := range s.procs {
		if !s.procs[i].running() {
			continue
		}
		cli, err := s.client([]int{i}, s.env.dial(i))
		if err != nil {
			continue
		}
		c, cancel := context.WithTimeout(ctx, time.Second)
		st, err := cli.Status(c, s.clientURL(i))
		cancel()
		_ = cli.Close()
		if err == nil && st.Leader != 0 && st.Leader == st.Header.MemberId {
			return i, nil
		}
	}
	return -1, errors.New("no leader")
}

func (s *etcdSystem) Ready(ctx context.Context) error {
	s.ids = make([]uint64, len(s.procs))
	var leader uint64
	for i := range s.procs {
		cli, err := s.client([]int{i}, s.env.dial(i))
		if err != nil {
			return err
		}
		st, err := cli.Status(ctx, s.clientURL(i))
		_ = cli.Close()
		if err != nil {
			return err
		}
		if st.Leader == 0 || (leader != 0 && st.Leader != leader) {
			return errors.New("no common leader")
		}
		leader = st.Leader
		s.ids[i] = st.Header.MemberId
	}
	return nil
}

func (s *etcdSystem) Restart(ctx context.Context, i int) error { return s.procs[i].start() }

func (s *etcdSystem) MoveLeader(ctx context.Context, i int) error {
	return poll(ctx, 200*time.Millisecond, 20*time.Second, func(ctx context.Context) error {
		l, err := s.Leader(ctx)
		if err != nil {
			return err
		}
		if l == i {
			return nil
		}
		cli, err := s.client([]int{l}, s.env.dial(l))
		if err != nil {
			return err
		}
		defer func() { _ = cli.Close() }()
		if _, err := cli.MoveLeader(ctx, s.ids[i]); err != nil {
			return err
		}
		return errors.New("moving")
	})
}

// ---- client

type etcdDriver struct {
	mode   string
	cli    *clientv3.Client
	sess   *concurrency.Session
	sessMu sync.Mutex
	mu     sync.Mutex
	held   map[string]any // per key: *concurrency.Mutex, lease id, or v3lock key
	notif  atomic.Uint64
}

func openEtcd(ctx context.Context, s *etcdSystem, o Opts, mode string) (Driver, error) {
	d := &etcdDriver{mode: mode, held: map[string]any{}}
	cli, err := s.client(o.Nodes, o.Dial, grpc.WithChainStreamInterceptor(d.countWatch))
	if err != nil {
		return nil, err
	}
	d.cli = cli
	return d, nil
}

// session is the client's implicit session, made at first use.
func (d *etcdDriver) session(ctx context.Context) (*concurrency.Session, error) {
	d.sessMu.Lock()
	defer d.sessMu.Unlock()
	if d.sess != nil {
		return d.sess, nil
	}
	g, err := d.cli.Grant(ctx, 60)
	if err != nil {
		return nil, err
	}
	s, err := concurrency.NewSession(d.cli, concurrency.WithLease(g.ID))
	if err != nil {
		return nil, err
	}
	d.sess = s
	return s, nil
}

// countWatch counts watch responses that carry events.
func (d *etcdDriver) countWatch(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	st, err := streamer(ctx, desc, cc, method, opts...)
	if err != nil || method != "/etcdserverpb.Watch/Watch" {
		return st, err
	}
	return &watchCounter{st, d}, nil
}

type watchCounter struct {
	grpc.ClientStream
	d *etcdDriver
}

func (w *watchCounter) RecvMsg(m any) error {
	err := w.ClientStream.RecvMsg(m)
	if r, ok := m.(*pb.WatchResponse); err == nil && ok && len(r.Events) > 0 {
		w.d.notif.Add(1)
	}
	return err
}

func (d *etcdDriver) createTxn(ctx context.Context, key string, lease clientv3.LeaseID) (uint64, error) {
	r, err := d.cli.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, "", clientv3.WithLease(lease))).Commit()
	if err != nil {
		return 0, err
	}
	if !r.Succeeded {
		return 0, ErrHeld
	}
	return uint64(r.Header.Revision), nil
}

func (d *etcdDriver) Acquire(ctx context.Context, key string, ttl time.Duration) (uint64, error) {
	switch d.mode {
	case "lease":
		g, err := d.cli.Grant(ctx, int64(ttl/time.Second))
		if err != nil {
			return 0, err
		}
		tok, err := d.createTxn(ctx, key, g.ID)
		if err != nil {
			_, _ = d.cli.Revoke(context.WithoutCancel(ctx), g.ID)
			return 0, err
		}
		d.put(key, g.ID)
		return tok, nil
	case "v3lock":
		return d.AcquireWait(ctx, key, ttl)
	default:
		s, err := d.session(ctx)
		if err != nil {
			return 0, err
		}
		return d.createTxn(ctx, key, s.Lease())
	}
}

func (d *etcdDriver) put(key string, v any) { d.mu.Lock(); d.held[key] = v; d.mu.Unlock() }
func (d *etcdDriver) take(key string) any {
	d.mu.Lock()
	defer d.mu.Unlock()
	v := d.held[key]
	delete(d.held, key)
	return v
}

func (d *etcdDriver) AcquireWait(ctx context.Context, key string, ttl time.Duration) (uint64, error) {
	s, err := d.session(ctx)
	if err != nil {
		return 0, err
	}
	if d.mode == "v3lock" {
		k, rev, err := v3Lock(ctx, d.cli.ActiveConnection(), key, int64(s.Lease()))
		if err != nil {
			return 0, err
		}
		d.notif.Add(1)
		d.put(key, k)
		return rev, nil
	}
	m := concurrency.NewMutex(s, key)
	if err := m.Lock(ctx); err != nil {
		return 0, err
	}
	d.put(key, m)
	return uint64(m.Header().Revision), nil
}

func (d *etcdDriver) Release(ctx context.Context, key string, token uint64) error {
	switch v := d.take(key).(type) {
	case *concurrency.Mutex:
		return v.Unlock(ctx)
	case clientv3.LeaseID:
		_, err := d.cli.Revoke(ctx, v)
		return err
	case []byte:
		return v3Unlock(ctx, d.cli.ActiveConnection(), v)
	}
	r, err := d.cli.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", int64(token))).
		Then(clientv3.OpDelete(key)).Commit()
	if err == nil && !r.Succeeded {
		err = ErrLost
	}
	return err
}

func (d *etcdDriver) Notifications() uint64 { return d.notif.Load() }

func (d *etcdDriver) CountHeld(ctx context.Context, prefix string, n int) (int, error) {
	r, err := d.cli.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCountOnly(), clientv3.WithSerializable())
	if err != nil {
		return 0, err
	}
	return int(r.Count), nil
}

func (d *etcdDriver) Close() error {
	if d.sess != nil {
		d.sess.Orphan()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, _ = d.cli.Revoke(ctx, d.sess.Lease())
		cancel()
	}
	return d.cli.Close()
}

type etcdSession struct {
	d      *etcdDriver
	id     clientv3.LeaseID
	cancel context.CancelFunc
	n      atomic.Uint64
	dead   atomic.Bool
}

func (d *etcdDriver) OpenSession(ctx context.Context, ttl time.Duration) (Session, error) {
	g, err := d.cli.Grant(ctx, int64(ttl/time.Second))
	if err != nil {
		return nil, err
	}
	return &etcdSession{d: d, id: g.ID}, nil
}

func (s *etcdSession) Hold(ctx context.Context, key string) (uint64, error) {
	return s.d.createTxn(ctx, key, s.id)
}

func (s *etcdSession) StartKeepAlive() error {
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	ch, err := s.d.cli.KeepAlive(ctx, s.id)
	if err != nil {
		cancel()
		return err
	}
	go func() {
		for range ch {
			s.n.Add(1)
		}
		s.dead.Store(true)
	}()
	return nil
}

func (s *etcdSession) KeepAlives() uint64 { return s.n.Load() }
func (s *etcdSession) Alive() bool        { return !s.dead.Load() }
func (s *etcdSession) Abandon() {
	if s.cancel != nil {
		s.cancel()
	}
}
func (s *etcdSession) Close(ctx context.Context) error {
	s.Abandon()
	_, err := s.d.cli.Revoke(ctx, s.id)
	return err
}

// ---- v3lock over a raw codec, so that the server module is not needed.

type rawMsg struct{ b []byte }

type rawCodec struct{}

func (rawCodec) Marshal(v any) ([]byte, error) { return v.(*rawMsg).b, nil }
func (rawCodec) Unmarshal(data []byte, v any) error {
	v.(*rawMsg).b = append([]byte(nil), data...)
	return nil
}
func (rawCodec) Name() string { return "proto" }

func v3Lock(ctx context.Context, cc *grpc.ClientConn, name string, lease int64) (key []byte, rev uint64, err error) {
	var b []byte
	b = protowire.AppendTag(b, 1, protowire.BytesType)
	b = protowire.AppendString(b, name)
	b = protowire.AppendTag(b, 2, protowire.VarintType)
	b = protowire.AppendVarint(b, uint64(lease))
	var out rawMsg
	if err := cc.Invoke(ctx, "/v3lockpb.Lock/Lock", &rawMsg{b}, &out, grpc.ForceCodec(rawCodec{})); err != nil {
		return nil, 0, err
	}
	key = protoField(out.b, 2)
	hdr := protoField(out.b, 1)
	rev = protoVarint(hdr, 3)
	return key, rev, nil
}

func v3Unlock(ctx context.Context, cc *grpc.ClientConn, key []byte) error {
	var b []byte
	b = protowire.AppendTag(b, 1, protowire.BytesType)
	b = protowire.AppendBytes(b, key)
	var out rawMsg
	return cc.Invoke(ctx, "/v3lockpb.Lock/Unlock", &rawMsg{b}, &out, grpc.ForceCodec(rawCodec{}))
}

func protoField(b []byte, want protowire.Number) []byte {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return nil
		}
		b = b[n:]
		if num == want && typ == protowire.BytesType {
			v, n := protowire.ConsumeBytes(b)
			if n < 0 {
				return nil
			}
			return v
		}
		n = protowire.ConsumeFieldValue(num, typ, b)
		if n < 0 {
			return nil
		}
		b = b[n:]
	}
	return nil
}

func protoVarint(b []byte, want protowire.Number) uint64 {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return 0
		}
		b = b[n:]
		if num == want && typ == protowire.VarintType {
			v, _ := protowire.ConsumeVarint(b)
			return v
		}
		n = protowire.ConsumeFieldValue(num, typ, b)
		if n < 0 {
			return 0
		}
		b = b[n:]
	}
	return 0
}
