package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

var (
	flagRounds = flag.Int("witness.rounds", 150, "how many renewals each region sends in TestMemoryAndDisk: 75 are a minute's")
	flagPaced  = flag.Bool("witness.paced", false, "send them in time, each D/5, and not one after the other")
)

// The biggest cluster whose witness is promised to be small.
const (
	regions    = 5
	servers    = 5
	partitions = 500
	d          = 4 * time.Second
)

var (
	buildOnce sync.Once
	builtAt   string
	errBuild  error
)

// program is the released program, built once for all tests, where any user
// may run it.
func program(t *testing.T) string {
	t.Helper()
	buildOnce.Do(func() {
		dir, err := os.MkdirTemp("", "headlease-witness")
		if err != nil {
			errBuild = err
			return
		}
		builtAt = filepath.Join(dir, "headlease-witness")
		build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-tags", releaseTags(t), "-ldflags", "-s -w", "-o", builtAt, ".")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		out, err := build.CombinedOutput()
		errBuild = errors.Join(err, os.Chmod(dir, 0o755)) //nolint:gosec // any user may run it
		if err != nil {
			errBuild = fmt.Errorf("%w\n%s", err, out)
		}
	})
	if errBuild != nil {
		t.Fatal(errBuild)
	}
	return builtAt
}

func TestMain(m *testing.M) {
	code := m.Run()
	if builtAt != "" {
		_ = os.RemoveAll(filepath.Dir(builtAt))
	}
	os.Exit(code)
}

// site is a witness's directory, certificates and cluster file.
type site struct {
	dir, config, certs, data, votes string
}

func newSite(t *testing.T) site {
	t.Helper()
	dir, err := os.MkdirTemp("", "witness-site")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := site{dir: dir, config: filepath.Join(dir, "cluster.yaml"), certs: filepath.Join(dir, "certs"), data: filepath.Join(dir, "data"), votes: freeAddress(t)}
	var f strings.Builder
	f.WriteString("cluster: test\nregions:\n")
	ids := []pki.Identity{{Cluster: "test", Role: pki.RoleAdmin}, {Cluster: "test", Role: pki.RoleWitness, Name: "w1"}}
	for r := range regions {
		fmt.Fprintf(&f, "  - name: %s\n    servers:\n", regionName(r))
		for n := range servers {
			name := fmt.Sprintf("%s-%d", regionName(r), n+1)
			fmt.Fprintf(&f, "      - {name: %s, host: 127.0.%d.%d, metrics: \"off\"}\n", name, r+1, n+1)
			ids = append(ids, pki.Identity{Cluster: "test", Role: pki.RoleRegion, Region: regionName(r), Name: name})
		}
	}
	fmt.Fprintf(&f, "witnesses:\n  - {name: w1, votes: %q, gossip: %q, metrics: \"off\"}\npartitions:\n  - {name: p, shards: 0-255, prefer: [%s]}\n",
		s.votes, freeAddress(t), regionName(0))
	if err := os.WriteFile(s.config, []byte(f.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := pki.Generate(pki.Config{Dir: s.certs, Cluster: "test", Identities: ids}); err != nil {
		t.Fatal(err)
	}
	return s
}

func regionName(r int) string { return fmt.Sprintf("region-%d", r+1) }

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

// process is a running headlease-witness.
type process struct {
	cmd *exec.Cmd
	log bytes.Buffer
	end chan struct{}
	// started is how long it took until it served.
	started time.Duration
}

// spawn starts the program, as another user if uid is not 0, and waits until
// it serves or has ended.
func (s site) spawn(t *testing.T, uid uint32) *process {
	t.Helper()
	cmd := exec.Command(program(t), "-f", s.config, "--name", "w1", "--data-dir", s.data, "--certs", s.certs)
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	out, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: cmd, end: make(chan struct{})}
	up := make(chan struct{})
	go func() {
		defer close(p.end)
		lines, open := bufio.NewScanner(out), true
		for lines.Scan() {
			p.log.WriteString(lines.Text() + "\n")
			if open && strings.Contains(lines.Text(), "witness runs") {
				open = false
				p.started = time.Since(began)
				close(up)
			}
		}
		_ = cmd.Wait()
	}()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-p.end })
	select {
	case <-up:
	case <-p.end:
	}
	return p
}

func (s site) dial(t *testing.T, file string, id pki.Identity) *grpc.ClientConn {
	t.Helper()
	creds, err := pki.Load(pki.LoadConfig{Dir: s.certs, File: file, Want: id})
	if err != nil {
		t.Fatal(err)
	}
	links, err := link.New(link.Config{Identity: creds.Identity, Credentials: creds})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := links.DialGRPC(link.PlaneVotes, link.Peer{Name: "w1", Role: pki.RoleWitness, Address: s.votes})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(); _ = links.Close() })
	return conn
}

// admin of the witness.
func (s site) admin(t *testing.T) pb.VoteServiceClient {
	t.Helper()
	return pb.NewVoteServiceClient(s.dial(t, "admin", pki.Identity{Cluster: "test", Role: pki.RoleAdmin}))
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func partition(i int) string { return fmt.Sprintf("eu-equities-%03d", i) }

func incarnation(r int) uint64 { return 0x9e3779b97f4a7c15 * uint64(r+1) }

// configure gives the witness a configuration with so many partitions.
func (s site) configure(t *testing.T, n int) error {
	t.Helper()
	admin := s.admin(t)
	described, err := admin.DescribeVoter(within(t), &pb.DescribeVoterRequest{})
	if err != nil {
		t.Fatal(err)
	}
	c := &pb.ClusterConfiguration{
		ClusterId: "0190f5fe-7c00-7a00-8000-0123456789ab", ClusterName: "test", Version: 1, Shards: 512, DNs: int64(d),
		Voters: []*pb.Voter{described.GetState().GetVoter()},
	}
	for r := range regions {
		c.Voters = append(c.Voters, &pb.Voter{Id: config.RegionVoter(regionName(r)), Incarnation: incarnation(r)})
	}
	for i := range n {
		last := uint32(i)
		if i == n-1 {
			last = c.Shards - 1
		}
		p := &pb.PartitionSpec{Name: partition(i), Shards: []*pb.ShardRange{{First: uint32(i), Last: last}}}
		for k := range regions {
			p.Prefer = append(p.Prefer, regionName((i+k)%regions))
		}
		c.Partitions = append(c.Partitions, p)
	}
	_, err = admin.Configure(within(t), &pb.ConfigureRequest{Configuration: c})
	return err
}

// region is the leader of a region, as the witness sees it.
type region struct {
	client pb.VoteServiceClient
	n      int
	round  uint64
}

func (s site) region(t *testing.T, r int) *region {
	t.Helper()
	name := regionName(r) + "-1"
	return &region{n: r, client: pb.NewVoteServiceClient(s.dial(t, name, pki.Identity{Cluster: "test", Role: pki.RoleRegion, Region: regionName(r), Name: name}))}
}

func (r *region) header() *pb.VoteHeader {
	r.round++
	return &pb.VoteHeader{
		ClusterId: "0190f5fe-7c00-7a00-8000-0123456789ab", ConfigVersion: 1,
		Candidate: regionName(r.n), CandidateIncarnation: incarnation(r.n), Round: r.round,
	}
}

func (r *region) ballot() *pb.Ballot {
	return &pb.Ballot{Round: uint64(r.n + 1), Region: regionName(r.n), Incarnation: incarnation(r.n)}
}

// own are the partitions that a region owns, others those that it asks for.
func (r *region) own() (own, others []string) {
	for i := range partitions {
		if i%regions == r.n {
			own = append(own, partition(i))
		} else {
			others = append(others, partition(i))
		}
	}
	return own, others
}

// win takes the region's partitions; renew renews them.
func (r *region) win(ctx context.Context) error {
	own, _ := r.own()
	if _, err := r.client.Prepare(ctx, &pb.PrepareRequest{Header: r.header(), Ballot: r.ballot(), Partitions: own}); err != nil {
		return err
	}
	return r.renew(ctx)
}

func (r *region) renew(ctx context.Context) error {
	own, _ := r.own()
	req := &pb.AcceptRequest{Header: r.header()}
	for _, name := range own {
		req.Items = append(req.Items, &pb.AcceptItem{Partition: name, Ballot: r.ballot(), Value: &pb.Value{
			Owner: regionName(r.n), OwnerIncarnation: incarnation(r.n), Epoch: 1, DNs: int64(d),
		}})
	}
	res, err := r.client.Accept(ctx, req)
	if err != nil {
		return err
	}
	for _, a := range res.GetAnswers() {
		if ref := a.GetRefusal(); ref != nil {
			return fmt.Errorf("%s: %s", a.GetPartition(), ref.GetText())
		}
	}
	return nil
}

// ask is the dry Prepare of who would like to own the rest.
func (r *region) ask(ctx context.Context) error {
	_, others := r.own()
	_, err := r.client.Prepare(ctx, &pb.PrepareRequest{Header: r.header(), Dry: true, Partitions: others})
	return err
}

// resident is a process's memory in bytes: now, and at most so far.
func resident(t *testing.T, pid int) (now, most int64) {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		key, rest, _ := strings.Cut(line, ":")
		kb, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		switch key {
		case "VmRSS":
			now = kb << 10
		case "VmHWM":
			most = kb << 10
		}
	}
	if now == 0 {
		t.Fatalf("no VmRSS in\n%s", raw)
	}
	return now, most
}

// onDisk is what the data directory takes, in bytes of its files.
func (s site) onDisk(t *testing.T) (sum int64) {
	t.Helper()
	err := filepath.Walk(s.data, func(_ string, info os.FileInfo, err error) error {
		if err == nil && info.Mode().IsRegular() {
			sum += info.Size()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return sum
}

// TestMemoryAndDisk: 5 regions of 5 servers with 500 partitions, all renewed
// and asked for: once it has started the witness stays under 20 MB, and its disk
// does not grow, since no renewal and no lease of any worker is written.
func TestMemoryAndDisk(t *testing.T) {
	s := newSite(t)
	p := s.spawn(t, 0)
	if err := s.configure(t, partitions); err != nil {
		t.Fatalf("%v\n%s", err, &p.log)
	}
	var all []*region
	for r := range regions {
		all = append(all, s.region(t, r))
		if err := all[r].win(within(t)); err != nil {
			t.Fatal(err)
		}
	}
	began, before := time.Now(), s.onDisk(t)
	errs := make(chan error, regions)
	for _, r := range all {
		go func() { // ends with its rounds, at the latest with the witness
			// Not before the program has let go of what its start needed.
			for n := 0; n < *flagRounds || time.Since(began) < settled+time.Second; n++ {
				if *flagPaced {
					<-time.After(time.Until(began.Add(time.Duration(n) * d / 5)))
				}
				if err := r.renew(t.Context()); err != nil {
					errs <- err
					return
				}
				if n%6 == 5 { // D + D/4
					if err := r.ask(t.Context()); err != nil {
						errs <- err
						return
					}
				}
			}
			errs <- nil
		}()
	}
	for range all {
		if err := <-errs; err != nil {
			t.Fatalf("%v\n%s", err, &p.log)
		}
	}
	now, most := resident(t, p.cmd.Process.Pid)
	after := s.onDisk(t)
	t.Logf("%d regions, %d partitions, %d renewals of each in %v: %.1f MB resident, %.1f MB at most; %d bytes on disk before, %d after",
		regions, partitions, *flagRounds, time.Since(began).Round(time.Second), float64(now)/1e6, float64(most)/1e6, before, after)
	if limit := int64(20_000_000); now > limit {
		t.Errorf("%d bytes are resident; at most %d", now, limit)
	}
	if after != before {
		t.Errorf("renewals changed the data from %d to %d bytes", before, after)
	}
}

// TestStartsAsAnUnprivilegedUser: it needs no right beyond its own files.
func TestStartsAsAnUnprivilegedUser(t *testing.T) {
	s := newSite(t)
	uid := 65534
	if os.Geteuid() == 0 {
		err := filepath.Walk(s.dir, func(path string, _ os.FileInfo, err error) error {
			return errors.Join(err, os.Chown(path, uid, uid))
		})
		if err != nil {
			t.Fatal(err)
		}
	} else {
		uid = 0 // this very user is unprivileged
	}
	p := s.spawn(t, uint32(uid))
	if err := s.configure(t, 1); err != nil {
		t.Fatalf("%v\n%s", err, &p.log)
	}
	t.Logf("it served after %v", p.started)
}

// smallDisk mounts a file system of its own on the data directory.
func (s site) smallDisk(t *testing.T, options string) {
	t.Helper()
	if err := os.Mkdir(s.data, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", s.data, "tmpfs", 0, options); err != nil {
		t.Fatalf("mount a small file system at %s: %v; this test needs root (or CAP_SYS_ADMIN), as in `docker run --cap-add SYS_ADMIN`", s.data, err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(s.data, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// TestAFullDisk: what cannot be stored is not promised; the process says why
// and ends, and what it had promised before is there when there is room again.
func TestAFullDisk(t *testing.T) {
	s := newSite(t)
	s.smallDisk(t, "size=1m")
	p := s.spawn(t, 0)
	if err := s.configure(t, partitions); err != nil {
		t.Fatalf("%v\n%s", err, &p.log)
	}
	first := s.region(t, 0)
	if err := first.win(within(t)); err != nil {
		t.Fatal(err)
	}
	filler := filepath.Join(s.data, "filler")
	f, err := os.Create(filler)
	if err != nil {
		t.Fatal(err)
	}
	block := make([]byte, 4096)
	for err == nil {
		_, err = f.Write(block)
	}
	_ = f.Close()
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("filling the disk: %v", err)
	}
	// Others win until a write needs room that is not there.
	for r := 1; r < regions && err != nil; r++ {
		if err = s.region(t, r).win(within(t)); err != nil {
			break
		}
		err = syscall.ENOSPC
	}
	select {
	case <-p.end:
	case <-within(t).Done():
		t.Fatalf("it goes on with a full disk; the last vote: %v\n%s", err, &p.log)
	}
	if code := p.cmd.ProcessState.ExitCode(); code == 0 || !strings.Contains(p.log.String(), syscall.ENOSPC.Error()) {
		t.Errorf("exit %d\n%s", code, &p.log)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	p = s.spawn(t, 0)
	d, err := s.admin(t).DescribeVoter(within(t), &pb.DescribeVoterRequest{})
	if err != nil {
		t.Fatalf("with room again: %v\n%s", err, &p.log)
	}
	if got := d.GetRegisters()[0].GetRegister().GetAccepted().GetRegion(); got != regionName(0) {
		t.Errorf("what was accepted before is lost: %v", d.GetRegisters()[0])
	}
	if err := s.region(t, 4).win(within(t)); err != nil {
		t.Errorf("a vote with room again: %v", err)
	}
}

// TestAReadOnlyDisk: it votes for nothing that it cannot store, and says so.
func TestAReadOnlyDisk(t *testing.T) {
	s := newSite(t)
	s.smallDisk(t, "size=4m")
	p := s.spawn(t, 0)
	if err := s.configure(t, partitions); err != nil {
		t.Fatalf("%v\n%s", err, &p.log)
	}
	_ = p.cmd.Process.Kill()
	<-p.end
	if err := syscall.Mount("tmpfs", s.data, "tmpfs", syscall.MS_REMOUNT|syscall.MS_RDONLY, "size=4m"); err != nil {
		t.Fatal(err)
	}
	p = s.spawn(t, 0)
	<-p.end
	if code := p.cmd.ProcessState.ExitCode(); code == 0 || !strings.Contains(p.log.String(), syscall.EROFS.Error()) || !strings.Contains(p.log.String(), s.data) {
		t.Errorf("exit %d\n%s", code, &p.log)
	}
	if err := syscall.Mount("tmpfs", s.data, "tmpfs", syscall.MS_REMOUNT, "size=4m"); err != nil {
		t.Fatal(err)
	}
	p = s.spawn(t, 0)
	if err := s.region(t, 0).win(within(t)); err != nil {
		t.Errorf("on a disk that can be written again: %v\n%s", err, &p.log)
	}
}
