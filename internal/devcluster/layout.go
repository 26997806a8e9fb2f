package devcluster

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/headlease/headlease/internal/clusterfile"
)

// Names within the cluster's directory.
const (
	clusterName = "cluster.yaml"
	certsName   = "certs"
	faultsName  = "faults"
	dataName    = "data"
	logsName    = "logs"
	// StateFile is the name of the State in the directory.
	StateFile = "dev.json"
	lockName  = "dev.lock"
)

// The cluster file as it is written.
type (
	fileYAML struct {
		Cluster            string          `yaml:"cluster"`
		D                  string          `yaml:"d"`
		Shards             int             `yaml:"shards"`
		Timing             string          `yaml:"timing"`
		AllowEvenWitnesses bool            `yaml:"allow_even_witnesses,omitempty"`
		Regions            []regionYAML    `yaml:"regions"`
		Witnesses          []serverYAML    `yaml:"witnesses,omitempty"`
		Partitions         []partitionYAML `yaml:"partitions"`
	}
	regionYAML struct {
		Name    string       `yaml:"name"`
		Servers []serverYAML `yaml:"servers"`
		Cache   *cacheYAML   `yaml:"cache,omitempty"`
	}
	cacheYAML struct {
		Addresses []string `yaml:"addresses,flow"`
	}
	serverYAML struct {
		Name    string `yaml:"name"`
		API     string `yaml:"api,omitempty"`
		Votes   string `yaml:"votes"`
		Raft    string `yaml:"raft,omitempty"`
		Gossip  string `yaml:"gossip"`
		Metrics string `yaml:"metrics"`
	}
	partitionYAML struct {
		Name   string   `yaml:"name"`
		Shards string   `yaml:"shards"`
		Prefer []string `yaml:"prefer,flow"`
	}
)

// newFile lays a cluster out. ports has what addresses needs, in order.
func newFile(o Options, ports []int) fileYAML {
	host := func(string) string { return loopback }
	if o.Places != nil {
		host = o.Places.Host
	}
	next := func(site string) string {
		address := net.JoinHostPort(host(site), strconv.Itoa(ports[0]))
		ports = ports[1:]
		return address
	}
	f := fileYAML{
		Cluster: o.Cluster, D: o.D.String(), Shards: 256, Timing: string(o.Timing), AllowEvenWitnesses: o.AllowEvenWitnesses,
	}
	regions := regionNames[:o.Regions]
	for _, region := range regions {
		r := regionYAML{Name: region}
		for i := range o.Servers {
			r.Servers = append(r.Servers, serverYAML{
				Name: fmt.Sprintf("%s-%d", region, i+1), API: next(region), Votes: next(region), Raft: next(region), Gossip: next(region), Metrics: "off",
			})
		}
		if o.Redis {
			r.Cache = &cacheYAML{Addresses: []string{next(region)}}
		}
		f.Regions = append(f.Regions, r)
	}
	for _, name := range witnessNames[:o.Witnesses] {
		f.Witnesses = append(f.Witnesses, serverYAML{Name: name, Votes: next(name), Gossip: next(name), Metrics: "off"})
	}
	for i, region := range regions {
		prefer := slices.Clone(regions)
		slices.SortStableFunc(prefer, func(a, b string) int {
			return int(DefaultMatrix().RTT(region, a) - DefaultMatrix().RTT(region, b))
		})
		name, _, _ := strings.Cut(region, "-")
		first, last := i*f.Shards/len(regions), (i+1)*f.Shards/len(regions)-1
		f.Partitions = append(f.Partitions, partitionYAML{Name: name, Shards: fmt.Sprintf("%d-%d", first, last), Prefer: prefer})
	}
	return f
}

func portCount(o Options) int {
	n := 4*o.Regions*o.Servers + 2*o.Witnesses
	if o.Redis {
		n += o.Regions
	}
	return n
}

// check refuses what loadOrMake will refuse, before anything is touched.
func check(o Options) error {
	f, err := load(filepath.Join(o.Dir, clusterName))
	if err == nil {
		return checkShape(o, f)
	}
	if o.Redis {
		if _, err := findRedis(); err != nil {
			return err
		}
	}
	if errors.Is(err, syscall.ENOTDIR) {
		return fmt.Errorf("dir %s: is not a directory; name an empty or a new directory", o.Dir)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	o = o.withShapeDefaults()
	ports := make([]int, portCount(o))
	for i := range ports {
		ports[i] = lowPort + i
	}
	_, err = layOut(o, ports)
	return errors.Join(err, checkFresh(o.Dir))
}

// loadOrMake returns the directory's cluster, made if there is none.
func loadOrMake(o Options) (clusterfile.File, error) {
	path := filepath.Join(o.Dir, clusterName)
	f, err := load(path)
	if err == nil {
		return f, checkShape(o, f)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return clusterfile.File{}, err
	}
	o = o.withShapeDefaults()
	ports, err := FreePorts(portCount(o))
	if err != nil {
		return clusterfile.File{}, err
	}
	text, err := layOut(o, ports)
	if err != nil {
		return clusterfile.File{}, err
	}
	if err := writeAtomic(path, text); err != nil {
		return clusterfile.File{}, err
	}
	return load(path)
}

// layOut returns the text of a new cluster file, having checked it.
func layOut(o Options, ports []int) ([]byte, error) {
	text, err := yaml.Marshal(newFile(o, ports))
	if err != nil {
		return nil, fmt.Errorf("lay out a cluster: %w", err)
	}
	text = append([]byte("# A development cluster. The ports were free when it was made.\n"), text...)
	_, _, err = clusterfile.Parse(text, nil)
	return text, err
}

func load(path string) (clusterfile.File, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return clusterfile.File{}, fmt.Errorf("cluster file: %w", err)
	}
	// Without the environment, as the children get it.
	f, _, err := clusterfile.Parse(data, nil)
	if bad := (*clusterfile.Error)(nil); errors.As(err, &bad) {
		bad.Source = path
	}
	return f, err
}

// checkFresh refuses to make a cluster among files of something else.
func checkFresh(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("dir: %w", err)
	}
	for _, e := range entries {
		if e.Name() != lockName && !strings.HasPrefix(e.Name(), "."+clusterName) { // a write that a crash cut off
			return fmt.Errorf("dir %s: has %s but no %s, so it is not a cluster's; name an empty or a new directory", dir, e.Name(), clusterName)
		}
	}
	return nil
}

// checkShape refuses options that ask for another cluster than the directory's.
func checkShape(o Options, f clusterfile.File) error {
	var errs []error
	differs := func(field string, has, want any) {
		errs = append(errs, fmt.Errorf("dir %s: holds a cluster with %s %v, not %v; leave %s out, or name another directory", o.Dir, field, has, want, field))
	}
	number := func(field string, has, want int, asked bool) {
		if asked && has != want {
			differs(field, has, want)
		}
	}
	if o.Cluster != "" && o.Cluster != f.Cluster {
		differs("name", f.Cluster, o.Cluster)
	}
	number("regions", len(f.Regions), o.Regions, o.Regions != 0)
	for _, r := range f.Regions {
		if o.Servers != 0 && len(r.Servers) != o.Servers {
			differs("servers", len(r.Servers), o.Servers)
			break
		}
	}
	number("witnesses", len(f.Witnesses), o.Witnesses, o.Witnesses != 0 || o.NoWitnesses)
	if o.D != 0 && o.D != f.D {
		differs("d", f.D, o.D)
	}
	if o.Redis && len(caches(f)) != len(f.Regions) {
		differs("redis", false, true)
	}
	if o.Timing != "" && o.Timing != f.Timing {
		differs("timing", f.Timing, o.Timing)
	}
	return errors.Join(errs...)
}

// site is where a process is, as the matrix names it.
func site(p clusterfile.Process) string {
	if p.Role == clusterfile.RoleWitness {
		return p.Name
	}
	return p.Region
}

// oneWay is the delay that the sender adds on a round trip of rtt.
func oneWay(rtt time.Duration) time.Duration { return (rtt / 2).Round(time.Millisecond) }
