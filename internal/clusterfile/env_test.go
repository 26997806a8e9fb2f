package clusterfile

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestEveryKeyFromTheEnvironment(t *testing.T) {
	f := parse(t, small,
		"HEADLEASE_CLUSTER=other", "HEADLEASE_D=2s", "HEADLEASE_SHARDS=512", "HEADLEASE_TIMING=calm",
		"HEADLEASE_ALLOW_EVEN_WITNESSES=true", "HEADLEASE_NAME=eu-2", "HEADLEASE_DATA_DIR=data", "HEADLEASE_CERTS=certs",
		"HEADLEASE_REGIONS__0__SERVERS__1__API=10.1.0.2:17600",
		"HEADLEASE_WITNESSES__1__NAME=w2", "HEADLEASE_WITNESSES__1__HOST=10.9.0.2",
		"HEADLEASE_PARTITIONS__0__SHARDS=0-511",
		"PATH=irrelevant", "HEADLEASE_REGIONS=", "HEADLEASE_CERT=", "HEADLEASE_SERVICE_PORT=1",
	)
	if f.Cluster != "other" || f.D != 2*time.Second || f.Shards != 512 || f.Timing != TimingCalm || !f.AllowEvenWitnesses ||
		f.Name != "eu-2" || f.DataDir != "data" || f.Certs != "certs" {
		t.Errorf("scalars: %+v", f)
	}
	if s, _, _ := f.Server("eu-2"); s.API != "10.1.0.2:17600" || s.Votes != "10.1.0.2:7601" {
		t.Errorf("eu-2: %+v", s)
	}
	if w, ok := f.Witness("w2"); !ok || w.Gossip != "10.9.0.2:7603" {
		t.Errorf("w2: %+v", w)
	}
	if p := f.Partitions[0]; !slices.Equal(p.Shards, []ShardRange{{0, 511}}) {
		t.Errorf("shards: %v", p.Shards)
	}
}

func TestWholeListsFromTheEnvironment(t *testing.T) {
	f := parse(t, small,
		"HEADLEASE_WITNESSES=[{name: x, host: a.example}, {name: y, host: b.example}, {name: z, host: c.example}]",
		"HEADLEASE_PARTITIONS=[{name: p, shards: 0-255, prefer: [eu]}]")
	if len(f.Witnesses) != 3 || f.Witnesses[2].Votes != "c.example:7601" || f.Partitions[0].Name != "p" {
		t.Errorf("%+v", f)
	}
	parse(t, "", // no file at all
		"HEADLEASE_CLUSTER=c", "HEADLEASE_REGIONS=[{name: eu, servers: [{name: e, host: h}]}]",
		"HEADLEASE_WITNESSES=[{name: w, host: g}]", "HEADLEASE_PARTITIONS=[{name: p, shards: 0-255, prefer: [eu]}]")
}

func TestClusterNameOfDigitsFromTheEnvironmentIsText(t *testing.T) {
	if f := parse(t, small, "HEADLEASE_CLUSTER=42"); f.Cluster != "42" {
		t.Errorf("cluster %q", f.Cluster)
	}
}

func TestEnvironmentFaults(t *testing.T) {
	for env, want := range map[string]string{
		"HEADLEASE_D=1ms":                           "d: 1ms is below 1s; choose 1s to 60s",
		"HEADLEASE_SHARDS=x":                        `shards: "x" is not a whole number; write digits only`,
		"HEADLEASE_WITNESSES=[":                     `HEADLEASE_WITNESSES="[": not YAML; write the value as in the file, on one line`,
		"HEADLEASE_WITNESSES__7__NAME=w":            "HEADLEASE_WITNESSES__7: no such place; the list has 1, use 0 to 1",
		"HEADLEASE_CLUSTER__X=1":                    `HEADLEASE_CLUSTER: sets a part of "c", which has none`,
		"HEADLEASE_REGIONS__0__SERVERS__0__HOSTS=1": "regions[0].servers[0].hosts: unknown key; did you mean host?",
		"HEADLEASE_PARTITIONS__0__PREFER=eu,us":     `partitions[0].prefer[1]: "us" is not a region of this file; choose one of eu`,
	} {
		if got := faults(t, small, env); len(got) != 1 || got[0] != want {
			t.Errorf("%s\n got %s\nwant %s", env, strings.Join(got, "\n     "), want)
		}
	}
	got := faults(t, small, "HEADLEASE_WITNESSES=[]", "HEADLEASE_WITNESSES__0__NAME=w")
	if !slices.Contains(got, "HEADLEASE_WITNESSES__0__NAME and HEADLEASE_WITNESSES are both set; set the whole or its parts") {
		t.Errorf("faults %q", got)
	}
}

// FuzzParse: no input panics; what is accepted obeys the rules that the rest of
// the system relies on, and passes Validate once more.
func FuzzParse(f *testing.F) {
	f.Add([]byte(Example()), "")
	f.Add([]byte(small), "HEADLEASE_D=2s")
	f.Add([]byte(small), "HEADLEASE_WITNESSES__1__NAME=w2")
	f.Add([]byte("regions: [{servers: [1, {1: 2}]}]\n1: {2: 3}"), "HEADLEASE_PARTITIONS=[[]]")
	f.Fuzz(func(t *testing.T, data []byte, env string) {
		file, _, err := Parse(data, []string{env})
		if err != nil {
			if err.Error() == "" {
				t.Fatal("refused without a word")
			}
			return
		}
		if _, err := file.Validate(); err != nil {
			t.Fatalf("accepted, then refused: %v", err)
		}
		owners := make([]int, file.Shards)
		for _, p := range file.Partitions {
			for _, r := range p.Shards {
				for s := r.First; s <= r.Last; s++ {
					owners[s]++
				}
			}
		}
		for s, n := range owners {
			if n != 1 {
				t.Fatalf("shard %d has %d owners", s, n)
			}
		}
	})
}
