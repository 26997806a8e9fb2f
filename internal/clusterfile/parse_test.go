package clusterfile

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// small is a good file that the tests bend.
const small = `
cluster: c
regions:
  - name: eu
    servers:
      - {name: eu-1, host: 10.1.0.1}
      - {name: eu-2, host: 10.1.0.2}
      - {name: eu-3, host: 10.1.0.3}
witnesses:
  - {name: w1, host: 10.9.0.1}
partitions:
  - {name: main, shards: 0-255, prefer: [eu]}
`

func parse(t *testing.T, text string, environ ...string) File {
	t.Helper()
	f, _, err := Parse([]byte(text), environ)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func faults(t *testing.T, text string, environ ...string) []string {
	t.Helper()
	_, _, err := Parse([]byte(text), environ)
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("error is %v, want *Error", err)
	}
	var out []string
	for _, f := range e.Faults {
		out = append(out, f.String())
	}
	return out
}

func TestExampleIsGoodAndMeansWhatItSays(t *testing.T) {
	f, warnings, err := Parse([]byte(Example()), nil)
	if err != nil || len(warnings) != 0 {
		t.Fatalf("error %v, warnings %q", err, warnings)
	}
	if f.Cluster != "example" || f.D != 4*time.Second || f.Shards != 256 || f.Timing != TimingLAN {
		t.Errorf("scalars: %+v", f)
	}
	want := Process{
		Name: "eu-2", Role: RoleRegion, Region: "eu", API: "10.1.0.2:7600", Votes: "10.1.0.2:7601",
		Raft: "10.1.0.2:7602", Gossip: "10.1.0.2:7603", Metrics: "127.0.0.1:7604",
	}
	if got, ok := f.Process("eu-2"); !ok || got != want {
		t.Errorf("eu-2 is %+v", got)
	}
	if w, ok := f.Witness("w3"); !ok || w.Votes != "witness-3.example.net:7601" || w.Metrics != "" {
		t.Errorf("w3 is %+v", w)
	}
	if p, ok := f.Partition("west"); !ok || len(p.Shards) != 1 || p.Shards[0] != (ShardRange{128, 255}) {
		t.Errorf("west is %+v: touching ranges should be one", p)
	}
	if n := len(f.Processes()); n != 9 {
		t.Errorf("%d processes", n)
	}
	if peers := f.Peers("w1"); len(peers) != 8 || slices.ContainsFunc(peers, func(p Process) bool { return p.Name == "w1" }) {
		t.Errorf("peers of w1: %v", peers)
	}
}

func TestDefaults(t *testing.T) {
	f := parse(t, small)
	if f.D != DefaultD || f.Shards != 256 || f.Timing != TimingLAN || f.AllowEvenWitnesses {
		t.Errorf("defaults: %+v", f)
	}
}

func TestCache(t *testing.T) {
	with := func(cache string) string {
		return strings.Replace(small, "  - name: eu\n", "  - name: eu\n    cache: "+cache+"\n", 1)
	}
	if c := parse(t, small).Regions[0].Cache; len(c.Addresses) != 0 {
		t.Errorf("without one: %+v", c)
	}
	want := Cache{Addresses: []string{"10.1.0.9:6379", "/run/redis"}, Cluster: true, Username: "u", PasswordFile: "/p", TLS: true, CAFile: "/ca"}
	got := parse(t, with(`{addresses: ["10.1.0.9:6379", /run/redis], cluster: true, username: u, password_file: /p, tls: true, ca_file: /ca}`)).Regions[0].Cache
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	got = parse(t, small, "HEADLEASE_REGIONS__0__CACHE__ADDRESSES=[10.1.0.9:6379]", "HEADLEASE_REGIONS__0__CACHE__TLS=true").Regions[0].Cache
	if !reflect.DeepEqual(got, Cache{Addresses: []string{"10.1.0.9:6379"}, TLS: true}) {
		t.Errorf("from the environment: %+v", got)
	}
	for cache, want := range map[string]string{
		`{tls: true}`:                                    "regions[0].cache.addresses: missing; name the Redis server",
		`{addresses: ["10.1.0.9"]}`:                      `regions[0].cache.addresses[0]: "10.1.0.9" has no port`,
		`{addresses: ["a:1", "b:1"]}`:                    "regions[0].cache.addresses: several are given; set cluster: true",
		`{addresses: ["a:1"], cluster: true, master: m}`: `regions[0].cache.master: "m" is for sentinels`,
		`{addresses: ["a:1"], ca_file: /ca}`:             "regions[0].cache.ca_file: is given without tls",
		`{adresses: ["a:1"]}`:                            "regions[0].cache.adresses: unknown key; did you mean addresses?",
	} {
		if got := faults(t, with(cache)); !slices.ContainsFunc(got, func(f string) bool { return strings.HasPrefix(f, want) }) {
			t.Errorf("%s: %q", cache, got)
		}
	}
}

func TestIdentities(t *testing.T) {
	f := parse(t, small)
	s, _ := f.Process("eu-1")
	w, _ := f.Process("w1")
	for got, want := range map[string]string{
		s.Identity(): "region/eu/eu-1", s.Voter(): "region/eu", w.Identity(): "witness/w1", w.Voter(): "witness/w1",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestShardForms(t *testing.T) {
	for text, want := range map[string]string{
		"0-255":                "0-255",
		`"0-3, 4-255"`:         "0-255",
		"[0-9, 20-255, 10-19]": "0-255",
		`[0, "1-255"]`:         "0-255",
	} {
		f := parse(t, strings.Replace(small, "shards: 0-255", "shards: "+text, 1))
		if got := join(f.Partitions[0].Shards); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

func TestEachFaultNamesFieldValueAndRemedy(t *testing.T) {
	replace := func(old, new string) string {
		if !strings.Contains(small, old) {
			t.Fatalf("%q is not in the file", old)
		}
		return strings.Replace(small, old, new, 1)
	}
	add := func(line string) string { return small + line + "\n" }
	for name, c := range map[string]struct{ text, want string }{
		"d low":       {add("d: 200ms"), "d: 200ms is below 1s; choose 1s to 60s"},
		"d high":      {add("d: 2m"), "d: 2m0s is above 60s; choose 1s to 60s"},
		"d no unit":   {add("d: 4"), "d: 4 has no unit; write a duration such as 4s"},
		"d no number": {add("d: soon"), `d: "soon" is not a duration; write one with its unit, such as 4s`},
		"shards":      {add("shards: 100"), "shards: 100 is not a power of two up to 65536; choose one such as 256"},
		"shards neg":  {add("shards: -1"), "shards: -1 is out of range; choose a power of two from 1 to 65536"},
		"shards big":  {add("shards: 99999999999"), "shards: 99999999999 is out of range; choose a power of two from 1 to 65536"},
		"shards text": {add("shards: many"), `shards: "many" is not a whole number; write digits only`},
		"timing":      {add("timing: fast"), `timing: "fast" is not a preset; choose lan or calm`},
		"limit":       {add("limits: {in_flight: -1}"), "limits.in_flight: -1 is not in 1 to 1048576; leave it out for the default"},
		"limit key":   {add("limits: {rates: 1}"), "limits.rates: unknown key; did you mean rate?"},
		"limit type":  {add("limits: {rate: fast}"), `limits.rate: "fast" is not a whole number; write digits only`},
		"bool":        {add("allow_even_witnesses: 1"), "allow_even_witnesses: 1 is not a yes or no; write true or false"},
		"cluster":     {replace("cluster: c", "cluster: 7"), "cluster: 7 is not text; put it in quotes"},
		"no cluster":  {replace("cluster: c", ""), "cluster: missing; give a name of a-z, 0-9 and -"},
		"bad name":    {replace("name: w1", "name: W_1"), `witnesses[0].name: "W_1" is not a name; use a-z, 0-9 and -, and begin with a letter or digit`},
		"long name": {
			replace("name: w1", "name: "+strings.Repeat("w", 64)),
			`witnesses[0].name: "` + strings.Repeat("w", 64) + `" has 64 characters; use at most 63`,
		},
		"same name": {
			replace("name: w1", "name: eu"),
			`witnesses[0].name: "eu" is also regions[0].name; give each region, server and witness a name of its own`,
		},
		"seven servers":  {replace("      - {name: eu-3, host: 10.1.0.3}\n", sevenServers), "regions[0].servers: 7 listed; use 3 or 5 (1 for development only)"},
		"unknown top":    {add("witneses: []"), "witneses: unknown key; did you mean witnesses?"},
		"unknown server": {replace("{name: eu-2, host:", "{name: eu-2, hots:"), "regions[0].servers[1].hots: unknown key; did you mean host?"},
		"unknown, far":   {replace("prefer: [eu]", "prefer: [eu], colour: red"), "partitions[0].colour: unknown key; known here: name, shards, prefer, failback"},
		"failback":       {replace("prefer: [eu]", "prefer: [eu], failback: always"), `partitions[0].failback: "always" is no way to fail back; choose manual or auto`},
		"even": {
			replace("witnesses:\n", "witnesses:\n  - {name: w2, host: 10.9.0.2}\n"),
			"witnesses: 2 listed, an even number that tolerates no more losses than 1; use 1 or 3, or set allow_even_witnesses: true",
		},
		"no witness": {
			replace("witnesses:\n  - {name: w1, host: 10.9.0.1}\n", ""),
			"witnesses: none listed; list 1, 3, 5 or 7, or set allow_even_witnesses: true and accept that two regions alone decide nothing once either is lost",
		},
		"no address": {
			replace("{name: w1, host: 10.9.0.1}", "{name: w1, votes: 10.9.0.1:7601}"),
			"witnesses[0].gossip: missing; give host, or gossip as host:port",
		},
		"no port":     {replace("host: 10.9.0.1", "host: 10.9.0.1, votes: 10.9.0.1"), `witnesses[0].votes: "10.9.0.1" has no port; write host:port, such as 10.0.0.1:7600`},
		"bad port":    {replace("host: 10.9.0.1", "host: 10.9.0.1, votes: '10.9.0.1:99999'"), `witnesses[0].votes: "10.9.0.1:99999" has no port from 1 to 65535 after the colon; write host:port, such as 10.0.0.1:7600`},
		"bad host":    {replace("host: 10.9.0.1", "host: 10.9.0.1, votes: 'a b:1'"), `witnesses[0].votes: "a b:1" has no host name or IP address before the colon; write host:port, such as 10.0.0.1:7600`},
		"unspecified": {replace("host: 10.9.0.1", "host: 10.9.0.1, votes: '0.0.0.0:7601'"), `witnesses[0].votes: "0.0.0.0:7601" is no address that a peer can dial; name the host or its IP address`},
		"shared": {
			replace("host: 10.9.0.1", "host: 10.9.0.1, gossip: '10.1.0.2:7600'"),
			"witnesses[0].gossip: 10.1.0.2:7600 is also regions[0].servers[1].api; give each its own",
		},
		"gap":       {replace("0-255", `"0-99,101-254"`), "partitions: no partition has shards 100,255; every shard belongs to exactly one, add them"},
		"beyond":    {replace("0-255", "0-300"), "partitions[0].shards: 0-300 goes beyond the cluster's 256 shards; stay within 0-255"},
		"twice":     {replace("0-255", `"0-255,7"`), "partitions[0].shards: 7 listed twice; every shard belongs to exactly one partition, list it once"},
		"backwards": {replace("0-255", "9-0"), `partitions[0].shards: "9-0" runs backwards; write 0-9`},
		"no range":  {replace("0-255", "all"), `partitions[0].shards: "all" is not a range of shards; write ranges such as 0-127 or 0-3,8`},
		"unquoted":  {replace("0-255", "0-3,4-255"), `partitions[0].4-255: unknown key; put a list of shards in quotes, such as "0-3,8"`},
		"overlap": {
			add("  - {name: other, shards: 4-8, prefer: [eu]}"),
			"partitions[1].shards: 4-8 also in partitions[0]; every shard belongs to exactly one partition, list it once",
		},
		"unknown region": {replace("[eu]", "[eu, moon]"), `partitions[0].prefer[1]: "moon" is not a region of this file; choose one of eu`},
		"repeat":         {replace("[eu]", "[eu, eu]"), `partitions[0].prefer[1]: "eu" is listed twice; list each region once`},
		"nobody":         {replace("prefer: [eu]", "prefer: []"), "partitions[0].prefer: missing; list the regions that may own the partition, the most preferred first"},
		"not a list":     {replace("prefer: [eu]", "prefer: eu"), "partitions[0].prefer: \"eu\" is not a list; write one as [a, b] or with a dash per line"},
		"not a mapping":  {replace("{name: w1, host: 10.9.0.1}", "w1"), "witnesses[0]: \"w1\" is not a mapping; write its keys, such as name, below it"},
		"name":           {add("name: eu-9"), `name: "eu-9" is neither a server nor a witness of this file; choose one of eu-1, eu-2, eu-3, w1`},
		"yaml":           {"cluster: [", "not YAML: line 1: did not find expected node content"},
		"yaml twice":     {add("cluster: d"), "not YAML: unmarshal errors:\n  line 13: mapping key \"cluster\" already defined at line 2"},
	} {
		t.Run(name, func(t *testing.T) {
			got := faults(t, c.text)
			if len(got) != 1 || got[0] != c.want {
				t.Errorf("faults\n%s\nwant only\n%s", strings.Join(got, "\n"), c.want)
			}
		})
	}
}

func TestAllFaultsAtOnceInTheOrderOfTheFile(t *testing.T) {
	got := faults(t, `
d: 200ms
shards: 3
sharts: 4
regions: [{name: eu, servers: [{name: a, host: h}, {name: a}]}]
partitions: [{name: main, shards: 0-1, prefer: [us]}]
`)
	want := []string{
		"cluster: missing; give a name of a-z, 0-9 and -",
		"d: 200ms is below 1s; choose 1s to 60s",
		"shards: 3 is not a power of two up to 65536; choose one such as 256",
		`regions[0].servers[1].name: "a" is also regions[0].servers[0].name; give each region, server and witness a name of its own`,
		"regions[0].servers[1].api: missing; give host, or api as host:port",
		"regions[0].servers[1].votes: missing; give host, or votes as host:port",
		"regions[0].servers[1].raft: missing; give host, or raft as host:port",
		"regions[0].servers[1].gossip: missing; give host, or gossip as host:port",
	}
	for _, w := range want {
		if !slices.Contains(got, w) {
			t.Errorf("missing fault: %s", w)
		}
	}
	at := -1
	for _, w := range want {
		i := slices.Index(got, w)
		if i < at {
			t.Errorf("out of order: %s", w)
		}
		at = i
	}
	if !slices.Contains(got, "sharts: unknown key; did you mean shards?") {
		t.Errorf("no fault for sharts in %q", got)
	}
}

func TestWarnings(t *testing.T) {
	one := strings.Replace(small, "      - {name: eu-2, host: 10.1.0.2}\n      - {name: eu-3, host: 10.1.0.3}\n", "", 1)
	_, warnings, err := Parse([]byte(one), []string{"HEADLEASE_SERVICE_HOST=10.0.0.9", "HEADLEASE_SHARD=4", "HEADLEASE_TOKEN=8589934593"})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"HEADLEASE_SHARD names no key; did you mean HEADLEASE_SHARDS?",
		"regions[0].servers: region eu has one server: its death is the region's; for development only, use 3 or 5",
	}
	if !slices.Equal(warnings, want) {
		t.Errorf("warnings %q", warnings)
	}
	// While a server is replaced there is one more.
	four := strings.Replace(small, "host: 10.1.0.3}\n", "host: 10.1.0.3}\n      - {name: eu-4, host: 10.1.0.4}\n", 1)
	_, warnings, err = Parse([]byte(four), nil)
	if err != nil || len(warnings) != 1 || !strings.Contains(warnings[0], "4 servers, an even number, which survives no more losses than 3") {
		t.Errorf("four servers: %q, %v", warnings, err)
	}
}

// sevenServers is the third to the seventh.
const sevenServers = `      - {name: eu-3, host: 10.1.0.3}
      - {name: eu-4, host: 10.1.0.4}
      - {name: eu-5, host: 10.1.0.5}
      - {name: eu-6, host: 10.1.0.6}
      - {name: eu-7, host: 10.1.0.7}
`

// A metrics address on loopback is taken on its own host only.
func TestLoopbackMetricsCollideOnOneHostOnly(t *testing.T) {
	parse(t, small)
	local := strings.NewReplacer(
		"host: 10.1.0.1", "host: 127.0.0.1",
		"host: 10.1.0.2", "host: 127.0.0.1, api: '127.0.0.1:1', votes: '127.0.0.1:2', raft: '127.0.0.1:3', gossip: '127.0.0.1:4'",
	).Replace(small)
	got := faults(t, local)
	want := "regions[0].servers[1].metrics: 127.0.0.1:7604 is also regions[0].servers[0].metrics; give each its own"
	if len(got) != 1 || got[0] != want {
		t.Errorf("faults %q", got)
	}
	parse(t, strings.Replace(local, "gossip: '127.0.0.1:4'", "gossip: '127.0.0.1:4', metrics: off", 1))
}

func TestIPv6(t *testing.T) {
	f := parse(t, strings.Replace(small, "host: 10.9.0.1", "host: 'fd00::1'", 1))
	if w, _ := f.Witness("w1"); w.Votes != "[fd00::1]:7601" {
		t.Errorf("votes at %s", w.Votes)
	}
}
