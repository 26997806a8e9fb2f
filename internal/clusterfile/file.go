package clusterfile

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Default ports, used where a process has a host and no address.
const (
	DefaultAPIPort     = 7600
	DefaultVotesPort   = 7601
	DefaultRaftPort    = 7602
	DefaultGossipPort  = 7603
	DefaultMetricsPort = 7604
)

// Bounds and defaults of a cluster.
const (
	DefaultD       = 4 * time.Second
	MinD           = time.Second
	MaxD           = 60 * time.Second
	MaxWitnesses   = 7
	MaxNameLength  = 63
	metricsOff     = "off"
	defaultMetrics = "127.0.0.1:7604"
)

// Timing names a preset of the regional Raft timeouts.
type Timing string

// Presets.
const (
	// TimingLAN is for servers of a region within a few milliseconds.
	TimingLAN Timing = "lan"
	// TimingCalm is for many processes on few cores: dev and CI.
	TimingCalm Timing = "calm"
)

// File is a cluster file with its defaults filled in. It is a value that
// nobody changes after Parse; share it freely.
type File struct {
	Cluster string
	// D is the length of a head lease, 1 s to 60 s.
	D time.Duration
	// Shards is a power of two, fixed when the cluster is made.
	Shards             uint32
	Timing             Timing
	AllowEvenWitnesses bool
	Regions            []Region
	Witnesses          []Witness
	Partitions         []Partition
	Limits             Limits

	// What differs from process to process, usually from the environment or flags.

	// Name is this process: a server or witness of the file. May be empty.
	Name string
	// DataDir is this process's own directory. May be empty.
	DataDir string
	// Certs is the directory of the certificates. May be empty.
	Certs string
}

// Limits of what one region server takes on at once. Zero: the server's default.
type Limits struct {
	// InFlight is how many calls that take room (acquire, open a session, set a
	// value), and how many that read, may be under way.
	InFlight int64
	// Rate is how many such calls one identity may make in a second, Burst how
	// many at once after a rest.
	Rate, Burst int64
}

// Region is a failure domain with its servers.
type Region struct {
	Name    string
	Servers []Server
	// Cache is the region's lease cache; without addresses there is none.
	Cache Cache
}

// Cache is a Redis that the region's leader writes its leases to, for look-ups.
type Cache struct {
	// Addresses are host:port or the path of a unix socket: of the one server,
	// of nodes of a Redis Cluster, or of sentinels.
	Addresses []string
	// Cluster: it is a Redis Cluster. Master is the name that sentinels know.
	Cluster bool
	Master  string
	// Username of the ACL and the file with its password. May be empty.
	Username, PasswordFile string
	// TLS, and the file of the CA to trust instead of the system's.
	TLS    bool
	CAFile string
}

// Server is one region server and its addresses (host:port). Metrics is empty
// if switched off.
type Server struct {
	Name                              string
	API, Votes, Raft, Gossip, Metrics string
}

// Witness is one witness and its addresses. Metrics is empty if switched off.
type Witness struct {
	Name                   string
	Votes, Gossip, Metrics string
}

// Partition is a named set of shards with the regions that may own it, in
// order of preference.
type Partition struct {
	Name string
	// Shards are in order and do not touch each other.
	Shards []ShardRange
	Prefer []string
	// Failback says who hands the partition back to a more preferred region that
	// is up again.
	Failback Failback
}

// Failback of a partition.
type Failback string

// Kinds of failback.
const (
	// FailbackManual leaves it to an operator.
	FailbackManual Failback = "manual"
	// FailbackAuto: the owner does, by a planned transfer, once the other region
	// has been steady for a while.
	FailbackAuto Failback = "auto"
)

// ShardRange is the shards First to Last, both included.
type ShardRange struct {
	First, Last uint32
}

// String returns the range as the file writes it: "0-127", or "8".
func (r ShardRange) String() string {
	if r.First == r.Last {
		return fmt.Sprint(r.First)
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// Role of a process.
type Role string

// Roles.
const (
	RoleRegion  Role = "region"
	RoleWitness Role = "witness"
)

// Process is a server or a witness as its peers see it. A witness has no
// Region, API and Raft.
type Process struct {
	Name   string
	Role   Role
	Region string

	API, Votes, Raft, Gossip, Metrics string
}

// Identity is the process's name in its certificate: "region/eu/eu-1",
// "witness/w1".
func (p Process) Identity() string {
	if p.Role == RoleRegion {
		return string(p.Role) + "/" + p.Region + "/" + p.Name
	}
	return string(p.Role) + "/" + p.Name
}

// Voter is the id of the voter that the process belongs to: "region/eu",
// "witness/w1".
func (p Process) Voter() string {
	if p.Role == RoleRegion {
		return string(p.Role) + "/" + p.Region
	}
	return p.Identity()
}

// Region returns the region of that name.
func (f File) Region(name string) (Region, bool) {
	i := slices.IndexFunc(f.Regions, func(r Region) bool { return r.Name == name })
	if i < 0 {
		return Region{}, false
	}
	return f.Regions[i], true
}

// Server returns the server of that name and its region's name.
func (f File) Server(name string) (server Server, region string, ok bool) {
	for _, r := range f.Regions {
		for _, s := range r.Servers {
			if s.Name == name {
				return s, r.Name, true
			}
		}
	}
	return Server{}, "", false
}

// Witness returns the witness of that name.
func (f File) Witness(name string) (Witness, bool) {
	i := slices.IndexFunc(f.Witnesses, func(w Witness) bool { return w.Name == name })
	if i < 0 {
		return Witness{}, false
	}
	return f.Witnesses[i], true
}

// Partition returns the partition of that name.
func (f File) Partition(name string) (Partition, bool) {
	i := slices.IndexFunc(f.Partitions, func(p Partition) bool { return p.Name == name })
	if i < 0 {
		return Partition{}, false
	}
	return f.Partitions[i], true
}

// Processes returns all servers, region by region, and then all witnesses, in
// the order of the file.
func (f File) Processes() []Process {
	var all []Process
	for _, r := range f.Regions {
		all = append(all, f.RegionProcesses(r.Name)...)
	}
	for _, w := range f.Witnesses {
		all = append(all, Process{Name: w.Name, Role: RoleWitness, Votes: w.Votes, Gossip: w.Gossip, Metrics: w.Metrics})
	}
	return all
}

// RegionProcesses returns the servers of one region, in the order of the file.
func (f File) RegionProcesses(region string) []Process {
	r, _ := f.Region(region)
	all := make([]Process, 0, len(r.Servers))
	for _, s := range r.Servers {
		all = append(all, Process{
			Name: s.Name, Role: RoleRegion, Region: r.Name,
			API: s.API, Votes: s.Votes, Raft: s.Raft, Gossip: s.Gossip, Metrics: s.Metrics,
		})
	}
	return all
}

// Process returns the server or witness of that name.
func (f File) Process(name string) (Process, bool) {
	for _, p := range f.Processes() {
		if p.Name == name {
			return p, true
		}
	}
	return Process{}, false
}

// Peers returns all processes but the named one.
func (f File) Peers(name string) []Process {
	return slices.DeleteFunc(f.Processes(), func(p Process) bool { return p.Name == name })
}

// RegionNames returns the regions' names in the order of the file.
func (f File) RegionNames() []string {
	names := make([]string, len(f.Regions))
	for i, r := range f.Regions {
		names[i] = r.Name
	}
	return names
}

// Fault is one thing wrong with a cluster file.
type Fault struct {
	// Path of the field, such as regions[0].servers[1].api; empty for the
	// file as a whole.
	Path string
	// Problem names the value, what is wrong with it, and the remedy.
	Problem string
}

func (f Fault) String() string {
	if f.Path == "" {
		return f.Problem
	}
	return f.Path + ": " + f.Problem
}

// Error refuses a cluster file with all its faults, in the order of the file.
type Error struct {
	// Source is the file's name, if known.
	Source string
	Faults []Fault
}

func (e *Error) Error() string {
	var b strings.Builder
	if e.Source != "" {
		b.WriteString(e.Source + ": ")
	}
	if len(e.Faults) == 1 {
		b.WriteString(e.Faults[0].String())
		return b.String()
	}
	fmt.Fprintf(&b, "%d faults:", len(e.Faults))
	for _, f := range e.Faults {
		b.WriteString("\n  " + f.String())
	}
	return b.String()
}
