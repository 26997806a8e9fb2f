package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func init() {
	workloads = append(workloads, &workload{name: "W0", title: "physical floors: disk flush and loopback round trips", rounds: 3, run: runW0,
		cols: []col{{"p50", "p50 us", 1e3, "%.0f", ""}, {"p99", "p99 us", 1e3, "%.0f", ""}, {"p999", "p99.9 us", 1e3, "%.0f", ""},
			{"ops", "ops/s", 1, "%.0f", ""}, {"fl", "device flushes/op", 1, "%.2f", ""}}})
}

func runW0(ctx context.Context, r *Runner, ds []*Spec, rounds int) {
	dir := filepath.Join(*flagData, "w0")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		r.add("W0", "disk", "", 1, nil, "", err)
		return
	}
	defer func() { _ = os.RemoveAll(dir) }()
	for round := 1; round <= rounds && ctx.Err() == nil; round++ {
		for _, c := range []struct {
			name string
			kind string
			size int
			par  int
		}{
			{"append 512B + fdatasync", "append", 512, 1},
			{"fallocate 512B + fdatasync", "falloc", 512, 1},
			{"pre-zeroed 512B + fdatasync", "zero", 512, 1},
			{"pre-zeroed 4KiB O_DIRECT|O_DSYNC", "dsync", 4096, 1},
			{"pre-zeroed 64KiB + fdatasync", "zero", 65536, 1},
			{"pre-zeroed 512B, 3 writers", "zero", 512, 3},
			{"append 512B, 3 writers", "append", 512, 3},
		} {
			f0, t0 := diskFlushes(), time.Now()
			lat, err := diskFloor(dir, c.kind, c.size, c.par, 1500*time.Millisecond)
			m := latMetrics(lat, time.Since(t0).Seconds())
			if len(lat) > 0 {
				m["ops"] = float64(len(lat)) / 1.5
				m["fl"] = float64(diskFlushes()-f0) / float64(len(lat))
			}
			r.add("W0", "disk", c.name, round, m, "", err)
		}
		lat, err := tcpFloor(1500 * time.Millisecond)
		r.add("W0", "net", "TCP 64B ping-pong", round, latMetrics(lat, 1.5), "", err)
		lat, err = grpcFloor(1500 * time.Millisecond)
		r.add("W0", "net", "gRPC unary, 1 client", round, latMetrics(lat, 1.5), "in-process server", err)
	}
}

func latMetrics(lat []int64, secs float64) map[string]float64 {
	sorted64(lat)
	return map[string]float64{"p50": percentile(lat, 50), "p99": percentile(lat, 99), "p999": percentile(lat, 99.9), "ops": float64(len(lat)) / secs}
}

// diskFloor times write+flush on par files at once.
func diskFloor(dir, kind string, size, par int, dur time.Duration) ([]int64, error) {
	const fileSize = 32 << 20
	var mu sync.Mutex
	var all []int64
	var first error
	var files []*os.File
	for i := 0; i < par; i++ {
		path := filepath.Join(dir, fmt.Sprintf("f%d", i))
		_ = os.Remove(path)
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
		if err != nil {
			return nil, err
		}
		switch kind {
		case "falloc":
			if err := syscall.Fallocate(int(f.Fd()), 0, 0, fileSize); err != nil {
				return nil, err
			}
		case "zero", "dsync":
			z := make([]byte, 1<<20)
			for o := 0; o < fileSize; o += len(z) {
				if _, err := f.Write(z); err != nil {
					return nil, err
				}
			}
			if err := f.Sync(); err != nil {
				return nil, err
			}
		}
		if kind == "dsync" {
			_ = f.Close()
			if f, err = os.OpenFile(path, os.O_RDWR|unix.O_DIRECT|unix.O_DSYNC, 0o644); err != nil {
				return nil, err
			}
		}
		files = append(files, f)
	}
	var wg sync.WaitGroup
	end := time.Now().Add(dur)
	for _, f := range files {
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer func() { _ = f.Close() }()
			mem, _ := unix.Mmap(-1, 0, max(size, 4096), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
			defer func() { _ = unix.Munmap(mem) }()
			b := mem[:size]
			for i := range b {
				b[i] = byte(i)
			}
			var lat []int64
			var off int64
			for time.Now().Before(end) {
				t := time.Now()
				_, err := f.WriteAt(b, off)
				if err == nil && kind != "dsync" {
					err = syscall.Fdatasync(int(f.Fd()))
				}
				lat = append(lat, int64(time.Since(t)))
				off += int64(size)
				if kind != "append" && off+int64(size) > fileSize {
					off = 0
				}
				if err != nil {
					mu.Lock()
					first = err
					mu.Unlock()
					return
				}
			}
			mu.Lock()
			all = append(all, lat...)
			mu.Unlock()
		}()
	}
	wg.Wait()
	return all, first
}

func tcpFloor(dur time.Duration) ([]int64, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer func() { _ = l.Close() }()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_, _ = io.Copy(c, c)
		_ = c.Close()
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	var lat []int64
	b := make([]byte, 64)
	for end := time.Now().Add(dur); time.Now().Before(end); {
		t := time.Now()
		if _, err := c.Write(b); err != nil {
			return lat, err
		}
		if _, err := io.ReadFull(c, b); err != nil {
			return lat, err
		}
		lat = append(lat, int64(time.Since(t)))
	}
	return lat, nil
}

func grpcFloor(dur time.Duration) ([]int64, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	g := grpc.NewServer(grpc.ForceServerCodec(rawCodec{}))
	g.RegisterService(&grpc.ServiceDesc{ServiceName: "floor.P", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{{MethodName: "Ping",
		Handler: func(_ any, ctx context.Context, dec func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			var in rawMsg
			err := dec(&in)
			return &in, err
		}}}}, struct{}{})
	go func() { _ = g.Serve(l) }()
	defer g.Stop()
	cc, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodec(rawCodec{})))
	if err != nil {
		return nil, err
	}
	defer func() { _ = cc.Close() }()
	var lat []int64
	for end := time.Now().Add(dur); time.Now().Before(end); {
		t := time.Now()
		var out rawMsg
		if err := cc.Invoke(context.Background(), "/floor.P/Ping", &rawMsg{make([]byte, 64)}, &out); err != nil {
			return lat, err
		}
		lat = append(lat, int64(time.Since(t)))
	}
	return lat, nil
}
