package e2e

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const diskRegion = "eu-frankfurt"

// follower is a server of the region that does not lead.
func (c *cluster) follower(leader string) string {
	c.t.Helper()
	for _, r := range c.File().Regions {
		for _, s := range r.Servers {
			if s.Name != leader {
				return s.Name
			}
		}
	}
	c.t.Fatal("no follower")
	return ""
}

// breakDisk sets a fault on a process's stores that outlasts the test.
func (c *cluster) breakDisk(name string, f *pb.DiskFault) {
	c.t.Helper()
	p, ok := c.File().Process(name)
	if !ok {
		c.t.Fatalf("no process %s", name)
	}
	f.Id, f.Store, f.ExpiresMs = "disk", "raft", time.Hour.Milliseconds()
	if err := c.admin.SetFaults(within(c.t, stepTimeout), p, &pb.SetFaultsRequest{DiskFaults: []*pb.DiskFault{f}}); err != nil {
		c.t.Fatal(err)
	}
}

// ended waits for a process to end by itself and checks that its log says why.
func (c *cluster) ended(name string, says ...string) {
	c.t.Helper()
	if err := c.Wait(within(c.t, stepTimeout), name); err != nil {
		c.t.Fatal(err)
	}
	c.logSays(name, says...)
}

func (c *cluster) logSays(name string, says ...string) {
	c.t.Helper()
	p, _ := c.Process(name)
	raw, err := os.ReadFile(p.Log)
	if err != nil {
		c.t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if strings.Contains(line, "msg=stopping") {
			c.t.Logf("%s: %.300s", name, strings.TrimSpace(line))
		}
	}
	for _, s := range says {
		if !strings.Contains(string(raw), s) {
			c.t.Errorf("the log of %s does not say %q", name, s)
		}
	}
}

// back starts a process again and waits until it has all that its region has.
func (c *cluster) back(name string) {
	c.t.Helper()
	if err := c.StartProcess(name); err != nil {
		c.t.Fatal(err)
	}
	p, _ := c.File().Process(name)
	ctx := within(c.t, stepTimeout)
	for {
		lead, err := c.admin.RegionStatus(ctx, diskRegion)
		if err == nil {
			d, err := c.admin.DescribeServer(ctx, p)
			if err == nil && d.GetAppliedIndex() >= lead.GetAppliedIndex() {
				return
			}
		}
		select {
		case <-ctx.Done():
			c.t.Fatalf("%s is not back: %v", name, context.Cause(ctx))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// stillGranted checks by the region's word that held leases are held.
func (c *cluster) stillGranted(holder *client.Client, leases []*client.Lease) {
	c.t.Helper()
	for _, l := range leases {
		info, err := holder.Get(within(c.t, stepTimeout), l.Resource())
		if err != nil {
			c.t.Fatal(err)
		}
		if info.GetToken() != uint64(l.Token()) {
			c.t.Errorf("%s: the region has token %d, the holder %v", l.Resource(), info.GetToken(), l.Token())
		}
	}
}

// sessions opens sessions at one server, many at a time and with large labels,
// and keeps what it was told.
type sessions struct {
	t    *testing.T
	conn *grpc.ClientConn
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu     sync.Mutex
	opened []*pb.OpenSessionResponse
	errs   []error
}

func (c *cluster) openSessions(t *testing.T, server string, parallel int) *sessions {
	t.Helper()
	id := pki.Identity{Cluster: c.File().Cluster, Role: pki.RoleClient, Name: devcluster.DefaultClient}
	creds, err := pki.Load(pki.LoadConfig{Dir: filepath.Join(c.Dir(), "certs"), Want: id})
	if err != nil {
		t.Fatal(err)
	}
	l, err := link.New(link.Config{Identity: id, Credentials: creds, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	p, _ := c.File().Process(server)
	conn, err := l.DialGRPC(link.PlaneAPI, link.Peer{Name: p.Name, Region: p.Region, Role: pki.RoleRegion, Address: p.API})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	ctx, cancel := context.WithCancel(t.Context())
	s := &sessions{t: t, conn: conn, stop: cancel}
	t.Cleanup(cancel)
	labels := map[string]string{}
	for i := range 30 {
		labels[fmt.Sprint("label-", i)] = strings.Repeat("x", 256)
	}
	for range parallel {
		s.wg.Go(func() { s.run(ctx, labels) })
	}
	return s
}

func (s *sessions) run(ctx context.Context, labels map[string]string) {
	for ctx.Err() == nil {
		resp, err := pb.NewSessionServiceClient(s.conn).OpenSession(ctx, &pb.OpenSessionRequest{TtlMs: (10 * time.Minute).Milliseconds(), Labels: labels})
		s.mu.Lock()
		if err == nil {
			s.opened = append(s.opened, resp)
		} else if ctx.Err() == nil {
			s.errs = append(s.errs, err)
		}
		s.mu.Unlock()
		if err != nil {
			select {
			case <-ctx.Done():
			case <-time.After(5 * time.Millisecond):
			}
		}
	}
}

// end stops and returns the answers, and how many failures had the text.
func (s *sessions) end(text string) (opened int, said int) {
	s.stop()
	s.wg.Wait()
	kinds := map[codes.Code]int{}
	for _, err := range s.errs {
		kinds[status.Code(err)]++
		if strings.Contains(err.Error(), text) {
			said++
		}
	}
	s.t.Logf("%d sessions opened, failures %v", len(s.opened), kinds)
	return len(s.opened), said
}

// texts of the failures, each once.
func (s *sessions) texts() []string {
	seen := map[string]bool{}
	for _, err := range s.errs {
		seen[err.Error()] = true
	}
	return slices.Sorted(maps.Keys(seen))
}

// TestF30HungDisks: a server whose disk hangs ends by itself. If it led, another
// leads, and nothing that was held or acknowledged is lost; if not, nothing
// happens.
func TestF30HungDisks(t *testing.T) {
	c := start(t, oneRegion())
	holder := c.client("", 10*time.Second)
	leases := hold(t, holder, 3)
	l := startLoad(t, []*client.Client{c.client("", 10*time.Second), c.client("", 10*time.Second)}, 2, *seed)
	l.progress(10, stepTimeout)
	for _, leads := range []bool{false, true} {
		leader := c.leader(diskRegion)
		victim := leader
		if !leads {
			victim = c.follower(leader)
		}
		began := time.Now()
		c.breakDisk(victim, &pb.DiskFault{Stall: true})
		c.ended(victim, "the disk hangs")
		t.Logf("%s (leads %v) ended %v after its disk hung", victim, leads, time.Since(began).Round(time.Millisecond))
		l.progress(10, stepTimeout)
		t.Logf("ten leases later after %v", time.Since(began).Round(time.Millisecond))
		stillHeld(t, "after the hung disk of "+victim, leases)
		if now := c.leader(diskRegion); leads && now == victim || !leads && now != leader {
			t.Errorf("%s led, the disk of %s hung, %s leads", leader, victim, now)
		}
		c.back(victim)
		stillHeld(t, "after the return of "+victim, leases)
	}
	c.stillGranted(holder, leases)
	l.stop()
}

// TestFullAndBrokenDisks: a server that cannot write stops granting, says why to
// its log and its clients, ends, and works again when it can write; the region
// goes on without it.
func TestFullAndBrokenDisks(t *testing.T) {
	c := start(t, oneRegion())
	holder := c.client("", 10*time.Second)
	leases := hold(t, holder, 3)
	l := startLoad(t, []*client.Client{c.client("", 10*time.Second), c.client("", 10*time.Second)}, 2, *seed)
	// A leader ends within milliseconds of a failed write. This one fails late, as a
	// broken disk's does, so that everybody's next call is there by then.
	const late = 300
	for _, x := range []struct {
		leads bool
		fault *pb.DiskFault
		says  string
	}{
		{true, &pb.DiskFault{Full: true, DelayMs: late}, syscall.ENOSPC.Error()},
		{false, &pb.DiskFault{Full: true}, syscall.ENOSPC.Error()},
		{true, &pb.DiskFault{Error: true, DelayMs: late}, syscall.EIO.Error()},
		{false, &pb.DiskFault{Error: true}, syscall.EIO.Error()},
	} {
		leader := c.leader(diskRegion)
		victim := leader
		if !x.leads {
			victim = c.follower(leader)
		}
		l.progress(5, stepTimeout)
		s := c.openSessions(t, victim, 8)
		l.progress(5, stepTimeout)
		c.breakDisk(victim, x.fault)
		c.ended(victim, "store write raft/", x.says)
		opened, said := s.end(x.says)
		if opened == 0 || x.leads && said == 0 {
			t.Errorf("%s: %d sessions opened; %d clients were told %q, but: %v", victim, opened, said, x.says, s.texts())
		}
		l.progress(10, stepTimeout)
		stillHeld(t, x.says+" at "+victim, leases)
		c.back(victim)
		s.stillOpen()
	}
	c.stillGranted(holder, leases)
	l.stop()
}

// stillOpen checks that the region has every session that it acknowledged, by
// closing it: a session that is unknown cannot be closed.
func (s *sessions) stillOpen() {
	s.t.Helper()
	ctx := within(s.t, stepTimeout)
	for len(s.opened) > 0 {
		o := s.opened[0]
		_, err := pb.NewSessionServiceClient(s.conn).CloseSession(ctx, &pb.CloseSessionRequest{SessionId: o.GetSessionId(), Secret: o.GetSecret()})
		switch {
		case err == nil:
			s.opened = s.opened[1:]
		case status.Code(err) == codes.Unavailable && ctx.Err() == nil: // no leader for a moment
			<-time.After(20 * time.Millisecond)
		default:
			s.t.Fatalf("session %s, which was acknowledged: %v", o.GetSessionId(), err)
		}
	}
}

// TestARealFullDisk: the leader's file system, a small one of its own, fills up.
func TestARealFullDisk(t *testing.T) {
	disks := t.TempDir()
	o := oneRegion()
	o.Args = func(p devcluster.Process) []string {
		args := devcluster.DefaultArgs(p)
		for i, a := range args {
			if a == "--data-dir" {
				args[i+1] = filepath.Join(disks, p.Name)
			}
		}
		return args
	}
	var mounted []string
	mount := func(name string) {
		dir := filepath.Join(disks, name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=160m"); err != nil {
			t.Fatalf("mount a small file system at %s: %v; this test needs root (or CAP_SYS_ADMIN), "+
				"as in `docker run --cap-add SYS_ADMIN`: without it a really full disk is not tested", dir, err)
		}
		mounted = append(mounted, dir)
	}
	t.Cleanup(func() {
		for _, dir := range mounted {
			if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
				t.Errorf("unmount %s: %v", dir, err)
			}
		}
	})
	o.Dir = filepath.Join(t.TempDir(), "dev")
	probe, err := devcluster.New(o)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range probe.State().Processes {
		if p.Role == string(pki.RoleRegion) {
			mount(p.Name)
		}
	}
	if err := probe.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	c := start(t, o)
	holder := c.client("", 10*time.Second)
	leases := hold(t, holder, 3)
	l := startLoad(t, []*client.Client{c.client("", 10*time.Second)}, 2, *seed)
	l.progress(5, stepTimeout)

	victim := c.leader(diskRegion)
	ballast := filepath.Join(disks, victim, "ballast")
	if err := fill(ballast); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("fill the disk of %s: %v", victim, err)
	}
	s := c.openSessions(t, victim, 16)
	c.ended(victim, "stopping", "store write raft/")
	if opened, _ := s.end(""); opened == 0 {
		t.Error("no session was opened")
	}
	l.progress(10, stepTimeout)
	stillHeld(t, "with a full disk at "+victim, leases)
	// Still full: it says so, and changes nothing that would keep it from coming
	// back.
	if err := c.StartProcess(victim); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(within(t, stepTimeout), victim); err != nil {
		t.Fatalf("%s runs on a full disk: %v", victim, err)
	}
	c.logSays(victim, syscall.ENOSPC.Error())
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	c.back(victim)
	l.progress(10, stepTimeout)
	stillHeld(t, "after the return of "+victim, leases)
	c.stillGranted(holder, leases)
	s.stillOpen()
	l.stop()
	c.stop() // before the file systems go
}

// fill writes a file until the disk is full.
func fill(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for size := 1 << 20; size > 0; {
		if _, err := f.Write(make([]byte, size)); err != nil {
			if size /= 2; size == 0 {
				return err
			}
		}
	}
	return nil
}
