package connect_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/connect"
	"github.com/headlease/headlease/internal/pki"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const cluster = `
cluster: test
allow_even_witnesses: true
regions:
  - name: eu
    servers: [{name: eu-1, host: 127.0.0.1}]
partitions: [{name: all, shards: 0-255, prefer: [eu]}]
`

// site is a directory with a cluster file and the certificate of client "w".
func site(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "cluster.yaml"), []byte(cluster), 0o600); err != nil {
		t.Fatal(err)
	}
	ids := []pki.Identity{{Cluster: "test", Role: pki.RoleClient, Name: "w"}}
	if _, err := pki.Generate(pki.Config{Dir: filepath.Join(dir, "certs"), Cluster: "test", Identities: ids}); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestOpen(t *testing.T) {
	dir := site(t)
	file, certs := filepath.Join(dir, "cluster.yaml"), filepath.Join(dir, "certs")
	far, other := filepath.Join(dir, "far.yaml"), filepath.Join(dir, "other")
	if err := os.WriteFile(far, []byte(strings.Replace(cluster, "127.0.0.1", "192.0.2.1", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	ids := []pki.Identity{{Cluster: "other", Role: pki.RoleClient, Name: "w"}}
	if _, err := pki.Generate(pki.Config{Dir: other, Cluster: "other", Identities: ids}); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		options connect.Options
		want    string // in the error; empty: none
	}{
		"as it should be": {connect.Options{File: file, Certs: certs, Name: "w"}, ""},
		"insecure":        {connect.Options{File: file, Name: "w", Insecure: true}, ""},
		"no file":         {connect.Options{File: file + "x", Certs: certs, Name: "w"}, "headlease config example"},
		"nothing":         {connect.Options{}, "file: is missing; give the path of the cluster file\nname: is missing"},
		"a directory":     {connect.Options{File: dir, Certs: certs, Name: "w"}, "is a directory; name the file in it"},
		"a path as name":  {connect.Options{File: file, Certs: certs, Name: "x/../w"}, `name "x/../w": use letters`},
		"both":            {connect.Options{File: file, Certs: certs, Name: "w", Insecure: true}, "insecure: certs are given too"},
		"plain to far":    {connect.Options{File: far, Name: "w", Insecure: true}, "insecure: server eu-1 is at 192.0.2.1:7600"},
		"file as certs":   {connect.Options{File: file, Certs: file, Name: "w"}, "is in no directory"},
		"other cluster's": {connect.Options{File: file, Certs: other, Name: "w"}, `is of cluster "other", not "test"`},
		"a wrong ttl":     {connect.Options{File: file, Certs: certs, Name: "w", Client: client.Config{TTL: 1}}, "ttl: 1ns is out of range"},
		"no name":         {connect.Options{File: file, Certs: certs}, "name: is missing"},
		"no certificates": {connect.Options{File: file, Name: "w"}, "certs: is not set"},
		"another's name":  {connect.Options{File: file, Certs: certs, Name: "v"}, "v.crt"},
		"a wrong home":    {connect.Options{File: file, Certs: certs, Name: "w", Client: client.Config{Home: "us"}}, `home: region "us"`},
	} {
		ended := 0
		test.options.Client.Ended = func() error { ended++; return nil }
		c, err := connect.Open(test.options)
		if got := ""; err != nil || test.want != "" {
			if err != nil {
				got = err.Error()
			}
			if test.want == "" || !strings.Contains(got, test.want) {
				t.Errorf("%s: %q", name, got)
			}
			continue
		}
		for range 2 {
			if err := c.Close(context.Background()); err != nil {
				t.Errorf("%s: close: %v", name, err)
			}
		}
		if ended != 1 {
			t.Errorf("%s: ended %d times", name, ended)
		}
	}
}

// With no server up calls end with their context and say whom they tried; Close
// ends all that is under way, and what comes after it is refused.
func TestNobodyAnswers(t *testing.T) {
	dir := site(t)
	c, err := connect.Open(connect.Options{File: filepath.Join(dir, "cluster.yaml"), Certs: filepath.Join(dir, "certs"), Name: "w"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := c.Acquire(ctx, "lock/x"); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "region/eu/eu-1 at 127.0.0.1:7600") {
		t.Errorf("acquire: %v", err)
	}
	waits := make(chan error)
	for range 3 {
		go func() {
			_, err := c.Acquire(context.WithoutCancel(ctx), "lock/x", client.Wait())
			waits <- err
		}()
	}
	if err := c.Close(t.Context()); err != nil {
		t.Errorf("close: %v", err)
	}
	for range 3 {
		if err := <-waits; !errors.Is(err, client.ErrClosed) {
			t.Errorf("acquire beside close: %v", err)
		}
	}
	_, acquire := c.Acquire(t.Context(), "lock/x")
	_, get := c.Get(t.Context(), "lock/x")
	_, lookup := c.Lookup(t.Context(), "lock/x")
	for what, err := range map[string]error{"acquire": acquire, "get": get, "lookup": lookup} {
		if !errors.Is(err, client.ErrClosed) {
			t.Errorf("%s after close: %v", what, err)
		}
	}
	if err := c.Close(t.Context()); err != nil {
		t.Errorf("close again: %v", err)
	}
}

// A worker's author has a module of his own: nothing of internal packages may be
// needed there.
func TestAnotherModuleConnects(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	sums, err := os.ReadFile(filepath.Join(root, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	const ours = "module github.com/headlease/headlease"
	for name, text := range map[string]string{
		"go.mod": strings.Replace(string(mod), ours, "module example.com/worker", 1) +
			"\nrequire github.com/headlease/headlease v0.0.0\nreplace github.com/headlease/headlease => " + root + "\n",
		"go.sum": string(sums),
		"main.go": `package main

import (
	"context"
	"fmt"
	"os"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/connect"
	"github.com/headlease/headlease/client/group"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/shard"
)

func main() {
	c, err := connect.Open(connect.Options{File: os.Args[1], Certs: os.Args[2], Name: "w", Client: client.Config{TTL: client.DefaultTTL}})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	_ = group.Config{Client: c, Shards: group.Shards(256)}
	var token fence.Token
	fmt.Println(shard.HashShard("key", 256) < 256, token, c.Close(context.Background()))
}
`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	at := site(t)
	run := exec.Command("go", "run", "-mod=mod", ".", filepath.Join(at, "cluster.yaml"), filepath.Join(at, "certs"))
	run.Dir = dir
	out, err := run.CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "true 0 <nil>") {
		t.Errorf("%v\n%s", err, out)
	}
}
