package clusterfile

import (
	"fmt"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/headlease/headlease/shard"
)

const (
	defaultShards = shard.DefaultCount
	maxShards     = shard.MaxCount
	maxInFlight   = 1 << 20
	maxRate       = 10_000_000
)

var (
	namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]*$`)
	hostPattern = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$`)
)

// Validate checks a file, with its defaults in place, as Parse does. The error
// is an *Error with all faults; the warnings are for people.
func (f File) Validate() (warnings []string, err error) {
	faults, warnings := f.check(nil)
	if len(faults) > 0 {
		return warnings, &Error{Faults: inOrder(faults)}
	}
	return warnings, nil
}

// checker gathers faults. Paths in skip have been reported already.
type checker struct {
	skip     map[string]bool
	faults   []Fault
	warnings []string
	names    map[string]string // name → path of its first use
	taken    map[string]string // address → path of its first use
}

func (c *checker) fault(path, format string, args ...any) {
	if !c.skip[path] {
		c.faults = append(c.faults, Fault{path, fmt.Sprintf(format, args...)})
	}
}

func (c *checker) limit(path string, v, most int64) {
	if v < 0 || v > most {
		c.fault(path, "%d is not in 1 to %d; leave it out for the default", v, most)
	}
}

// missing reports a field that was left out.
func (c *checker) missing(path, remedy string) {
	if !c.skip[parentOf(path)+".*"] || parentOf(path) == "" {
		c.fault(path, "missing; %s", remedy)
	}
}

func (c *checker) warn(path, format string, args ...any) {
	c.warnings = append(c.warnings, path+": "+fmt.Sprintf(format, args...))
}

func (f File) check(skip map[string]bool) ([]Fault, []string) {
	c := &checker{skip: skip, names: map[string]string{}, taken: map[string]string{}}
	c.name("cluster", f.Cluster)
	switch {
	case f.D < MinD:
		c.fault("d", "%v is below %v; choose %v to %v", f.D, MinD, MinD, "60s")
	case f.D > MaxD:
		c.fault("d", "%v is above %v; choose %v to %v", f.D, "60s", MinD, "60s")
	}
	if !goodCount(f.Shards) {
		c.fault("shards", "%d is not a power of two up to %d; choose one such as %d", f.Shards, maxShards, defaultShards)
	}
	if f.Timing != TimingLAN && f.Timing != TimingCalm {
		c.fault("timing", "%q is not a preset; choose %s or %s", f.Timing, TimingLAN, TimingCalm)
	}
	c.limit("limits.in_flight", f.Limits.InFlight, maxInFlight)
	c.limit("limits.rate", f.Limits.Rate, maxRate)
	c.limit("limits.burst", f.Limits.Burst, maxRate)
	c.regions(f)
	c.witnesses(f)
	c.partitions(f)
	if f.Name != "" {
		if _, ok := f.Process(f.Name); !ok {
			c.fault("name", "%q is neither a server nor a witness of this file; %s", f.Name, oneOf(f.processNames()))
		}
	}
	return c.faults, c.warnings
}

func goodCount(shards uint32) bool {
	return shards > 0 && shards <= maxShards && shards&(shards-1) == 0
}

func (f File) processNames() []string {
	var names []string
	for _, p := range f.Processes() {
		names = append(names, p.Name)
	}
	return names
}

func oneOf(names []string) string {
	if len(names) == 0 {
		return "it lists none; add it"
	}
	return "choose one of " + strings.Join(names, ", ")
}

func (c *checker) name(path, name string) bool {
	switch {
	case name == "":
		c.missing(path, "give a name of a-z, 0-9 and -")
	case len(name) > MaxNameLength:
		c.fault(path, "%q has %d characters; use at most %d", name, len(name), MaxNameLength)
	case !namePattern.MatchString(name):
		c.fault(path, "%q is not a name; use a-z, 0-9 and -, and begin with a letter or digit", name)
	default:
		return true
	}
	return false
}

// processName checks a name of a region, server or witness: they share one
// name space, since faults, certificates and status name them without a role.
func (c *checker) processName(path, name string) {
	if !c.name(path, name) {
		return
	}
	if first, dup := c.names[name]; dup {
		c.fault(path, "%q is also %s; give each region, server and witness a name of its own", name, first)
		return
	}
	c.names[name] = path
}

func (c *checker) regions(f File) {
	if len(f.Regions) == 0 {
		c.fault("regions", "none listed; list at least one region with its servers")
	}
	for i, r := range f.Regions {
		path := fmt.Sprintf("regions[%d]", i)
		c.processName(path+".name", r.Name)
		switch n := len(r.Servers); n {
		case 3, 5:
		case 2, 4, 6: // while one is being added or replaced
			c.warn(path+".servers", "region %s has %d servers, an even number, which survives no more losses than %d: for the time in which one is replaced; else use 3 or 5", r.Name, n, n-1)
		case 1:
			c.warn(path+".servers", "region %s has one server: its death is the region's; for development only, use 3 or 5", r.Name)
		default:
			c.fault(path+".servers", "%d listed; use 3 or 5 (1 for development only)", n)
		}
		c.cache(path+".cache", r.Cache)
		for j, s := range r.Servers {
			path := fmt.Sprintf("%s.servers[%d]", path, j)
			c.processName(path+".name", s.Name)
			c.address(path+".api", s.API, "")
			c.address(path+".votes", s.Votes, "")
			c.address(path+".raft", s.Raft, "")
			c.address(path+".gossip", s.Gossip, "")
			if s.Metrics != "" {
				c.address(path+".metrics", s.Metrics, s.Votes)
			}
		}
	}
}

func (c *checker) cache(path string, cache Cache) {
	if len(cache.Addresses) == 0 {
		if !reflect.DeepEqual(cache, Cache{}) {
			c.missing(path+".addresses", "name the Redis server as host:port, or leave cache out")
		}
		return
	}
	for i, address := range cache.Addresses {
		if strings.HasPrefix(address, "/") { // a unix socket
			continue
		}
		if _, problem := splitAddress(address); problem != "" {
			c.fault(fmt.Sprintf("%s.addresses[%d]", path, i), "%q %s, or the path of a unix socket", address, problem)
		}
	}
	switch {
	case cache.Cluster && cache.Master != "":
		c.fault(path+".master", "%q is for sentinels, and cluster is set; leave one of them out", cache.Master)
	case len(cache.Addresses) > 1 && !cache.Cluster && cache.Master == "":
		c.fault(path+".addresses", "several are given; set cluster: true for a Redis Cluster, or master for sentinels")
	}
	if cache.CAFile != "" && !cache.TLS {
		c.fault(path+".ca_file", "is given without tls; set tls: true")
	}
}

func (c *checker) witnesses(f File) {
	n := len(f.Witnesses)
	switch {
	case n > MaxWitnesses:
		c.fault("witnesses", "%d listed; use at most %d", n, MaxWitnesses)
	case n == 0 && !f.AllowEvenWitnesses:
		c.fault("witnesses", "none listed; list 1, 3, 5 or 7, or set allow_even_witnesses: true and accept that two regions alone decide nothing once either is lost")
	case n%2 == 0 && !f.AllowEvenWitnesses:
		c.fault("witnesses", "%d listed, an even number that tolerates no more losses than %d; use %d or %d, or set allow_even_witnesses: true",
			n, n-1, n-1, n+1)
	}
	for i, w := range f.Witnesses {
		path := fmt.Sprintf("witnesses[%d]", i)
		c.processName(path+".name", w.Name)
		c.address(path+".votes", w.Votes, "")
		c.address(path+".gossip", w.Gossip, "")
		if w.Metrics != "" {
			c.address(path+".metrics", w.Metrics, w.Votes)
		}
	}
}

// address checks host:port. owner is set for an address that only the own host
// can reach if it is a loopback one: such an address is shared only with
// processes of the same host.
func (c *checker) address(path, address, owner string) {
	if address == "" {
		field := path[strings.LastIndexByte(path, '.')+1:]
		c.missing(path, fmt.Sprintf("give host, or %s as host:port", field))
		return
	}
	host, problem := splitAddress(address)
	if problem != "" {
		c.fault(path, "%q %s", address, problem)
		return
	}
	key := strings.ToLower(address)
	if ip, err := netip.ParseAddr(host); err == nil {
		if ip.IsUnspecified() {
			c.fault(path, "%q is no address that a peer can dial; name the host or its IP address", address)
			return
		}
		if ip.IsLoopback() && owner != "" {
			if ownerHost, _ := splitAddress(owner); ownerHost != host {
				key = ownerHost + " " + key
			}
		}
	}
	if first, dup := c.taken[key]; dup {
		c.fault(path, "%s is also %s; give each its own", address, first)
		return
	}
	c.taken[key] = path
}

func splitAddress(address string) (host, problem string) {
	const remedy = "; write host:port, such as 10.0.0.1:7600"
	i := strings.LastIndexByte(address, ':')
	if i < 0 {
		return "", "has no port" + remedy
	}
	host = address[:i]
	port, err := strconv.ParseUint(address[i+1:], 10, 16)
	if err != nil || port == 0 {
		return "", fmt.Sprintf("has no port from 1 to 65535 after the colon%s", remedy)
	}
	if inner, ok := strings.CutPrefix(host, "["); ok {
		inner, closed := strings.CutSuffix(inner, "]")
		if ip, err := netip.ParseAddr(inner); err != nil || !closed || !ip.Is6() {
			return "", "has no IPv6 address in its brackets" + remedy
		}
		return inner, ""
	}
	if !hostPattern.MatchString(host) {
		return "", "has no host name or IP address before the colon" + remedy
	}
	return host, ""
}

func (c *checker) partitions(f File) {
	if len(f.Partitions) == 0 {
		c.fault("partitions", "none listed; list at least one with its shards and preferred regions, such as {name: main, shards: 0-%d, prefer: [%s]}",
			max(f.Shards, 1)-1, strings.Join(f.RegionNames(), ", "))
		return
	}
	names := map[string]int{}
	owner := make([]int, min(f.Shards, maxShards)) // shard → partition+1
	readable := goodCount(f.Shards) && !c.skip["shards"]
	for i, p := range f.Partitions {
		path := fmt.Sprintf("partitions[%d]", i)
		if c.name(path+".name", p.Name) {
			if first, dup := names[p.Name]; dup {
				c.fault(path+".name", "%q is also partitions[%d].name; give each partition a name of its own", p.Name, first)
			} else {
				names[p.Name] = i
			}
		}
		c.prefer(path+".prefer", f, p)
		if p.Failback != FailbackManual && p.Failback != FailbackAuto {
			c.fault(path+".failback", "%q is no way to fail back; choose manual or auto", p.Failback)
		}
		readable = readable && !c.skip[path+".*"]
		if c.skip[path+".shards"] || !goodCount(f.Shards) || c.skip["shards"] {
			readable = false
			continue
		}
		if len(p.Shards) == 0 {
			c.missing(path+".shards", "write ranges such as 0-127 or 0-3,8")
			readable = false
			continue
		}
		for _, r := range p.Shards {
			if r.Last < r.First || r.Last >= uint32(len(owner)) {
				c.fault(path+".shards", "%v goes beyond the cluster's %d shards; stay within 0-%d", r, f.Shards, max(f.Shards, 1)-1)
				readable = false
				continue
			}
			c.claim(path+".shards", owner, r, i)
		}
	}
	if missing := gaps(owner); readable && len(missing) > 0 {
		c.fault("partitions", "no partition has shards %s; every shard belongs to exactly one, add them", join(missing))
	}
}

// claim enters a range's shards for partition i and reports those taken.
func (c *checker) claim(path string, owner []int, r ShardRange, i int) {
	overlap := map[int][]ShardRange{}
	for s := r.First; s <= r.Last; s++ {
		if owner[s] == 0 {
			owner[s] = i + 1
			continue
		}
		other := owner[s] - 1
		overlap[other] = merge(append(overlap[other], ShardRange{s, s}))
	}
	for _, other := range sortedInts(overlap) {
		where := "also in partitions[" + strconv.Itoa(other) + "]"
		if other == i {
			where = "listed twice"
		}
		c.fault(path, "%s %s; every shard belongs to exactly one partition, list it once", join(overlap[other]), where)
	}
}

func (c *checker) prefer(path string, f File, p Partition) {
	if len(p.Prefer) == 0 {
		c.missing(path, "list the regions that may own the partition, the most preferred first")
	}
	for j, name := range p.Prefer {
		path := fmt.Sprintf("%s[%d]", path, j)
		if _, ok := f.Region(name); !ok {
			c.fault(path, "%q is not a region of this file; %s", name, oneOf(f.RegionNames()))
		} else if slices.Index(p.Prefer, name) < j {
			c.fault(path, "%q is listed twice; list each region once", name)
		}
	}
}

func gaps(owner []int) []ShardRange {
	var out []ShardRange
	for s, o := range owner {
		if o == 0 {
			out = merge(append(out, ShardRange{uint32(s), uint32(s)}))
		}
	}
	return out
}

func join(ranges []ShardRange) string {
	parts := make([]string, len(ranges))
	for i, r := range ranges {
		parts[i] = r.String()
	}
	return strings.Join(parts, ",")
}

func sortedInts(m map[int][]ShardRange) []int {
	keys := make([]int, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
