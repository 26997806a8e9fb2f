package pki

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

var all = []Identity{
	{Role: RoleRegion, Region: "eu", Name: "eu-1"},
	{Role: RoleWitness, Name: "w1"},
	{Role: RoleClient, Name: "alice"},
	{Role: RoleAdmin},
}

func generate(t *testing.T, c Config) Made {
	t.Helper()
	made, err := Generate(c)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func fresh(t *testing.T) Config {
	t.Helper()
	c := Config{Dir: filepath.Join(t.TempDir(), "certs"), Cluster: "prod", Identities: all}
	generate(t, c)
	return c
}

// tree is every file with mode and content.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		out[strings.TrimPrefix(path, dir+"/")] = info.Mode().String() + " " + string(data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func same(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if b[k] != v {
			return false
		}
	}
	return true
}

func TestGenerateAndLoad(t *testing.T) {
	c := fresh(t)
	for _, id := range all {
		id.Cluster = "prod"
		got, err := Load(LoadConfig{Dir: c.Dir, Want: id, Gossip: true})
		if err != nil {
			t.Fatal(err)
		}
		if got.Identity != id || len(got.GossipKey) != 32 {
			t.Errorf("%v, gossip key of %d bytes", got.Identity, len(got.GossipKey))
		}
		server := slices.Contains(got.Certificate.Leaf.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
		if want := id.Role == RoleRegion || id.Role == RoleWitness; server != want {
			t.Errorf("%s may serve: %v", id, server)
		}
	}
	for name, text := range tree(t, c.Dir) {
		secret := strings.HasSuffix(name, ".key")
		if private := strings.HasPrefix(text, "-rw------- "); private != secret {
			t.Errorf("%s has mode %.10s", name, text)
		}
	}
	if _, err := os.Stat(filepath.Join(c.Dir, "ca.key")); !errors.Is(err, fs.ErrNotExist) {
		t.Error("the authority's key lies among the files that processes get")
	}
}

func TestGenerateAgainKeepsEverything(t *testing.T) {
	c := fresh(t)
	before := tree(t, c.Dir)
	made := generate(t, c)
	if len(made.New) != 0 || len(made.Kept) != 2*len(all)+3 || !same(before, tree(t, c.Dir)) {
		t.Errorf("made %v, kept %v", made.New, made.Kept)
	}
	c.Identities = append(slices.Clone(all), Identity{Role: RoleWitness, Name: "w2"})
	made = generate(t, c)
	if !slices.Equal(made.New, []string{"w2.key", "w2.crt"}) {
		t.Errorf("made %v", made.New)
	}
}

func TestGenerateFinishesAfterACrash(t *testing.T) {
	c := fresh(t)
	files := tree(t, c.Dir)
	order := []string{"ca/ca.key", "ca.crt", "gossip.key", "eu-1.key", "eu-1.crt", "w1.key", "w1.crt", "alice.key", "alice.crt", "admin.key", "admin.crt"}
	if len(order) != len(files) {
		t.Fatalf("files %d", len(files))
	}
	for n := range order {
		crashed := Config{Dir: t.TempDir(), Cluster: "prod", Identities: all}
		if err := os.Mkdir(filepath.Join(crashed.Dir, "ca"), 0o700); err != nil {
			t.Fatal(err)
		}
		for _, name := range order[:n] {
			mode, text, _ := strings.Cut(files[name], " ")
			perm := fs.FileMode(0o644)
			if mode == "-rw-------" {
				perm = 0o600
			}
			if err := os.WriteFile(filepath.Join(crashed.Dir, name), []byte(text), perm); err != nil {
				t.Fatal(err)
			}
		}
		if made := generate(t, crashed); len(made.New) != len(order)-n {
			t.Errorf("after %d files: made %v", n, made.New)
		}
	}
}

func TestGenerateNeverOverwrites(t *testing.T) {
	foreign := fresh(t)
	for name, c := range map[string]struct {
		spoil func(t *testing.T, dir string)
		want  string
	}{
		"another cluster's CA":      {func(t *testing.T, dir string) { reissue(t, dir, "other") }, `is "headlease other CA", not "headlease prod CA"; use the directory of cluster "prod" or an empty one`},
		"the CA's key is gone":      {func(t *testing.T, dir string) { remove(t, dir, "ca/ca.key") }, "ca/ca.key: missing beside"},
		"another CA's key":          {func(t *testing.T, dir string) { take(t, foreign.Dir, dir, "ca/ca.key") }, "ca/ca.key: does not belong to"},
		"a pair of another CA":      {func(t *testing.T, dir string) { take(t, foreign.Dir, dir, "w1.crt", "w1.key") }, "w1.crt: is not signed by"},
		"another identity's files":  {func(t *testing.T, dir string) { rename(t, dir, "alice", "w1") }, "w1.crt: is for client/alice, not witness/w1; use the pair made for this process"},
		"a spoilt gossip key":       {func(t *testing.T, dir string) { spoil(t, dir, "gossip.key") }, "gossip.key: is not 32 bytes in hex; copy the file again"},
		"a spoilt key":              {func(t *testing.T, dir string) { spoil(t, dir, "w1.key") }, "w1.key: is not a private key in PEM"},
		"a key that others can see": {func(t *testing.T, dir string) { chmod(t, dir, "w1.key") }, "w1.key: mode 0644 lets others read it; run 'chmod 600' on it"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := fresh(t)
			c.spoil(t, dir.Dir)
			before := tree(t, dir.Dir)
			_, err := Generate(dir)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v\nwant %s", err, c.want)
			}
			if !same(before, tree(t, dir.Dir)) {
				t.Error("files were changed")
			}
		})
	}
}

func TestLoadErrorsNameFileAndRemedy(t *testing.T) {
	foreign := fresh(t)
	w1 := Identity{Cluster: "prod", Role: RoleWitness, Name: "w1"}
	for name, c := range map[string]struct {
		spoil func(t *testing.T, dir string)
		want  Identity
		text  string
	}{
		"missing CA":          {func(t *testing.T, dir string) { remove(t, dir, "ca.crt") }, w1, "ca.crt: missing; make it with 'headlease certs' or name the right directory"},
		"missing certificate": {func(t *testing.T, dir string) { remove(t, dir, "w1.crt") }, w1, "w1.crt: missing; make it"},
		"missing key":         {func(t *testing.T, dir string) { remove(t, dir, "w1.key") }, w1, "w1.key: missing; make it"},
		"missing gossip key":  {func(t *testing.T, dir string) { remove(t, dir, "gossip.key") }, w1, "gossip.key: missing; make it"},
		"wrong CA":            {func(t *testing.T, dir string) { take(t, foreign.Dir, dir, "ca.crt") }, w1, "is not signed by"},
		"leaf as CA":          {func(t *testing.T, dir string) { rename(t, dir, "w1", "ca") }, w1, "ca.crt: is not the certificate of an authority"},
		"key mismatch":        {func(t *testing.T, dir string) { take(t, foreign.Dir, dir, "w1.key") }, w1, "w1.key: does not belong to"},
		"not PEM":             {func(t *testing.T, dir string) { spoil(t, dir, "w1.crt") }, w1, "w1.crt: is not one certificate in PEM"},
		"loose key":           {func(t *testing.T, dir string) { chmod(t, dir, "w1.key") }, w1, "w1.key: mode 0644 lets others read it"},
		"loose gossip key":    {func(t *testing.T, dir string) { chmod(t, dir, "gossip.key") }, w1, "gossip.key: mode 0644 lets others read it"},
		"wrong cluster":       {nil, Identity{Cluster: "dev", Role: RoleWitness, Name: "w1"}, `w1.crt: is of cluster "prod", not "dev"; use the certificates of this cluster`},
		"wrong role":          {nil, Identity{Cluster: "prod", Role: RoleClient, Name: "w1"}, "w1.crt: is for witness/w1, not client/w1; use the pair made for this process"},
		"wrong region":        {nil, Identity{Cluster: "prod", Role: RoleRegion, Region: "us", Name: "eu-1"}, "eu-1.crt: is for region/eu/eu-1, not region/us/eu-1"},
		"wrong name":          {func(t *testing.T, dir string) { rename(t, dir, "eu-1", "w1") }, w1, "w1.crt: is for region/eu/eu-1, not witness/w1"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := fresh(t).Dir
			if c.spoil != nil {
				c.spoil(t, dir)
			}
			_, err := Load(LoadConfig{Dir: dir, Want: c.want, Gossip: true})
			if err == nil || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), dir) {
				t.Errorf("got %v\nwant %s", err, c.text)
			}
		})
	}
}

func TestExpiredCertificateIsRefused(t *testing.T) {
	c := Config{Dir: t.TempDir(), Cluster: "prod", Identities: all, Validity: time.Nanosecond}
	generate(t, c)
	_, err := Load(LoadConfig{Dir: c.Dir, File: "w1"})
	if err == nil || !strings.Contains(err.Error(), "w1.crt: expired at ") || !strings.Contains(err.Error(), "move the pair away and run 'headlease certs' again") {
		t.Error(err)
	}
}

func TestConfigReportsAllFaultsAtOnce(t *testing.T) {
	_, err := Generate(Config{Cluster: "a/b", Validity: -1, Identities: []Identity{
		{Role: RoleWitness, Name: "../x"},
		{Role: "king", Name: "x"},
		{Role: RoleRegion, Name: "x"},
		{Role: RoleAdmin, Name: "x"},
	}})
	if err == nil {
		t.Fatal("taken")
	}
	for _, want := range []string{
		"certificate directory: must not be empty",
		`cluster "a/b": use letters`,
		"validity -1ns: must be positive",
		`name "../x": use letters`,
		`role "king": must be region, witness, client or admin`,
		"region: must not be empty",
		"admin has neither region nor name",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("missing %q in\n%v", want, err)
		}
	}
	for text, ids := range map[string][]Identity{
		"both would be x.crt": {{Role: RoleWitness, Name: "x"}, {Role: RoleClient, Name: "x"}},
		`"ca" is taken`:       {{Role: RoleClient, Name: "ca"}},
		`"gossip" is taken`:   {{Role: RoleClient, Name: "gossip"}},
	} {
		if _, err := Generate(Config{Dir: t.TempDir(), Cluster: "c", Identities: ids}); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%v", err)
		}
	}
}

func FuzzParseURI(f *testing.F) {
	for _, id := range all {
		id.Cluster = "prod"
		f.Add(id.URI())
	}
	f.Add("headlease://c/region/eu/..")
	f.Add("headlease://c/admin/")
	f.Fuzz(func(t *testing.T, s string) {
		id, err := ParseURI(s)
		if err != nil {
			return
		}
		if id.URI() != s || id.Validate() != nil || strings.Contains(id.File(), "/") {
			t.Fatalf("%q parses to %+v", s, id)
		}
	})
}

func remove(t *testing.T, dir, name string) {
	t.Helper()
	if err := os.Remove(filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}

func take(t *testing.T, from, to string, names ...string) {
	t.Helper()
	for _, name := range names {
		data, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(to, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func rename(t *testing.T, dir, from, to string) {
	t.Helper()
	for _, ext := range []string{".crt", ".key"} {
		if err := os.Rename(filepath.Join(dir, from+ext), filepath.Join(dir, to+ext)); err != nil {
			t.Fatal(err)
		}
	}
}

func spoil(t *testing.T, dir, name string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte("spoilt"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func chmod(t *testing.T, dir, name string) {
	t.Helper()
	if err := os.Chmod(filepath.Join(dir, name), 0o644); err != nil {
		t.Fatal(err)
	}
}

// reissue replaces the set by that of another cluster.
func reissue(t *testing.T, dir, cluster string) {
	t.Helper()
	other := Config{Dir: filepath.Join(t.TempDir(), "x"), Cluster: cluster}
	generate(t, other)
	take(t, other.Dir, dir, "ca.crt", "ca/ca.key")
}

func TestAuthoritySignsNothingButLeaves(t *testing.T) {
	c := fresh(t)
	data, err := os.ReadFile(filepath.Join(c.Dir, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(data)
	ca, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if !ca.IsCA || !ca.MaxPathLenZero || ca.PublicKeyAlgorithm != x509.ECDSA {
		t.Errorf("CA %v, path length zero %v, %v", ca.IsCA, ca.MaxPathLenZero, ca.PublicKeyAlgorithm)
	}
}
