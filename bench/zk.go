package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zookeeper/zk"
)

func init() {
	registerSystem("zk", func() System { return &zkSystem{name: "zk", base: 14100, tick: 2000, sync: 5} })
	registerSystem("zkfast", func() System { return &zkSystem{name: "zkfast", base: 14400, tick: 500, sync: 4} })
	open := func(ctx context.Context, s System, o Opts) (Driver, error) {
		return &zkDriver{s: s.(*zkSystem), o: o, held: map[string]string{}}, nil
	}
	register(&Spec{Name: "zk", System: "zk", Workloads: "W1 W2 W3 W4 W5 W6 W7 W8", Share: 1, Open: open,
		Note: "ephemeral sequential lock recipe; the session is the connection; token = sequence number"})
	register(&Spec{Name: "zk-fast", System: "zkfast", Workloads: "W5 W7", Share: 1, Open: open,
		Note: "as zk with tickTime 500 ms, syncLimit 4 (a hung leader is noticed in 2 s)"})
}

type zkSystem struct {
	name       string
	base       int
	tick, sync int
	env        *Env
	procs      []*Proc
	made       sync.Map // lock parents that exist
}

func (s *zkSystem) addr(i int) string { return fmt.Sprintf("%s:%d", s.env.host(i), s.base+i) }

func (s *zkSystem) Start(ctx context.Context, env *Env) error {
	s.env = env
	root := filepath.Join(env.Root, s.name+env.Tag)
	if err := os.RemoveAll(root); err != nil {
		return err
	}
	for i := 0; i < 3; i++ {
		dir := filepath.Join(root, fmt.Sprintf("n%d", i))
		if err := os.MkdirAll(filepath.Join(dir, "d"), 0o755); err != nil {
			return err
		}
		if err := portFree(env.ns(i), s.addr(i)); err != nil {
			return err
		}
		cfg := fmt.Sprintf("tickTime=%d\ninitLimit=10\nsyncLimit=%d\ndataDir=%s\nclientPort=%d\nclientPortAddress=%s\n"+
			"maxClientCnxns=0\nmaxSessionTimeout=60000\nadmin.enableServer=false\n4lw.commands.whitelist=*\nautopurge.purgeInterval=0\n",
			s.tick, s.sync, filepath.Join(dir, "d"), s.base+i, env.host(i))
		for j := 0; j < 3; j++ {
			cfg += fmt.Sprintf("server.%d=%s:%d:%d\n", j+1, env.host(j), s.base+100+j, s.base+200+j)
		}
		for name, text := range map[string]string{
			"zoo.cfg": cfg, filepath.Join("d", "myid"): strconv.Itoa(i + 1),
			"log4j.properties": "log4j.rootLogger=ERROR, A\nlog4j.appender.A=org.apache.log4j.ConsoleAppender\n" +
				"log4j.appender.A.layout=org.apache.log4j.PatternLayout\nlog4j.appender.A.layout.ConversionPattern=%d %p %c %m%n\n",
		} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				return err
			}
		}
		p, err := startProc(fmt.Sprintf("%s-n%d", s.name, i), filepath.Join(dir, "log"), env.ns(i), "/usr/bin/java",
			"-Xms256m", "-Xmx1g", "-Dlog4j.configuration=file:"+filepath.Join(dir, "log4j.properties"),
			"-cp", dir+":/usr/share/java/zookeeper.jar:/usr/share/java/slf4j-log4j12.jar:/usr/share/java/log4j-1.2.jar",
			"org.apache.zookeeper.server.quorum.QuorumPeerMain", filepath.Join(dir, "zoo.cfg"))
		if err != nil {
			return err
		}
		s.procs = append(s.procs, p)
	}
	if err := poll(ctx, 200*time.Millisecond, 60*time.Second, s.Ready); err != nil {
		return err
	}
	return s.roots(ctx)
}

// roots makes the parents that the recipes use.
func (s *zkSystem) roots(ctx context.Context) error {
	l, err := s.Leader(ctx)
	if err != nil {
		return err
	}
	return poll(ctx, 300*time.Millisecond, 30*time.Second, func(ctx context.Context) error {
		c, err := zkConnect(ctx, s, Opts{Nodes: []int{l}, Dial: s.env.dial(l)}, 10*time.Second, nil, nil)
		if err != nil {
			return err
		}
		defer c.Close()
		for _, p := range []string{"/l", "/flat"} {
			if _, err := c.Create(p, nil, 0, zk.WorldACL(zk.PermAll)); err != nil && !errors.Is(err, zk.ErrNodeExists) {
				return err
			}
		}
		return nil
	})
}

func (s *zkSystem) Stop() {
	for _, p := range s.procs {
		p.resume()
		p.kill()
	}
	s.procs = nil
	s.made.Clear()
}

func (s *zkSystem) Procs() []*Proc { return s.procs }
func (s *zkSystem) Info() string {
	return fmt.Sprintf("ZooKeeper 3.8.0 (Debian), OpenJDK 17, 3 servers, forceSync on, tickTime %d ms, syncLimit %d, heap 256m-1g", s.tick, s.sync)
}

func (s *zkSystem) mode(ctx context.Context, i int) (string, error) {
	d := s.env.dial(i)
	if d == nil {
		d = (&net.Dialer{Timeout: time.Second}).DialContext
	}
	c, err := d(ctx, "tcp", s.addr(i))
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	if err := c.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return "", err
	}
	if _, err := c.Write([]byte("srvr")); err != nil {
		return "", err
	}
	sc := bufio.NewScanner(c)
	for sc.Scan() {
		if m, ok := strings.CutPrefix(sc.Text(), "Mode: "); ok {
			return m, nil
		}
	}
	return "", errors.New("not serving")
}

func (s *zkSystem) Leader(ctx context.Context) (int, error) {
	for i, p := range s.procs {
		if !p.running() {
			continue
		}
		if m, err := s.mode(ctx, i); err == nil && m == "leader" {
			return i, nil
		}
	}
	return -1, errors.New("no leader")
}

func (s *zkSystem) Ready(ctx context.Context) error {
	leaders := 0
	for i := range s.procs {
		m, err := s.mode(ctx, i)
		if err != nil {
			return err
		}
		if m == "leader" {
			leaders++
		}
	}
	if leaders != 1 {
		return fmt.Errorf("%d leaders", leaders)
	}
	return nil
}

func (s *zkSystem) Restart(ctx context.Context, i int) error { return s.procs[i].start() }

// ---- client

type zkQuiet struct{}

func (zkQuiet) Printf(string, ...interface{}) {}

// zkHosts serves a fixed list of addresses in turn.
type zkHosts struct {
	mu   sync.Mutex
	l    []string
	next int
	miss int
}

func (h *zkHosts) Init(l []string) error { h.l = l; return nil }
func (h *zkHosts) Len() int              { return len(h.l) }
func (h *zkHosts) Next() (string, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.miss++
	if h.miss > len(h.l) {
		// The library would sleep 1 s here (and fail what is queued); a short
		// pause measures the servers and not that constant.
		time.Sleep(50 * time.Millisecond)
	}
	s := h.l[h.next%len(h.l)]
	h.next++
	return s, false
}
func (h *zkHosts) Connected() { h.mu.Lock(); h.miss = 0; h.mu.Unlock() }

// cutter lets a client die without a word.
type cutter struct {
	mu   sync.Mutex
	conn net.Conn
	dead bool
}

func (k *cutter) cut() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dead = true
	if k.conn != nil {
		_ = k.conn.Close()
	}
}

// zkConn limits the session handshake to one second. The library waits ten times
// its read timeout there, so one hung server that still accepts connections
// swallows a client for minutes; W5, W7 and W8 are to see the servers, not that.
type zkConn struct {
	net.Conn
	shaken atomic.Bool
}

func (c *zkConn) SetReadDeadline(t time.Time) error {
	if t.IsZero() {
		c.shaken.Store(true)
	} else if !c.shaken.Load() && time.Until(t) > time.Second {
		t = time.Now().Add(time.Second)
	}
	return c.Conn.SetReadDeadline(t)
}

func zkConnect(ctx context.Context, s *zkSystem, o Opts, ttl time.Duration, k *cutter, onEvent func(zk.Event)) (*zk.Conn, error) {
	var hosts []string
	for _, n := range o.Nodes {
		hosts = append(hosts, s.addr(n))
	}
	ready := make(chan struct{})
	var once sync.Once
	dialer := func(network, addr string, timeout time.Duration) (net.Conn, error) {
		d := o.Dial
		if d == nil {
			d = (&net.Dialer{}).DialContext
		}
		if k != nil {
			k.mu.Lock()
			dead := k.dead
			k.mu.Unlock()
			if dead {
				return nil, errors.New("client is dead")
			}
		}
		c, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		conn, err := d(c, network, addr)
		if err != nil {
			return nil, err
		}
		if k != nil {
			k.mu.Lock()
			k.conn = conn
			k.mu.Unlock()
		}
		return &zkConn{Conn: conn}, nil
	}
	c, _, err := zk.Connect(hosts, ttl, zk.WithLogger(zkQuiet{}), zk.WithLogInfo(false),
		zk.WithMaxBufferSize(256<<10), zk.WithMaxConnBufferSize(32<<10), zk.WithDialer(dialer), zk.WithHostProvider(&zkHosts{}),
		zk.WithEventCallback(func(e zk.Event) {
			if e.Type == zk.EventSession && e.State == zk.StateHasSession {
				once.Do(func() { close(ready) })
			}
			if onEvent != nil {
				onEvent(e)
			}
		}))
	if err != nil {
		return nil, err
	}
	select {
	case <-ready:
		return c, nil
	case <-ctx.Done():
		go c.Close()
		return nil, ctx.Err()
	case <-time.After(20 * time.Second):
		go c.Close()
		return nil, errors.New("no session in 20 s")
	}
}

type zkDriver struct {
	s     *zkSystem
	o     Opts
	mu    sync.Mutex
	conn  *zk.Conn
	held  map[string]string
	notif atomic.Uint64
}

func (d *zkDriver) c(ctx context.Context) (*zk.Conn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conn != nil {
		return d.conn, nil
	}
	c, err := zkConnect(ctx, d.s, d.o, 30*time.Second, nil, d.onEvent)
	d.conn = c
	return c, err
}

func (d *zkDriver) onEvent(e zk.Event) {
	if e.Type == zk.EventNodeDeleted || e.Type == zk.EventNodeChildrenChanged {
		d.notif.Add(1)
	}
}

// withCtx runs a call of a client library that knows no contexts.
func withCtx[T any](ctx context.Context, f func() (T, error)) (T, error) {
	if ctx.Done() == nil {
		return f()
	}
	type r struct {
		v T
		e error
	}
	ch := make(chan r, 1)
	go func() { v, e := f(); ch <- r{v, e} }()
	select {
	case x := <-ch:
		return x.v, x.e
	case <-ctx.Done():
		var z T
		return z, ctx.Err()
	}
}

// enqueue creates this client's sequential node under the key's parent.
func (d *zkDriver) enqueue(c *zk.Conn, key string) (string, error) {
	acl := zk.WorldACL(zk.PermAll)
	parent := "/l/" + key
	if _, ok := d.s.made.Load(key); !ok {
		if _, err := c.Create(parent, nil, 0, acl); err != nil && !errors.Is(err, zk.ErrNodeExists) {
			return "", err
		}
		d.s.made.Store(key, true)
	}
	return c.Create(parent+"/n-", nil, zk.FlagEphemeral|zk.FlagSequence, acl)
}

func zkSeq(path string) uint64 {
	n, _ := strconv.ParseUint(path[len(path)-10:], 10, 64)
	return n
}

func (d *zkDriver) Acquire(ctx context.Context, key string, ttl time.Duration) (uint64, error) {
	c, err := d.c(ctx)
	if err != nil {
		return 0, err
	}
	return withCtx(ctx, func() (uint64, error) {
		me, err := d.enqueue(c, key)
		if err != nil {
			return 0, err
		}
		ch, _, err := c.Children("/l/" + key)
		if err != nil {
			return 0, err
		}
		mine := zkSeq(me)
		for _, x := range ch {
			if zkSeq(x) < mine {
				_ = c.Delete(me, -1)
				return 0, ErrHeld
			}
		}
		d.mu.Lock()
		d.held[key] = me
		d.mu.Unlock()
		return mine, nil
	})
}

func (d *zkDriver) AcquireWait(ctx context.Context, key string, ttl time.Duration) (uint64, error) {
	c, err := d.c(ctx)
	if err != nil {
		return 0, err
	}
	return withCtx(ctx, func() (uint64, error) {
		me, err := d.enqueue(c, key)
		if err != nil {
			return 0, err
		}
		mine := zkSeq(me)
		for {
			ch, _, err := c.Children("/l/" + key)
			if err != nil {
				return 0, err
			}
			sort.Slice(ch, func(a, b int) bool { return zkSeq(ch[a]) < zkSeq(ch[b]) })
			prev := ""
			for _, x := range ch {
				if zkSeq(x) >= mine {
					break
				}
				prev = x
			}
			if prev == "" {
				d.mu.Lock()
				d.held[key] = me
				d.mu.Unlock()
				return mine, nil
			}
			ok, _, ev, err := c.ExistsW("/l/" + key + "/" + prev)
			if err != nil {
				return 0, err
			}
			if !ok {
				continue
			}
			select {
			case <-ev:
			case <-ctx.Done():
				_ = c.Delete(me, -1)
				return 0, ctx.Err()
			}
		}
	})
}

func (d *zkDriver) Release(ctx context.Context, key string, token uint64) error {
	d.mu.Lock()
	me, c := d.held[key], d.conn
	delete(d.held, key)
	d.mu.Unlock()
	if me == "" {
		return ErrLost
	}
	_, err := withCtx(ctx, func() (int, error) { return 0, c.Delete(me, -1) })
	return err
}

func (d *zkDriver) Notifications() uint64 { return d.notif.Load() }

func (d *zkDriver) CountHeld(ctx context.Context, prefix string, n int) (int, error) {
	c, err := d.c(ctx)
	if err != nil {
		return 0, err
	}
	return withCtx(ctx, func() (int, error) {
		_, st, err := c.Exists("/flat")
		if err != nil {
			return 0, err
		}
		return int(st.NumChildren), nil
	})
}

func (d *zkDriver) Close() error {
	d.mu.Lock()
	c := d.conn
	d.mu.Unlock()
	if c != nil {
		c.Close()
	}
	return nil
}

type zkSession struct {
	d       *zkDriver
	c       *zk.Conn
	ttl     time.Duration
	started time.Time
	cut     cutter
	expired atomic.Bool
}

func (d *zkDriver) OpenSession(ctx context.Context, ttl time.Duration) (Session, error) {
	s := &zkSession{d: d, ttl: ttl, started: time.Now()}
	c, err := zkConnect(ctx, d.s, d.o, ttl, &s.cut, func(e zk.Event) {
		if e.State == zk.StateExpired {
			s.expired.Store(true)
		}
	})
	s.c = c
	return s, err
}

// Hold takes a plain ephemeral node (a name lock): the cheapest form of holding
// a key that ZooKeeper has. Token = the node's creation zxid.
func (s *zkSession) Hold(ctx context.Context, key string) (uint64, error) {
	return withCtx(ctx, func() (uint64, error) {
		p, err := s.c.Create("/flat/"+key, nil, zk.FlagEphemeral, zk.WorldACL(zk.PermAll))
		if errors.Is(err, zk.ErrNodeExists) {
			return 0, ErrHeld
		}
		if err != nil {
			return 0, err
		}
		_, st, err := s.c.Exists(p)
		if err != nil {
			return 0, err
		}
		return uint64(st.Czxid), nil
	})
}

func (s *zkSession) StartKeepAlive() error { s.started = time.Now(); return nil }

// The client pings every TTL/3 and shows no count.
func (s *zkSession) KeepAlives() uint64 { return uint64(3 * time.Since(s.started) / s.ttl) }
func (s *zkSession) Alive() bool        { return !s.expired.Load() && s.c.State() == zk.StateHasSession }
func (s *zkSession) AliveLenient() bool { return !s.expired.Load() }
func (s *zkSession) Abandon() {
	s.cut.cut()
	go s.c.Close()
}
func (s *zkSession) Close(ctx context.Context) error { s.c.Close(); return nil }
