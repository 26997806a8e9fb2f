package main

// The floor: the least that a replicated, durable lease service written in Go
// with a gRPC API can do on this machine. One fixed leader groups requests into
// batches; a batch is written and fdatasync'ed by the leader and two followers
// in parallel and is acknowledged by two of the three; then an in-memory map is
// updated and the callers are answered. There is no election, no log reading,
// no snapshot and no expiry, so no product can be faster by design than this is
// by omission; its numbers are the measured "one loopback RTT + one parallel
// fdatasync", with gRPC's and the scheduler's costs in them.

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func init() {
	registerSystem("floor", func() System { return &floorSystem{} })
	register(&Spec{Name: "floor", System: "floor", Workloads: "W1 W2 W3", Share: 100, LeaderPin: true,
		Note: "NOT a product: gRPC + group commit on 3 processes + a map; the practical lower bound",
		Open: func(ctx context.Context, s System, o Opts) (Driver, error) {
			cc, err := grpc.NewClient(s.(*floorSystem).addr(0), grpc.WithTransportCredentials(insecure.NewCredentials()),
				grpc.WithDefaultCallOptions(grpc.ForceCodec(rawCodec{})))
			if err != nil {
				return nil, err
			}
			return &floorDriver{cc: cc}, nil
		}})
	register(&Spec{Name: "floor-stream", System: "floor", Workloads: "W1 W2 W3", Share: 100, LeaderPin: true,
		Note: "as floor, the client's requests go over one long-lived gRPC stream instead of unary calls",
		Open: func(ctx context.Context, s System, o Opts) (Driver, error) {
			cc, err := grpc.NewClient(s.(*floorSystem).addr(0), grpc.WithTransportCredentials(insecure.NewCredentials()),
				grpc.WithDefaultCallOptions(grpc.ForceCodec(rawCodec{})))
			if err != nil {
				return nil, err
			}
			sctx, cancel := context.WithCancel(context.Background())
			st, err := cc.NewStream(sctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/floor.F/Stream")
			if err != nil {
				cancel()
				_ = cc.Close()
				return nil, err
			}
			return &floorDriver{cc: cc, st: st, cancel: cancel}, nil
		}})
}

const floorWAL = 64 << 20

type floorSystem struct {
	env   *Env
	procs []*Proc
}

func (s *floorSystem) addr(i int) string { return fmt.Sprintf("127.0.0.1:%d", 17300+i) }
func (s *floorSystem) Start(ctx context.Context, env *Env) error {
	s.env = env
	root := filepath.Join(env.Root, "floor"+env.Tag)
	if err := os.RemoveAll(root); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	for i := 2; i >= 0; i-- {
		if err := portFree("", s.addr(i)); err != nil {
			return err
		}
		dir := filepath.Join(root, fmt.Sprintf("n%d", i))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		args := []string{self, "floor-node", "-listen", s.addr(i), "-wal", filepath.Join(dir, "wal")}
		if i == 0 {
			args = append(args, "-lead", s.addr(1)+" "+s.addr(2))
		}
		p, err := startProc(fmt.Sprintf("floor-n%d", i), filepath.Join(dir, "log"), "", args...)
		if err != nil {
			return err
		}
		s.procs = append([]*Proc{p}, s.procs...)
	}
	return poll(ctx, 100*time.Millisecond, 20*time.Second, s.Ready)
}
func (s *floorSystem) Stop() {
	for _, p := range s.procs {
		p.kill()
	}
	s.procs = nil
}
func (s *floorSystem) Procs() []*Proc                           { return s.procs }
func (s *floorSystem) Leader(context.Context) (int, error)      { return 0, nil }
func (s *floorSystem) Restart(ctx context.Context, i int) error { return ErrUnsupported }
func (s *floorSystem) Info() string {
	return "3 processes, group commit, pre-zeroed WAL with fdatasync, majority ack, gRPC API"
}
func (s *floorSystem) Ready(ctx context.Context) error {
	c, err := net.DialTimeout("tcp", s.addr(0), time.Second)
	if err == nil {
		_ = c.Close()
	}
	return err
}

// ---- client

type floorDriver struct {
	cc     *grpc.ClientConn
	notif  atomic.Uint64
	st     grpc.ClientStream // set: use the stream
	cancel context.CancelFunc
}

var floorOp = map[string]byte{"/floor.F/Acquire": 'a', "/floor.F/Wait": 'w', "/floor.F/Release": 'r'}

func (d *floorDriver) call(ctx context.Context, method, key string, token uint64) (uint64, error) {
	b := binary.LittleEndian.AppendUint64(nil, token)
	b = append(b, key...)
	var out rawMsg
	if d.st != nil { // one request at a time: a Driver is one client
		if err := d.st.SendMsg(&rawMsg{append([]byte{floorOp[method]}, b...)}); err != nil {
			return 0, err
		}
		stop := context.AfterFunc(ctx, d.cancel)
		err := d.st.RecvMsg(&out)
		stop()
		if err != nil {
			return 0, err
		}
	} else if err := d.cc.Invoke(ctx, method, &rawMsg{b}, &out); err != nil {
		return 0, err
	}
	if len(out.b) != 8 {
		return 0, errors.New("bad reply")
	}
	t := binary.LittleEndian.Uint64(out.b)
	if t == 0 {
		return 0, ErrHeld
	}
	return t, nil
}

func (d *floorDriver) Acquire(ctx context.Context, key string, ttl time.Duration) (uint64, error) {
	return d.call(ctx, "/floor.F/Acquire", key, 0)
}
func (d *floorDriver) AcquireWait(ctx context.Context, key string, ttl time.Duration) (uint64, error) {
	t, err := d.call(ctx, "/floor.F/Wait", key, 0)
	if err == nil {
		d.notif.Add(1)
	}
	return t, err
}
func (d *floorDriver) Release(ctx context.Context, key string, token uint64) error {
	_, err := d.call(ctx, "/floor.F/Release", key, token)
	return err
}
func (d *floorDriver) OpenSession(ctx context.Context, ttl time.Duration) (Session, error) {
	return nil, ErrUnsupported
}
func (d *floorDriver) Notifications() uint64 { return d.notif.Load() }
func (d *floorDriver) Close() error {
	if d.cancel != nil {
		d.cancel()
	}
	return d.cc.Close()
}

// ---- server

type floorReq struct {
	op    byte
	key   string
	token uint64
	done  chan uint64
}

type floorWal struct {
	f   *os.File
	off int64
}

func openFloorWal(path string) (*floorWal, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o644)
	if err != nil {
		return nil, err
	}
	z := make([]byte, 1<<20)
	for i := 0; i < floorWAL; i += len(z) {
		if _, err := f.Write(z); err != nil {
			return nil, err
		}
	}
	return &floorWal{f: f}, f.Sync()
}

func (w *floorWal) append(b []byte) error {
	if w.off+int64(len(b)) > floorWAL {
		w.off = 0
	}
	if _, err := w.f.WriteAt(b, w.off); err != nil {
		return err
	}
	w.off += int64(len(b))
	return syscall.Fdatasync(int(w.f.Fd()))
}

type floorKey struct {
	token   uint64
	waiters []*floorReq
}

type floorNode struct {
	mu    sync.Mutex
	queue []*floorReq
	kick  chan struct{}
	keys  map[string]*floorKey
	token uint64

	wal       *floorWal
	followers []net.Conn
	ackMu     sync.Mutex
	ackCond   *sync.Cond
	acked     []uint64 // highest sequence number acknowledged, per follower
}

func floorMain(args []string) {
	fs := flag.NewFlagSet("floor-node", flag.ExitOnError)
	listen := fs.String("listen", "", "")
	wal := fs.String("wal", "", "")
	lead := fs.String("lead", "", "follower addresses; empty: be a follower")
	_ = fs.Parse(args) // it exits by itself
	w, err := openFloorWal(*wal)
	if err != nil {
		panic(err)
	}
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		panic(err)
	}
	if *lead == "" {
		for {
			c, err := l.Accept()
			if err != nil {
				panic(err)
			}
			go floorFollow(c, w)
		}
	}
	n := &floorNode{kick: make(chan struct{}, 1), keys: map[string]*floorKey{}, wal: w}
	n.ackCond = sync.NewCond(&n.ackMu)
	var a, b string
	if _, err := fmt.Sscan(*lead, &a, &b); err != nil {
		panic(err)
	}
	for i, addr := range []string{a, b} {
		var c net.Conn
		for try := 0; ; try++ {
			if c, err = net.Dial("tcp", addr); err == nil {
				break
			}
			if try > 100 {
				panic(err)
			}
			time.Sleep(50 * time.Millisecond)
		}
		n.followers = append(n.followers, c)
		n.acked = append(n.acked, 0)
		go n.readAcks(i, c)
	}
	go n.commitLoop()
	h := func(op byte) grpc.MethodHandler {
		return func(_ any, ctx context.Context, dec func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			var in rawMsg
			if err := dec(&in); err != nil {
				return nil, err
			}
			if len(in.b) < 8 {
				return nil, errors.New("short request")
			}
			r := &floorReq{op: op, token: binary.LittleEndian.Uint64(in.b), key: string(in.b[8:]), done: make(chan uint64, 1)}
			n.submit(r)
			select {
			case t := <-r.done:
				return &rawMsg{binary.LittleEndian.AppendUint64(nil, t)}, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
	g := grpc.NewServer(grpc.ForceServerCodec(rawCodec{}))
	g.RegisterService(&grpc.ServiceDesc{ServiceName: "floor.F", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{
		{MethodName: "Acquire", Handler: h('a')}, {MethodName: "Wait", Handler: h('w')}, {MethodName: "Release", Handler: h('r')},
	}, Streams: []grpc.StreamDesc{{StreamName: "Stream", ClientStreams: true, ServerStreams: true, Handler: func(_ any, st grpc.ServerStream) error {
		for {
			var in rawMsg
			if err := st.RecvMsg(&in); err != nil {
				return err
			}
			if len(in.b) < 9 {
				return errors.New("short request")
			}
			r := &floorReq{op: in.b[0], token: binary.LittleEndian.Uint64(in.b[1:]), key: string(in.b[9:]), done: make(chan uint64, 1)}
			n.submit(r)
			select {
			case t := <-r.done:
				if err := st.SendMsg(&rawMsg{binary.LittleEndian.AppendUint64(nil, t)}); err != nil {
					return err
				}
			case <-st.Context().Done():
				return st.Context().Err()
			}
		}
	}}}}, struct{}{})
	panic(g.Serve(l))
}

func floorFollow(c net.Conn, w *floorWal) {
	defer func() { _ = c.Close() }()
	var h [12]byte
	for {
		if _, err := io.ReadFull(c, h[:]); err != nil {
			return
		}
		b := make([]byte, binary.LittleEndian.Uint32(h[8:]))
		if _, err := io.ReadFull(c, b); err != nil {
			return
		}
		if err := w.append(b); err != nil {
			return
		}
		if _, err := c.Write(h[:8]); err != nil {
			return
		}
	}
}

func (n *floorNode) submit(r *floorReq) {
	n.mu.Lock()
	n.queue = append(n.queue, r)
	n.mu.Unlock()
	select {
	case n.kick <- struct{}{}:
	default:
	}
}

func (n *floorNode) readAcks(i int, c net.Conn) {
	var b [8]byte
	for {
		if _, err := io.ReadFull(c, b[:]); err != nil {
			return
		}
		n.ackMu.Lock()
		n.acked[i] = binary.LittleEndian.Uint64(b[:])
		n.ackMu.Unlock()
		n.ackCond.Broadcast()
	}
}

func (n *floorNode) commitLoop() {
	var seq uint64
	var localSeq uint64
	local := make(chan []byte, 1)
	go func() {
		for b := range local {
			if err := n.wal.append(b); err != nil {
				panic(err)
			}
			n.ackMu.Lock()
			localSeq++
			n.ackMu.Unlock()
			n.ackCond.Broadcast()
		}
	}()
	for range n.kick {
		n.mu.Lock()
		batch := n.queue
		n.queue = nil
		n.mu.Unlock()
		if len(batch) == 0 {
			continue
		}
		seq++
		frame := make([]byte, 12, 12+len(batch)*48)
		for _, r := range batch {
			frame = append(frame, r.op, byte(len(r.key)))
			frame = binary.LittleEndian.AppendUint64(frame, r.token)
			frame = append(frame, r.key...)
		}
		binary.LittleEndian.PutUint64(frame, seq)
		binary.LittleEndian.PutUint32(frame[8:], uint32(len(frame)-12))
		for _, c := range n.followers {
			if _, err := c.Write(frame); err != nil {
				panic(err)
			}
		}
		local <- frame[12:]
		n.ackMu.Lock()
		for {
			have := 0
			if localSeq >= seq {
				have++
			}
			for _, a := range n.acked {
				if a >= seq {
					have++
				}
			}
			if have >= 2 {
				break
			}
			n.ackCond.Wait()
		}
		n.ackMu.Unlock()
		for _, r := range batch {
			n.apply(r)
		}
	}
}

func (n *floorNode) apply(r *floorReq) {
	k := n.keys[r.key]
	if k == nil {
		k = &floorKey{}
		n.keys[r.key] = k
	}
	switch r.op {
	case 'a', 'w':
		if k.token == 0 {
			n.token++
			k.token = n.token
			r.done <- k.token
		} else if r.op == 'a' {
			r.done <- 0
		} else {
			k.waiters = append(k.waiters, r)
		}
	case 'r':
		if k.token != r.token {
			r.done <- 0
			return
		}
		k.token = 0
		if len(k.waiters) > 0 {
			w := k.waiters[0]
			k.waiters = k.waiters[1:]
			n.token++
			k.token = n.token
			w.done <- k.token
		} else {
			delete(n.keys, r.key)
		}
		r.done <- 1
	}
}
