package run

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// process is a voter's process on loopback: it answers, refuses, or is silent.
type process struct {
	pb.UnimplementedVoteServiceServer
	peer link.Peer

	mu     sync.Mutex
	silent bool
	refuse bool
	conns  int
	asked  chan struct{} // poked at each question
}

func (p *process) Prepare(ctx context.Context, _ *pb.PrepareRequest) (*pb.PrepareResponse, error) {
	p.mu.Lock()
	silent, refuse := p.silent, p.refuse
	p.mu.Unlock()
	select {
	case p.asked <- struct{}{}:
	default:
	}
	switch {
	case silent:
		<-ctx.Done()
		return nil, ctx.Err()
	case refuse:
		return nil, status.Error(codes.Unavailable, "not the leader")
	}
	return &pb.PrepareResponse{State: &pb.VoterState{Voter: &pb.Voter{Id: p.peer.Name}}}, nil
}

func (p *process) set(silent, refuse bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.silent, p.refuse = silent, refuse
}

func (p *process) taken() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.conns
}

// counting counts the connections that a process has taken.
type counting struct {
	net.Listener
	p *process
}

func (l counting) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.p.mu.Lock()
		l.p.conns++
		l.p.mu.Unlock()
	}
	return c, err
}

func links(t *testing.T, id pki.Identity) *link.Links {
	t.Helper()
	id.Cluster = "test"
	l, err := link.New(link.Config{Identity: id, Insecure: true, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func serve(t *testing.T, name string) *process {
	t.Helper()
	p := &process{asked: make(chan struct{}, 1), peer: link.Peer{Name: name, Region: "us", Role: pki.RoleRegion}}
	l := links(t, pki.Identity{Role: pki.RoleRegion, Region: "us", Name: name})
	ln, err := l.Listen(link.PlaneVotes, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p.peer.Address = ln.Addr().String()
	g := grpc.NewServer(l.ServerOptions(link.PlaneVotes)...)
	pb.RegisterVoteServiceServer(g, p)
	done := make(chan error, 1)
	go func() { done <- g.Serve(counting{ln, p}) }()
	t.Cleanup(func() {
		g.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return p
}

// TestF50SilenceBringsAFreshConnection: a silent connection is given up, since
// a blackhole may never break it, and the voter's next process is asked; a
// refusal moves on and keeps the connection.
func TestF50SilenceBringsAFreshConnection(t *testing.T) {
	a, b := serve(t, "us-1"), serve(t, "us-2")
	v := NewVoters(links(t, pki.Identity{Role: pki.RoleRegion, Region: "eu", Name: "eu-1"}), map[string][]link.Peer{"region/us": {a.peer, b.peer}})
	ask := func(patience time.Duration) (string, codes.Code) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		res, err := v.Voter("region/us").Prepare(ctx, &pb.PrepareRequest{})
		return res.GetState().GetVoter().GetId(), status.Code(err)
	}
	const long, short = 10 * time.Second, 300 * time.Millisecond
	step := func(what, wantName string, wantCode codes.Code, patience time.Duration) {
		t.Helper()
		if name, code := ask(patience); name != wantName || code != wantCode {
			t.Errorf("%s: %q %v, want %q %v", what, name, code, wantName, wantCode)
		}
	}
	step("at first", "us-1", codes.OK, long)
	step("again", "us-1", codes.OK, long)
	a.set(false, true)
	step("refused", "", codes.Unavailable, long)
	step("after a refusal", "us-2", codes.OK, long)
	b.set(true, false)
	step("silent", "", codes.DeadlineExceeded, short)
	a.set(false, false)
	step("after the silence", "us-1", codes.OK, long)
	b.set(false, false)
	a.set(true, false)
	step("silent too", "", codes.DeadlineExceeded, short)
	step("the other again", "us-2", codes.OK, long)
	if n := a.taken(); n != 1 {
		t.Errorf("%d connections to the process that refused once", n)
	}
	if n := b.taken(); n != 2 {
		t.Errorf("%d connections to the process that was silent once; want a fresh one", n)
	}
	v.Heard("us-1") // resets back-offs, also of a process that has no connection
	v.Heard("us-2")
	if err := v.Close(); err != nil {
		t.Error(err)
	}
	if _, err := v.Voter("region/us").Prepare(t.Context(), &pb.PrepareRequest{}); !errors.Is(err, errClosed) {
		t.Errorf("after Close: %v", err)
	}
	if v.Voter("region/mars") != nil {
		t.Error("a voter that is not configured")
	}
}

// TestACallerThatGaveUpBreaksNobodysConnection: the end of a term cancels its
// questions; the next term's go on over the same connection.
func TestACallerThatGaveUpBreaksNobodysConnection(t *testing.T) {
	a := serve(t, "us-1")
	v := NewVoters(links(t, pki.Identity{Role: pki.RoleRegion, Region: "eu", Name: "eu-1"}), map[string][]link.Peer{"region/us": {a.peer}})
	defer func() { _ = v.Close() }()
	a.set(true, false)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := v.Voter("region/us").Prepare(ctx, &pb.PrepareRequest{})
		done <- err
	}()
	<-a.asked
	cancel()
	if err := <-done; status.Code(err) != codes.Canceled {
		t.Error(err)
	}
	a.set(false, false)
	if _, err := v.Voter("region/us").Prepare(t.Context(), &pb.PrepareRequest{}); err != nil {
		t.Error(err)
	}
	if n := a.taken(); n != 1 {
		t.Errorf("%d connections", n)
	}
}

// TestTheProcessesOfAVoterChange: a process that stays keeps its connection,
// one that is gone is asked no more, a new one is, and so is a new voter.
func TestTheProcessesOfAVoterChange(t *testing.T) {
	a, b, c := serve(t, "us-1"), serve(t, "us-2"), serve(t, "us-3")
	const id = "region/us"
	v := NewVoters(links(t, pki.Identity{Role: pki.RoleRegion, Region: "eu", Name: "eu-1"}), map[string][]link.Peer{id: {a.peer, b.peer}})
	ask := func(id string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		r := v.Voter(id)
		if r == nil {
			return "no voter"
		}
		res, err := r.Prepare(ctx, &pb.PrepareRequest{})
		if err != nil {
			return status.Code(err).String()
		}
		return res.GetState().GetVoter().GetId()
	}
	if got := ask(id); got != "us-1" {
		t.Fatal(got)
	}
	v.SetProcesses(map[string][]link.Peer{id: {c.peer, b.peer, a.peer}, "region/asia": {b.peer}})
	if got := ask(id); got != "us-1" || a.taken() != 1 {
		t.Errorf("the process that stays: asked %s, %d connections taken", got, a.taken())
	}
	if got := ask("region/asia"); got != "us-2" {
		t.Errorf("the new voter: asked %s", got)
	}
	v.SetProcesses(map[string][]link.Peer{id: {c.peer, b.peer}})
	if got := ask(id); got != "us-3" {
		t.Errorf("after its process left: asked %s", got)
	}
	if got := ask("region/asia"); got != "no voter" {
		t.Errorf("a voter that is gone: %s", got)
	}
	if err := v.Close(); err != nil {
		t.Error(err)
	}
	v.SetProcesses(map[string][]link.Peer{"region/late": {a.peer}})
	if got := ask("region/late"); got != "no voter" {
		t.Errorf("after Close: %s", got)
	}
}

// TestF50ADoubtedConnectionThatAnswersIsUsedAgain: one that was silent for a while
// was far away, not dead; the fresh one beside it is given up.
func TestF50ADoubtedConnectionThatAnswersIsUsedAgain(t *testing.T) {
	a := serve(t, "us-1")
	v := NewVoters(links(t, pki.Identity{Role: pki.RoleRegion, Region: "eu", Name: "eu-1"}), map[string][]link.Peer{"region/us": {a.peer}})
	defer func() { _ = v.Close() }()
	ask := func() error {
		_, err := v.Voter("region/us").Prepare(t.Context(), &pb.PrepareRequest{})
		return err
	}
	if err := ask(); err != nil {
		t.Fatal(err)
	}
	r := v.voter("region/us")
	c, _, err := r.begin()
	if err != nil || r.patience(c) < minPatience {
		t.Fatal(err)
	}
	r.failed(c, true) // its patience is over
	present, last, err := r.begin()
	if err != nil || present == c || last != c {
		t.Fatalf("asks %v and %v, %v; want a fresh connection, and beside it the one that answered", present, last, err)
	}
	r.end(c, 3*time.Second, nil)
	r.end(present, 0, status.Error(codes.Canceled, ""))
	if r.conns[0] != c || len(r.doubted) != 0 || present.GetState() != connectivity.Shutdown {
		t.Errorf("uses %v, doubts %v; want the first connection, and the other closed", r.conns[0], r.doubted)
	}
	if d := r.patience(c); d != 6*time.Second {
		t.Errorf("patience of %v with one that took 3 s", d)
	}
	r.end(c, time.Millisecond, nil)
	// When a fresh one answers, the silent one is closed.
	if c, _, err = r.begin(); err != nil {
		t.Fatal(err)
	}
	r.failed(c, true)
	if present, last, err = r.begin(); err != nil || last != c {
		t.Fatal(last, err)
	}
	r.end(present, time.Millisecond, nil)
	r.end(last, 0, status.Error(codes.Canceled, ""))
	r.end(c, 0, status.Error(codes.DeadlineExceeded, ""))
	if c.GetState() != connectivity.Shutdown || len(r.doubted) != 0 {
		t.Errorf("a doubted connection without calls is %v", c.GetState())
	}
}
