package main

// A small wide-area network: one network namespace per region, each with a TUN
// device whose other end is this process. Packets between regions pass through
// queues that add a one-way delay and jitter (never reordering within a
// direction, as one path would not) and can be cut per direction. Real TCP runs
// over it, so hand-shakes, retransmission and window growth are all in.

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

type wanPacket struct {
	at time.Time
	b  []byte
}

type WAN struct {
	Names []string
	RTT   [][]time.Duration
	Jit   float64 // jitter as a share of the one-way delay, uniform in +-Jit
	tuns  []*os.File
	q     [][]chan wanPacket
	cut   [][]atomic.Bool
	Pkts  atomic.Uint64
	Drops atomic.Uint64
}

const wanNet = "10.213"

func (w *WAN) Host(r int) string { return fmt.Sprintf("%s.%d.1", wanNet, r+1) }
func (w *WAN) NS(r int) string   { return fmt.Sprintf("pbench-%s", w.Names[r]) }

func newWAN(names []string, rtt [][]time.Duration, jitter float64) (*WAN, error) {
	n := len(names)
	w := &WAN{Names: names, RTT: rtt, Jit: jitter}
	w.q = make([][]chan wanPacket, n)
	w.cut = make([][]atomic.Bool, n)
	for i := range names {
		w.cut[i] = make([]atomic.Bool, n)
		w.q[i] = make([]chan wanPacket, n)
	}
	for i := range names {
		ns := w.NS(i)
		_ = exec.Command("ip", "netns", "del", ns).Run()
		if out, err := exec.Command("ip", "netns", "add", ns).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("ip netns add: %w: %s", err, out)
		}
		var f *os.File
		err := inNS(ns, func() error {
			fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			var ifr [40]byte
			copy(ifr[:], "wan0")
			*(*uint16)(unsafe.Pointer(&ifr[16])) = unix.IFF_TUN | unix.IFF_NO_PI
			if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TUNSETIFF, uintptr(unsafe.Pointer(&ifr[0]))); e != 0 {
				return e
			}
			if err := unix.SetNonblock(fd, true); err != nil {
				return err
			}
			f = os.NewFile(uintptr(fd), "wan0")
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("tun in %s: %w", ns, err)
		}
		w.tuns = append(w.tuns, f)
		for _, c := range [][]string{
			{"link", "set", "lo", "up"},
			{"addr", "add", w.Host(i) + "/24", "dev", "wan0"},
			{"link", "set", "wan0", "mtu", "1500", "up"},
			{"link", "set", "wan0", "txqueuelen", "10000"},
			{"route", "add", wanNet + ".0.0/16", "dev", "wan0"},
		} {
			if out, err := exec.Command("ip", append([]string{"-n", ns}, c...)...).CombinedOutput(); err != nil {
				return nil, fmt.Errorf("ip %v: %w: %s", c, err, out)
			}
		}
	}
	for i := range names {
		for j := range names {
			if i != j {
				w.q[i][j] = make(chan wanPacket, 1<<16)
				go w.deliver(i, j)
			}
		}
		go w.read(i)
	}
	return w, nil
}

func (w *WAN) read(i int) {
	last := make([]time.Time, len(w.Names))
	buf := make([]byte, 65536)
	for {
		n, err := w.tuns[i].Read(buf)
		if err != nil {
			return
		}
		if n < 20 || buf[0]>>4 != 4 || buf[16] != 10 || buf[17] != 213 {
			continue
		}
		j := int(buf[18]) - 1
		if j < 0 || j >= len(w.Names) || j == i {
			continue
		}
		w.Pkts.Add(1)
		if w.cut[i][j].Load() {
			w.Drops.Add(1)
			continue
		}
		one := float64(w.RTT[i][j]) / 2
		at := time.Now().Add(time.Duration(one * (1 + w.Jit*(2*rand.Float64()-1))))
		if at.Before(last[j]) {
			at = last[j]
		}
		last[j] = at
		select {
		case w.q[i][j] <- wanPacket{at, append([]byte(nil), buf[:n]...)}:
		default:
			w.Drops.Add(1)
		}
	}
}

func (w *WAN) deliver(i, j int) {
	for p := range w.q[i][j] {
		if d := time.Until(p.at); d > 0 {
			time.Sleep(d)
		}
		if w.cut[i][j].Load() { // in flight when the link was cut
			w.Drops.Add(1)
			continue
		}
		if _, err := w.tuns[j].Write(p.b); err != nil {
			w.Drops.Add(1)
		}
	}
}

// Cut drops everything from i to j (one way).
func (w *WAN) Cut(i, j int, on bool) { w.cut[i][j].Store(on) }

// CutOff cuts region i from all others: out, in, or both ways.
func (w *WAN) CutOff(i int, out, in, on bool) {
	for j := range w.Names {
		if j == i {
			continue
		}
		if out {
			w.Cut(i, j, on)
		}
		if in {
			w.Cut(j, i, on)
		}
	}
}

func (w *WAN) Close() {
	for i := range w.tuns {
		_ = w.tuns[i].Close()
		_ = exec.Command("ip", "netns", "del", w.NS(i)).Run()
	}
}

// wanEcho measures n TCP round trips between two regions.
func wanEcho(w *WAN, a, b, n int) ([]int64, error) {
	var l net.Listener
	err := inNS(w.NS(b), func() (e error) { l, e = net.Listen("tcp", w.Host(b)+":7007"); return })
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
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := nsDialer(w.NS(a))(ctx, "tcp", w.Host(b)+":7007")
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	var lat []int64
	buf := make([]byte, 64)
	for i := 0; i < n; i++ {
		t := time.Now()
		if _, err := c.Write(buf); err != nil {
			return lat, err
		}
		if _, err := io.ReadFull(c, buf); err != nil {
			return lat, err
		}
		lat = append(lat, int64(time.Since(t)))
	}
	return lat, nil
}
