package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	"github.com/headlease/headlease/internal/fault"
)

// rpcTimeout bounds a dial and an exchange of the transports under test.
const rpcTimeout = 500 * time.Millisecond

// raftEnd is a Raft transport of one server; at maps names to addresses.
func raftEnd(t *testing.T, l *Links, at map[string]string) *raft.NetworkTransport {
	t.Helper()
	name := l.Identity().Name
	layer, err := NewRaftLayer(l, RaftConfig[raft.ServerAddress]{
		Listen:    "127.0.0.1:0",
		Advertise: name,
		Resolve: func(a raft.ServerAddress) (Peer, error) {
			addr, ok := at[string(a)]
			if !ok {
				return Peer{}, fmt.Errorf("no server named %q", a)
			}
			return Peer{Name: string(a), Region: "eu", Role: "region", Address: addr}, nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	at[name] = layer.ListenAddr().String()
	tr := raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{Stream: layer, MaxPool: 3, Timeout: rpcTimeout, Logger: hclog.NewNullLogger()})
	t.Cleanup(func() {
		tr.CloseStreams()
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	})
	return tr
}

// answer serves votes and snapshots until the test ends.
func answer(t *testing.T, tr *raft.NetworkTransport) <-chan []byte {
	t.Helper()
	stop, done := make(chan struct{}), make(chan struct{})
	snapshots := make(chan []byte, 1)
	go func() {
		defer close(done)
		for {
			select {
			case rpc := <-tr.Consumer():
				switch rpc.Command.(type) {
				case *raft.RequestVoteRequest:
					rpc.Respond(&raft.RequestVoteResponse{Term: 7, Granted: true}, nil)
				case *raft.InstallSnapshotRequest:
					data, err := io.ReadAll(rpc.Reader)
					snapshots <- data
					rpc.Respond(&raft.InstallSnapshotResponse{Term: 7, Success: true}, err)
				default:
					rpc.Respond(nil, errors.New("unexpected"))
				}
			case <-stop:
				return
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-done
	})
	return snapshots
}

func TestRaftTransportOverTheLayer(t *testing.T) {
	eachMode(t, func(t *testing.T, dir string) {
		at := map[string]string{}
		one := raftEnd(t, links(t, dir, eu1, nil), at)
		two := raftEnd(t, links(t, dir, eu2, nil), at)
		snapshots := answer(t, two)
		if got := one.LocalAddr(); got != "eu-1" {
			t.Errorf("advertises %q, not its name", got)
		}
		var resp raft.RequestVoteResponse
		if err := one.RequestVote("eu-2/uuid", "eu-2", &raft.RequestVoteRequest{Term: 7}, &resp); err != nil || !resp.Granted {
			t.Fatal(err, resp)
		}
		want := bytes.Repeat([]byte("snapshot "), 100_000)
		var installed raft.InstallSnapshotResponse
		req := &raft.InstallSnapshotRequest{Term: 7, Size: int64(len(want))}
		if err := one.InstallSnapshot("eu-2/uuid", "eu-2", req, &installed, bytes.NewReader(want)); err != nil || !installed.Success {
			t.Fatal(err, installed)
		}
		if !bytes.Equal(<-snapshots, want) {
			t.Error("the snapshot arrived altered")
		}
		if err := one.RequestVote("x", "eu-9", &raft.RequestVoteRequest{}, &resp); err == nil || !strings.Contains(err.Error(), `no server named "eu-9"`) {
			t.Error(err)
		}
	})
}

func TestRaftFollowsAServerThatMoves(t *testing.T) {
	dir := set(t, "c")
	at := map[string]string{}
	one := raftEnd(t, links(t, dir, eu1, nil), at)
	first := links(t, dir, eu2, nil)
	tr := raftEnd(t, first, at)
	answer(t, tr)
	var resp raft.RequestVoteResponse
	if err := one.RequestVote("x", "eu-2", &raft.RequestVoteRequest{}, &resp); err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	answer(t, raftEnd(t, links(t, dir, eu2, nil), at)) // another port, the same name
	// The pooled connection fails once; then the name is resolved afresh.
	if err := one.RequestVote("x", "eu-2", &raft.RequestVoteRequest{}, &resp); err == nil {
		t.Error("answered by a closed server")
	}
	if err := one.RequestVote("x", "eu-2", &raft.RequestVoteRequest{}, &resp); err != nil {
		t.Error(err)
	}
}

func TestFaultsOfTheAcceptingSideByName(t *testing.T) {
	eachMode(t, func(t *testing.T, dir string) {
		at := map[string]string{}
		tbl := table(t)
		one := raftEnd(t, links(t, dir, eu1, nil), at)
		answer(t, raftEnd(t, links(t, dir, eu2, tbl), at)) // eu-2 holds back what it sends to eu-1
		var resp raft.RequestVoteResponse
		if err := one.RequestVote("x", "eu-2", &raft.RequestVoteRequest{}, &resp); err != nil {
			t.Fatal(err)
		}
		rule(t, tbl, fault.LinkRule{Peer: "eu-1", Plane: PlaneRaft, Link: fault.Link{Drop: true}})
		// On the connection that stands, the answer is held; on a new one,
		// nothing is served.
		for range 2 {
			start := time.Now()
			if err := one.RequestVote("x", "eu-2", &raft.RequestVoteRequest{}, &resp); err == nil || time.Since(start) < rpcTimeout/2 {
				t.Errorf("answered through the drop: %v after %v", err, time.Since(start))
			}
		}
		tbl.Clear()
		if err := one.RequestVote("x", "eu-2", &raft.RequestVoteRequest{}, &resp); err != nil {
			t.Error(err)
		}
	})
}

func TestResetReachesTheOtherEnd(t *testing.T) {
	dir := set(t, "c")
	tbl := table(t)
	l := links(t, dir, eu2, tbl)
	ln, err := links(t, dir, eu1, nil).listenSecured(PlaneRaft, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	c, err := l.dialRaw(short5(t), PlaneRaft, peerOf(eu1, ln.Addr().String()))
	if err != nil {
		t.Fatal(err)
	}
	near, _, err := l.clientHandshake(short5(t), PlaneRaft, peerOf(eu1, ""), c)
	if err != nil {
		t.Fatal(err)
	}
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c.reset(syscall.ECONNRESET)
	if err := far.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := far.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the other end sees %v", err)
	}
	if _, err := near.Write([]byte("x")); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("this end sees %v", err)
	}
}

func TestGRPCUnderADropFailsAtItsDeadline(t *testing.T) {
	dir := set(t, "c")
	tbl := table(t)
	addr, c := serve(t, links(t, dir, eu1, nil), PlaneVotes)
	l := links(t, dir, us1, tbl)
	rule(t, tbl, fault.LinkRule{Peer: "region/eu", Link: fault.Link{Drop: true}})
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if err := check(ctx, t, l, PlaneVotes, peerOf(eu1, addr)); err == nil || ctx.Err() == nil {
		t.Errorf("%v before the deadline", err)
	}
	if len(c.seen) != 0 {
		t.Error("the call was served")
	}
	tbl.Clear()
	if err := check(short5(t), t, l, PlaneVotes, peerOf(eu1, addr)); err != nil {
		t.Error(err)
	}
}

func TestRTTIsMeasuredOnVotes(t *testing.T) {
	dir := set(t, "c")
	tbl := table(t)
	server := links(t, dir, eu1, nil)
	l := links(t, dir, us1, tbl)
	if _, ok := l.RTT("eu-1"); ok {
		t.Error("measured before any call")
	}
	rule(t, tbl, fault.LinkRule{Peer: "eu-1", Link: fault.Link{Delay: 30 * time.Millisecond}})
	addr, _ := serve(t, server, PlaneVotes)
	if err := check(short5(t), t, l, PlaneVotes, peerOf(eu1, addr)); err != nil {
		t.Fatal(err)
	}
	if d, ok := l.RTT("eu-1"); !ok || d < 30*time.Millisecond {
		t.Errorf("RTT %v", d)
	}
}

func TestRTTIsSmoothed(t *testing.T) {
	l := links(t, "", eu1, nil)
	l.ObserveRTT("w1", 80*time.Millisecond)
	l.ObserveRTT("w1", 160*time.Millisecond)
	l.ObserveRTT("w1", -time.Second)
	l.ObserveRTT("", time.Second)
	if d, ok := l.RTT("w1"); !ok || d != 90*time.Millisecond {
		t.Errorf("%v", d)
	}
}

func TestLocalIsLocal(t *testing.T) {
	ctx := short5(t)
	for _, addr := range []string{"127.0.0.1:0", "unix:" + t.TempDir() + "/s"} {
		ln, err := ListenLocal(ctx, "metrics", addr)
		if err != nil {
			t.Fatal(err)
		}
		drain(t, ln)
		if ln.Addr().Network() == "tcp" {
			addr = ln.Addr().String()
		}
		c, err := DialLocal(ctx, addr)
		if err != nil {
			t.Fatal(err)
		}
		if err := got(c); err != nil {
			t.Error(err)
		}
	}
	if ln, err := ListenLocal(ctx, "metrics", "0.0.0.0:0"); err == nil {
		_ = ln.Close()
		t.Error("metrics listen beyond the machine")
	} else if !strings.HasPrefix(err.Error(), `metrics address "0.0.0.0:0": is not a loopback address`) {
		t.Error(err)
	}
}
