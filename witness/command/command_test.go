package command

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/leaktest"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// asProgram makes the test binary be headlease-witness.
const asProgram = "HEADLEASE_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Exit(Main(os.Args[1:], os.Stdout, os.Stderr))
	}
	leaktest.VerifyTestMain(m)
}

// site is a directory with a cluster file and certificates.
type site struct {
	dir, config, certs, data string
	votes                    string
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

func newSite(t *testing.T) site {
	t.Helper()
	dir := t.TempDir()
	s := site{
		dir: dir, config: filepath.Join(dir, "cluster.yaml"), certs: filepath.Join(dir, "certs"), data: filepath.Join(dir, "data"),
		votes: freeAddress(t),
	}
	file := fmt.Sprintf(`cluster: test
regions:
  - name: eu
    servers:
      - {name: eu-1, host: 127.0.0.4, metrics: "off"}
      - {name: eu-2, host: 127.0.0.5, metrics: "off"}
      - {name: eu-3, host: 127.0.0.6, metrics: "off"}
witnesses:
  - {name: w1, votes: "%s", gossip: "%s", metrics: "off"}
  - {name: w2, host: 127.0.0.2, metrics: "off"}
  - {name: w3, host: 127.0.0.3, metrics: "off"}
partitions:
  - {name: p, shards: 0-255, prefer: [eu]}
`, s.votes, freeAddress(t))
	if err := os.WriteFile(s.config, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	ids := []pki.Identity{
		{Cluster: "test", Role: pki.RoleAdmin},
		{Cluster: "test", Role: pki.RoleWitness, Name: "w1"},
		{Cluster: "test", Role: pki.RoleRegion, Region: "eu", Name: "eu-1"},
	}
	if _, err := pki.Generate(pki.Config{Dir: s.certs, Cluster: "test", Identities: ids}); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s site) args(more ...string) []string {
	return append([]string{"-f", s.config, "--name", "w1", "--data-dir", s.data, "--certs", s.certs}, more...)
}

// configuration 1 with the region eu and one witness.
func configuration(witness *pb.Voter) *pb.ClusterConfiguration {
	return &pb.ClusterConfiguration{
		ClusterId: "c", ClusterName: "test", Version: 1, Shards: 256, DNs: 4e9,
		Voters:     []*pb.Voter{{Id: "region/eu", Incarnation: 7}, witness},
		Partitions: []*pb.PartitionSpec{{Name: "p", Shards: []*pb.ShardRange{{First: 0, Last: 255}}, Prefer: []string{"eu"}}},
	}
}

func (s site) client(t *testing.T, file string, id pki.Identity) pb.VoteServiceClient {
	t.Helper()
	return pb.NewVoteServiceClient(s.dial(t, file, id))
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

// process is a running headlease-witness.
type process struct {
	cmd *exec.Cmd
	log *bytes.Buffer
	end chan struct{}
}

// spawn starts the program and waits until it serves or has ended.
func (s site) spawn(t *testing.T, args ...string) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	out, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: cmd, log: &bytes.Buffer{}, end: make(chan struct{})}
	up := make(chan struct{})
	go func() {
		defer close(p.end)
		lines, open := bufio.NewScanner(out), true
		for lines.Scan() {
			p.log.WriteString(lines.Text() + "\n")
			if open && strings.Contains(lines.Text(), "witness runs") {
				close(up)
				open = false
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

// stop sends a signal and returns the exit code; -1 after a kill.
func (p *process) stop(t *testing.T, sig os.Signal) int {
	t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
	<-p.end
	return p.cmd.ProcessState.ExitCode()
}

func hashDir(t *testing.T, dir string) string {
	t.Helper()
	h := sha256.New()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		h.Write([]byte(path + "\x00"))
		if d.Type().IsRegular() {
			raw, err := os.ReadFile(path)
			h.Write(raw)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

func TestKilledAndStartedAgain(t *testing.T) {
	s := newSite(t)
	p := s.spawn(t, s.args()...)
	admin := s.client(t, "admin", pki.Identity{Cluster: "test", Role: pki.RoleAdmin})
	ctx := context.Background()
	d, err := admin.DescribeVoter(ctx, &pb.DescribeVoterRequest{})
	if err != nil {
		t.Fatalf("describe: %v\n%s", err, p.log)
	}
	_, err = admin.Configure(ctx, &pb.ConfigureRequest{Configuration: configuration(d.GetState().GetVoter())})
	if err != nil {
		t.Fatal(err)
	}
	region := s.client(t, "eu-1", pki.Identity{Cluster: "test", Role: pki.RoleRegion, Region: "eu", Name: "eu-1"})
	ballot := &pb.Ballot{Round: 3, Region: "eu", Incarnation: 7}
	promised, err := region.Prepare(ctx, &pb.PrepareRequest{
		Header: &pb.VoteHeader{ClusterId: "c", ConfigVersion: 1, Candidate: "eu", CandidateIncarnation: 7},
		Ballot: ballot, Partitions: []string{"p"},
	})
	if err != nil || promised.GetAnswers()[0].GetRefusal() != nil {
		t.Fatalf("prepare: %v, %v", promised, err)
	}

	before := hashDir(t, s.data)
	other := s.spawn(t, s.args()...) // the addresses are taken, and nothing else is touched
	<-other.end
	if code := other.cmd.ProcessState.ExitCode(); code != exitFailed || !strings.Contains(other.log.String(), s.votes) {
		t.Errorf("a second process: exit %d, %s", code, other.log)
	}
	if hashDir(t, s.data) != before {
		t.Error("a second process changed the data")
	}

	p.stop(t, syscall.SIGKILL)
	p = s.spawn(t, s.args()...)
	d, err = admin.DescribeVoter(ctx, &pb.DescribeVoterRequest{})
	if err != nil {
		t.Fatalf("after kill -9: %v\n%s", err, p.log)
	}
	if got := d.GetRegisters()[0].GetRegister().GetPromised(); got.GetRound() != 3 || d.GetState().GetPreviousLife() != promised.GetState().GetLife() {
		t.Errorf("after kill -9: %v", d)
	}
	if code := p.stop(t, syscall.SIGTERM); code != exitOK {
		t.Errorf("SIGTERM: exit %d\n%s", code, p.log)
	}
}

func TestF30AHangingDiskEndsTheProcess(t *testing.T) {
	s := newSite(t)
	p := s.spawn(t, s.args("--drills")...)
	ctx := context.Background()
	conn := s.dial(t, "admin", pki.Identity{Cluster: "test", Role: pki.RoleAdmin})
	admin := pb.NewVoteServiceClient(conn)
	d, err := admin.DescribeVoter(ctx, &pb.DescribeVoterRequest{})
	if err != nil {
		t.Fatalf("describe: %v\n%s", err, p.log)
	}
	_, err = pb.NewFaultServiceClient(conn).SetFaults(ctx, &pb.SetFaultsRequest{
		DiskFaults: []*pb.DiskFault{{Id: "stall", Store: "register", Stall: true, ExpiresMs: 600_000}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := admin.Configure(ctx, &pb.ConfigureRequest{Configuration: configuration(d.GetState().GetVoter())}); err == nil {
		t.Error("configured on a disk that hangs")
	}
	<-p.end
	if code := p.cmd.ProcessState.ExitCode(); code != 3 || !strings.Contains(p.log.String(), "the witness's disk hangs") {
		t.Errorf("exit %d\n%s", code, p.log)
	}
	s.spawn(t, s.args()...)
	if d, err = admin.DescribeVoter(ctx, &pb.DescribeVoterRequest{}); err != nil || d.GetConfiguration() != nil {
		t.Errorf("started again: %v, %v", d, err)
	}
}

func TestTwoWitnessesOnOneDirectory(t *testing.T) {
	s := newSite(t)
	first := s.spawn(t, s.args()...)
	before := hashDir(t, s.data)
	// The same witness by a file with other addresses.
	raw, err := os.ReadFile(s.config)
	if err != nil {
		t.Fatal(err)
	}
	moved := filepath.Join(s.dir, "moved.yaml")
	text := strings.ReplaceAll(string(raw), s.votes, freeAddress(t))
	gossip := text[strings.Index(text, `gossip: "`)+len(`gossip: "`):]
	text = strings.ReplaceAll(text, gossip[:strings.IndexByte(gossip, '"')], freeAddress(t))
	if err := os.WriteFile(moved, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	second := s.spawn(t, append([]string{"-f", moved}, s.args()[2:]...)...)
	<-second.end
	want := "headlease-witness: witness: data_dir: " + s.data + " is in use by another process; stop it, or give each witness a directory of its own\n"
	if code := second.cmd.ProcessState.ExitCode(); code != exitFailed || !strings.HasSuffix(second.log.String(), want) {
		t.Errorf("exit %d, %q", code, second.log)
	}
	if hashDir(t, s.data) != before {
		t.Error("the data was changed")
	}
	if code := first.stop(t, syscall.SIGTERM); code != exitOK {
		t.Errorf("exit %d\n%s", code, first.log)
	}
}

func TestBadInputNamesTheRemedyAndChangesNothing(t *testing.T) {
	s := newSite(t)
	file := func(name, content string) string {
		path := filepath.Join(s.dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	garbage := file("garbage.json", "{")
	noExpiry := file("bad-rule.json", `{"faults": [{"id": "", "peer": "eu-1", "drop": true}]}`)
	unknownKey := file("unknown.yaml", "cluster: test\nwitnesess: []\n")
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"no name":             {[]string{"-f", s.config, "--data-dir", s.data, "--certs", s.certs}, exitFailed, "name: is not set; give --name or HEADLEASE_NAME, a witness of the cluster file (it has w1, w2, w3)"},
		"unknown name":        {s.args("--name", "w9"), exitFailed, `name: "w9" is not a witness of the cluster file (it has w1, w2, w3)`},
		"a region's server":   {s.args("--name", "eu-1"), exitFailed, `name: "eu-1" is a server of region eu, not a witness; start it with 'headlease region'`},
		"no data directory":   {[]string{"-f", s.config, "--name", "w1", "--certs", s.certs}, exitFailed, "data_dir: is not set; give --data-dir or HEADLEASE_DATA_DIR"},
		"no certificates":     {[]string{"-f", s.config, "--name", "w1", "--data-dir", s.data}, exitFailed, "certs: is not set; give --certs or HEADLEASE_CERTS"},
		"certificate missing": {s.args("--name", "w2"), exitFailed, "w2.crt: missing; make it with 'headlease certs'"},
		"certs elsewhere":     {s.args("--certs", filepath.Join(s.dir, "nowhere")), exitFailed, "nowhere/ca.crt: missing"},
		"no cluster file":     {s.args("-f", filepath.Join(s.dir, "nowhere.yaml")), exitFailed, "nowhere.yaml: file does not exist"},
		"unknown key":         {s.args("-f", unknownKey), exitFailed, "witnesess: unknown key; did you mean witnesses?"},
		"faults, no drills":   {s.args("--faults", garbage), exitFailed, "--faults: needs --drills"},
		"faults missing":      {s.args("--drills", "--faults", filepath.Join(s.dir, "none")), exitFailed, "--faults: open"},
		"faults garbage":      {s.args("--drills", "--faults", garbage), exitFailed, "garbage.json: start-up fault table"},
		"faults wrong":        {s.args("--drills", "--faults", noExpiry), exitFailed, "fault id: must not be empty"},
		"unknown flag":        {s.args("--nmae", "x"), exitUsage, "unknown flag: --nmae; see 'headlease-witness --help'"},
		"an argument":         {s.args("w1"), exitUsage, `unknown command "w1"`},
		"log level":           {s.args("--log-level", "loud"), exitUsage, `--log-level "loud" is not a level`},
		"log format":          {s.args("--log-format", "xml"), exitUsage, `--log-format "xml" is not a format`},
	} {
		t.Run(name, func(t *testing.T) {
			before := hashDir(t, s.dir)
			var out, errs bytes.Buffer
			if code := Main(c.args, &out, &errs); code != c.code {
				t.Errorf("exit code %d, want %d", code, c.code)
			}
			if !strings.Contains(errs.String(), c.want) || !strings.HasPrefix(errs.String(), "headlease-witness: ") {
				t.Errorf("printed %q, want %q in it", errs.String(), c.want)
			}
			if hashDir(t, s.dir) != before {
				t.Error("something was written")
			}
		})
	}
}

func TestHelpAndVersion(t *testing.T) {
	for _, args := range [][]string{{"--help"}, {"--version"}} {
		var out, errs bytes.Buffer
		if code := Main(args, &out, &errs); code != exitOK || out.Len() == 0 || errs.Len() != 0 {
			t.Errorf("%v: exit %d, %q, %q", args, code, out.String(), errs.String())
		}
	}
}
