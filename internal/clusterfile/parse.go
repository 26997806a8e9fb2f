package clusterfile

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/v2"
)

// raw is the file as written, before defaults. Its tags are the known keys.
type raw struct {
	Cluster            string         `mapstructure:"cluster"`
	D                  string         `mapstructure:"d"`
	Shards             *int64         `mapstructure:"shards"`
	Timing             string         `mapstructure:"timing"`
	AllowEvenWitnesses bool           `mapstructure:"allow_even_witnesses"`
	Regions            []rawRegion    `mapstructure:"regions"`
	Witnesses          []rawWitness   `mapstructure:"witnesses"`
	Partitions         []rawPartition `mapstructure:"partitions"`
	Limits             rawLimits      `mapstructure:"limits"`
	Certs              string         `mapstructure:"certs"`
	DataDir            string         `mapstructure:"data_dir"`
	Name               string         `mapstructure:"name"`
}

type rawLimits struct {
	InFlight int64 `mapstructure:"in_flight"`
	Rate     int64 `mapstructure:"rate"`
	Burst    int64 `mapstructure:"burst"`
}

type rawRegion struct {
	Name    string      `mapstructure:"name"`
	Servers []rawServer `mapstructure:"servers"`
	Cache   rawCache    `mapstructure:"cache"`
}

type rawCache struct {
	Addresses    []string `mapstructure:"addresses"`
	Cluster      bool     `mapstructure:"cluster"`
	Master       string   `mapstructure:"master"`
	Username     string   `mapstructure:"username"`
	PasswordFile string   `mapstructure:"password_file"`
	TLS          bool     `mapstructure:"tls"`
	CAFile       string   `mapstructure:"ca_file"`
}

type rawServer struct {
	Name    string `mapstructure:"name"`
	Host    string `mapstructure:"host"`
	API     string `mapstructure:"api"`
	Votes   string `mapstructure:"votes"`
	Raft    string `mapstructure:"raft"`
	Gossip  string `mapstructure:"gossip"`
	Metrics string `mapstructure:"metrics"`
}

type rawWitness struct {
	Name    string `mapstructure:"name"`
	Host    string `mapstructure:"host"`
	Votes   string `mapstructure:"votes"`
	Gossip  string `mapstructure:"gossip"`
	Metrics string `mapstructure:"metrics"`
}

type rawPartition struct {
	Name     string   `mapstructure:"name"`
	Shards   any      `mapstructure:"shards"`
	Prefer   []string `mapstructure:"prefer"`
	Failback string   `mapstructure:"failback"`
}

// Parse reads a cluster file and an environment ("KEY=value", as from
// os.Environ; nil for none). The warnings are for people: the file is good,
// but something in it deserves a look. The error is an *Error.
func Parse(data []byte, environ []string) (f File, warnings []string, err error) {
	k := koanf.New("\x00") // no key holds it: keys with dots stay what they are
	if err := k.Load(bytesProvider(data), yaml.Parser()); err != nil {
		return File{}, nil, &Error{Faults: []Fault{{Problem: "not YAML: " + strings.TrimPrefix(err.Error(), "yaml: ")}}}
	}
	warnings, faults := overlay(k, environ)

	var r raw
	faults = append(faults, decode(k.Raw(), &r)...)
	f, more := withDefaults(r)
	faults = append(faults, more...)
	more, notes := f.check(faultyPaths(faults))
	faults = append(faults, more...)
	if len(faults) > 0 {
		return File{}, warnings, &Error{Faults: inOrder(faults)}
	}
	return f, append(warnings, notes...), nil
}

// decode fills r from the keys of m. It is strict: a key that r does not know
// and a value of another type are faults.
func decode(m map[string]any, r *raw) []Fault {
	var meta mapstructure.Metadata
	d, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		Result: r, Metadata: &meta,
		DecodeHook: checkShape,
		MatchName:  func(key, field string) bool { return key == field },
	})
	if err != nil {
		return []Fault{{Problem: err.Error()}}
	}
	faults := typeFaults(d.Decode(m))
	for _, path := range meta.Unused {
		faults = append(faults, unknownKey(path))
	}
	return faults
}

// checkShape refuses anything but a list for a list and a mapping for a mapping,
// with the value, which the decoder's own errors leave out.
func checkShape(from, to reflect.Value) (any, error) {
	want := to.Kind()
	if want == reflect.Slice && from.Kind() != reflect.Slice || want == reflect.Struct && from.Kind() != reflect.Map {
		return nil, &mapstructure.UnconvertibleTypeError{Expected: to, Value: from.Interface()}
	}
	return from.Interface(), nil
}

// typeFaults turns a decoder's joined errors into faults.
func typeFaults(err error) []Fault {
	if err == nil {
		return nil
	}
	if one := (*mapstructure.DecodeError)(nil); isDecodeError(err, &one) {
		inner := one.Unwrap()
		if many, ok := inner.(interface{ Unwrap() []error }); ok {
			return typeFaultsOf(many.Unwrap())
		}
		return []Fault{{Path: one.Name(), Problem: typeProblem(one.Name(), inner)}}
	}
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		return typeFaultsOf(many.Unwrap())
	}
	if inner := errors.Unwrap(err); inner != nil {
		return typeFaults(inner)
	}
	return []Fault{{Problem: err.Error()}}
}

func isDecodeError(err error, to **mapstructure.DecodeError) bool {
	e, ok := err.(*mapstructure.DecodeError) //nolint:errorlint // this level only
	if ok {
		*to = e
	}
	return ok
}

func typeFaultsOf(errs []error) []Fault {
	var faults []Fault
	for _, err := range errs {
		faults = append(faults, typeFaults(err)...)
	}
	return faults
}

func typeProblem(path string, err error) string {
	var u *mapstructure.UnconvertibleTypeError
	if errors.As(err, &u) {
		if path == "d" {
			return fmt.Sprintf("%s has no unit; write a duration such as 4s", show(u.Value))
		}
		return fmt.Sprintf("%s is not %s", show(u.Value), wanted(u.Expected.Type()))
	}
	return err.Error()
}

func show(v any) string {
	switch v := v.(type) {
	case string:
		return strconv.Quote(v)
	case map[string]any:
		return "a mapping"
	case []any:
		return "a list"
	default:
		return fmt.Sprint(v)
	}
}

func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "text; put it in quotes"
	case reflect.Bool:
		return "a yes or no; write true or false"
	case reflect.Slice:
		return "a list; write one as [a, b] or with a dash per line"
	case reflect.Struct:
		return "a mapping; write its keys, such as name, below it"
	default:
		return "a whole number; write digits only"
	}
}

// withDefaults turns the file as written into a File with every default in
// place. It reports what it cannot even read; Validate does the rest.
func withDefaults(r raw) (File, []Fault) {
	f := File{
		Cluster: r.Cluster, D: DefaultD, Shards: defaultShards, Timing: TimingLAN,
		AllowEvenWitnesses: r.AllowEvenWitnesses, Name: r.Name, DataDir: r.DataDir, Certs: r.Certs,
		Limits: Limits(r.Limits),
	}
	var faults []Fault
	if r.D != "" {
		d, err := time.ParseDuration(r.D)
		if err != nil {
			faults = append(faults, Fault{"d", fmt.Sprintf("%q is not a duration; write one with its unit, such as 4s", r.D)})
		} else {
			f.D = d
		}
	}
	if r.Shards != nil {
		if *r.Shards < 1 || *r.Shards > maxShards {
			faults = append(faults, Fault{"shards", fmt.Sprintf("%d is out of range; choose a power of two from 1 to %d", *r.Shards, maxShards)})
		} else {
			f.Shards = uint32(*r.Shards)
		}
	}
	if r.Timing != "" {
		f.Timing = Timing(r.Timing)
	}
	for _, region := range r.Regions {
		out := Region{Name: region.Name, Cache: Cache(region.Cache)}
		for _, s := range region.Servers {
			out.Servers = append(out.Servers, Server{
				Name:    s.Name,
				API:     address(s.API, s.Host, DefaultAPIPort),
				Votes:   address(s.Votes, s.Host, DefaultVotesPort),
				Raft:    address(s.Raft, s.Host, DefaultRaftPort),
				Gossip:  address(s.Gossip, s.Host, DefaultGossipPort),
				Metrics: metrics(s.Metrics),
			})
		}
		f.Regions = append(f.Regions, out)
	}
	for _, w := range r.Witnesses {
		f.Witnesses = append(f.Witnesses, Witness{
			Name:    w.Name,
			Votes:   address(w.Votes, w.Host, DefaultVotesPort),
			Gossip:  address(w.Gossip, w.Host, DefaultGossipPort),
			Metrics: metrics(w.Metrics),
		})
	}
	for i, p := range r.Partitions {
		ranges, problem := parseShards(p.Shards)
		if problem != "" {
			faults = append(faults, Fault{fmt.Sprintf("partitions[%d].shards", i), problem})
		}
		f.Partitions = append(f.Partitions, Partition{
			Name: p.Name, Shards: ranges, Prefer: p.Prefer, Failback: cmp.Or(Failback(p.Failback), FailbackManual),
		})
	}
	return f, faults
}

func address(given, host string, port int) string {
	if given != "" || host == "" {
		return given
	}
	if strings.Contains(host, ":") && !strings.HasPrefix(host, "[") {
		host = "[" + host + "]"
	}
	return host + ":" + strconv.Itoa(port)
}

func metrics(given string) string {
	switch given {
	case "":
		return defaultMetrics
	case metricsOff:
		return ""
	}
	return given
}

// parseShards reads "0-127", "0-3,8", 8, or a list of those.
func parseShards(v any) (ranges []ShardRange, problem string) {
	const remedy = "write ranges such as 0-127 or 0-3,8"
	switch v := v.(type) {
	case nil:
		return nil, "missing; " + remedy
	case int:
		return parseShards(strconv.Itoa(v))
	case string:
		for part := range strings.SplitSeq(v, ",") {
			part = strings.TrimSpace(part)
			first, last, isRange := strings.Cut(part, "-")
			if !isRange {
				last = first
			}
			a, errA := strconv.ParseUint(strings.TrimSpace(first), 10, 32)
			b, errB := strconv.ParseUint(strings.TrimSpace(last), 10, 32)
			if errA != nil || errB != nil {
				return nil, fmt.Sprintf("%q is not a range of shards; %s", part, remedy)
			}
			if a > b {
				return nil, fmt.Sprintf("%q runs backwards; write %d-%d", part, b, a)
			}
			ranges = append(ranges, ShardRange{uint32(a), uint32(b)})
		}
	case []any:
		for _, item := range v {
			more, problem := parseShards(item)
			if problem != "" {
				return nil, problem
			}
			ranges = append(ranges, more...)
		}
	default:
		return nil, fmt.Sprintf("%s is not a range of shards; %s", show(v), remedy)
	}
	slices.SortFunc(ranges, func(a, b ShardRange) int { return int(int64(a.First) - int64(b.First)) })
	return merge(ranges), ""
}

// merge joins ranges that touch. Overlaps stay apart: Validate names them.
func merge(ranges []ShardRange) []ShardRange {
	var out []ShardRange
	for _, r := range ranges {
		if n := len(out); n > 0 && uint64(out[n-1].Last)+1 == uint64(r.First) {
			out[n-1].Last = r.Last
			continue
		}
		out = append(out, r)
	}
	return out
}

// bytesProvider feeds bytes to koanf.
type bytesProvider []byte

func (p bytesProvider) ReadBytes() ([]byte, error) { return p, nil }

func (p bytesProvider) Read() (map[string]any, error) {
	return nil, errors.New("bytes need a parser")
}
