package main

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/headlease/headlease/internal/clusterfile/load"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
)

// awaitTimeout bounds how long a script waits for a process to get somewhere.
const awaitTimeout = 30 * time.Second

// nextPort goes through the ports below the kernel's ephemeral range, so that
// two scripts that run at once never get the same.
var nextPort struct {
	sync.Mutex
	port int
}

// ports NAME… sets each variable to a port that is free for TCP and UDP on
// loopback.
func ports(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: ports NAME…")
	}
	nextPort.Lock()
	defer nextPort.Unlock()
	const low, high = 10000, 32000
	if nextPort.port == 0 {
		nextPort.port = low + rand.IntN(high-low)
	}
	for _, name := range args {
		for tries := 0; ; tries++ {
			if tries == high-low {
				ts.Fatalf("no port between %d and %d is free", low, high)
			}
			if nextPort.port++; nextPort.port >= high {
				nextPort.port = low
			}
			if unused(net.JoinHostPort("127.0.0.1", strconv.Itoa(nextPort.port))) {
				break
			}
		}
		ts.Setenv(name, strconv.Itoa(nextPort.port))
	}
}

// unused reports whether nobody is at an address. It knocks, and does not bind:
// a process that another script starts at that moment would inherit the socket
// and hold the port a while longer, until its exec.
func unused(address string) bool {
	if c, err := net.Dial("tcp", address); !errors.Is(err, syscall.ECONNREFUSED) {
		if err == nil {
			_ = c.Close()
		}
		return false
	}
	c, err := net.Dial("udp", address)
	if err != nil {
		return false
	}
	defer func() { _ = c.Close() }()
	if c.SetDeadline(time.Now().Add(time.Second)) != nil {
		return false
	}
	if _, err = c.Write([]byte{0}); err == nil {
		_, err = c.Read(make([]byte, 1))
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// occupied are the ports that a script has taken, by network and port.
type occupied map[string]io.Closer

type occupiedKey struct{}

// occupy NETWORK PORT takes a port of loopback, tcp or udp, until the script
// ends or vacates it.
func occupy(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: occupy tcp|udp PORT")
	}
	address := net.JoinHostPort("127.0.0.1", args[1])
	var c io.Closer
	var err error
	if args[0] == "udp" {
		c, err = net.ListenPacket("udp", address)
	} else {
		c, err = net.Listen("tcp", address)
	}
	ts.Check(err)
	ts.Value(occupiedKey{}).(occupied)[args[0]+args[1]] = c
	ts.Defer(func() { _ = c.Close() }) // closed already if it was vacated
}

// vacate NETWORK PORT undoes occupy. It waits for processes that inherited the
// socket, see unused.
func vacate(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: vacate tcp|udp PORT")
	}
	c := ts.Value(occupiedKey{}).(occupied)[args[0]+args[1]]
	if c == nil {
		ts.Fatalf("%s port %s is not occupied", args[0], args[1])
	}
	ts.Check(c.Close())
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	end := time.NewTimer(awaitTimeout)
	defer end.Stop()
	for !unused(net.JoinHostPort("127.0.0.1", args[1])) {
		select {
		case <-tick.C:
		case <-end.C:
			ts.Fatalf("%s port %s is still in use after %v", args[0], args[1], awaitTimeout)
		}
	}
}

// fill SRC DST copies a file with its ${NAME}s filled in.
func fill(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: fill SRC DST")
	}
	text := os.Expand(ts.ReadFile(args[0]), ts.Getenv)
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), []byte(text), 0o600))
}

// await FILE PATTERN waits until a file, which may not exist yet, has a match.
// Give the output of a background command a file by
//
//	exec sh -c 'exec headlease … 2>FILE' &NAME&
func await(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: await FILE PATTERN")
	}
	pattern, err := regexp.Compile(args[1])
	ts.Check(err)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	end := time.NewTimer(awaitTimeout)
	defer end.Stop()
	for {
		text, err := os.ReadFile(ts.MkAbs(args[0]))
		if err == nil && pattern.Match(text) {
			return
		}
		select {
		case <-tick.C:
		case <-end.C:
			ts.Fatalf("%s has no match for %s after %v:\n%s", args[0], args[1], awaitTimeout, text)
		}
	}
}

// setformat FILE N gives a witness's store another format.
func setformat(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: setformat FILE N")
	}
	n, err := strconv.ParseUint(args[1], 10, 64)
	ts.Check(err)
	db, err := bolt.Open(ts.MkAbs(args[0]), 0o600, &bolt.Options{Timeout: time.Second})
	ts.Check(err)
	err = db.Update(func(tx *bolt.Tx) error {
		return tx.Bucket([]byte("meta")).Put([]byte("format"), binary.BigEndian.AppendUint64(nil, n))
	})
	ts.Check(errors.Join(err, db.Close()))
}

// call is a program: it calls one method of one process, as anybody could who
// has a certificate, and prints the answer in JSON, or the code and the message
// of the refusal.
//
//	exec call -f FILE [--certs DIR] [--as ROLE/NAME] [--pad N] PROCESS PLANE METHOD JSON
//
// --pad N replaces PADDING in the JSON by N letters.
func call() {
	if err := runCall(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func runCall(args []string) (err error) {
	flags := flag.NewFlagSet("call", flag.ContinueOnError)
	config := flags.String("f", "cluster.yaml", "")
	certs := flags.String("certs", "", "")
	as := flags.String("as", "admin", "")
	pad := flags.Int("pad", 0, "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 4 {
		return errors.New("usage: call PROCESS PLANE METHOD JSON")
	}
	f, _, err := load.File(*config)
	if err != nil {
		return err
	}
	role, name, _ := strings.Cut(*as, "/")
	id := pki.Identity{Cluster: f.Cluster, Role: pki.Role(role), Name: name}
	cfg := link.Config{Identity: id, Insecure: *certs == ""}
	if *certs != "" {
		if cfg.Credentials, err = pki.Load(pki.LoadConfig{Dir: *certs, Want: id}); err != nil {
			return err
		}
	}
	links, err := link.New(cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, links.Close()) }()
	p, ok := f.Process(flags.Arg(0))
	if !ok {
		return fmt.Errorf("no process %q", flags.Arg(0))
	}
	plane, address := link.PlaneAPI, p.API
	if flags.Arg(1) == "votes" {
		plane, address = link.PlaneVotes, p.Votes
	}
	req, res, err := messages(flags.Arg(2))
	if err != nil {
		return err
	}
	text := strings.Replace(flags.Arg(3), "PADDING", strings.Repeat("x", *pad), 1)
	if err := protojson.Unmarshal([]byte(text), req); err != nil {
		return err
	}
	conn, err := links.DialGRPC(plane, link.Peer{Name: p.Name, Region: p.Region, Role: pki.Role(p.Role), Address: address})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	ctx, cancel := context.WithTimeout(context.Background(), awaitTimeout)
	defer cancel()
	if err := conn.Invoke(ctx, "/headlease.v1."+strings.Replace(flags.Arg(2), ".", "/", 1), req, res); err != nil {
		st := status.Convert(err)
		return fmt.Errorf("%s: %s", st.Code(), st.Message())
	}
	fmt.Println(protojson.Format(res))
	return nil
}

// messages makes the request and the response of "Service.Method".
func messages(method string) (req, res proto.Message, err error) {
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName("headlease.v1." + method))
	if err != nil {
		return nil, nil, err
	}
	m, ok := d.(protoreflect.MethodDescriptor)
	if !ok {
		return nil, nil, fmt.Errorf("%s is no method", method)
	}
	in, err := protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
	if err != nil {
		return nil, nil, err
	}
	out, err := protoregistry.GlobalTypes.FindMessageByName(m.Output().FullName())
	if err != nil {
		return nil, nil, err
	}
	return in.New().Interface(), out.New().Interface(), nil
}
