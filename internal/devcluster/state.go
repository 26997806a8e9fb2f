package devcluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/pki"
)

// State is dev.json: what scripts need to talk to the cluster's processes and
// to kill them. It is replaced as a whole at every start and end of a process.
type State struct {
	Cluster string `json:"cluster"`
	Dir     string `json:"dir"`
	// Supervisor is the pid of the process that runs the cluster; 0: nobody.
	Supervisor int         `json:"supervisor"`
	Config     string      `json:"config"`
	CA         string      `json:"ca"`
	Admin      KeyPair     `json:"admin"`
	Clients    []NamedKeys `json:"clients"`
	// Agent is the drill agent that the supervisor serves; nil: none.
	Agent     *Agent        `json:"agent,omitempty"`
	Processes []Process     `json:"processes"`
	RTT       []RTTEstimate `json:"rtt"`
}

// Agent is where a drill can signal and start the processes.
type Agent struct {
	// Name of the process whose certificate the agent has.
	Name    string `json:"name"`
	Address string `json:"address"`
}

// KeyPair is the paths of a certificate and its key.
type KeyPair struct {
	Cert string `json:"cert"`
	Key  string `json:"key"`
}

// NamedKeys is a client's certificate.
type NamedKeys struct {
	Name string `json:"name"`
	KeyPair
}

// RTTEstimate is what the start-up faults add between two sites, in ms.
type RTTEstimate struct {
	A  string `json:"a"`
	B  string `json:"b"`
	MS int64  `json:"ms"`
}

// Process is one child.
type Process struct {
	Name string `json:"name"`
	// Role is "region" or "witness", as in the cluster file, or "redis": the lease
	// cache of a region, which has neither certificates nor faults.
	Role string `json:"role"`
	// Region is empty for a witness.
	Region  string `json:"region,omitempty"`
	Running bool   `json:"running"`
	// PID is of the running process, or 0.
	PID int `json:"pid"`
	// StartTicks is the kernel's start time of the process (field 22 of
	// /proc/PID/stat): with the pid it names a process for good.
	StartTicks uint64 `json:"start_ticks"`
	// Exit is how the last run ended, in words.
	Exit string `json:"exit,omitempty"`

	API     string `json:"api,omitempty"`
	Votes   string `json:"votes,omitempty"`
	Raft    string `json:"raft,omitempty"`
	Gossip  string `json:"gossip,omitempty"`
	Metrics string `json:"metrics,omitempty"`
	Redis   string `json:"redis,omitempty"`

	KeyPair
	Config  string `json:"config,omitempty"`
	Certs   string `json:"certs,omitempty"`
	Faults  string `json:"faults,omitempty"`
	DataDir string `json:"data_dir"`
	Log     string `json:"log"`
}

// ReadState reads the dev.json of a cluster's directory. It says what the
// supervisor wrote last; after a SIGKILL of it, pids may be stale.
func ReadState(dir string) (State, error) {
	path := filepath.Join(dir, StateFile)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, fmt.Errorf("no development cluster in %s; start one with `headlease dev --dir %s`: %w", dir, dir, err)
	}
	if err != nil {
		return State{}, fmt.Errorf("state of the development cluster: %w", err)
	}
	var s State
	if err := json.Unmarshal(data, &s); err != nil {
		return State{}, fmt.Errorf("%s: %w; remove it, the next start writes it anew", path, err)
	}
	return s, nil
}

// Process returns the process of that name.
func (s State) Process(name string) (Process, bool) {
	for _, p := range s.Processes {
		if p.Name == name {
			return p, true
		}
	}
	return Process{}, false
}

func newState(dir string, f clusterfile.File, m Matrix, clients []string) State {
	certs := filepath.Join(dir, certsName)
	keys := func(id pki.Identity) KeyPair {
		return KeyPair{Cert: filepath.Join(certs, id.File()+".crt"), Key: filepath.Join(certs, id.File()+".key")}
	}
	s := State{
		Cluster: f.Cluster, Dir: dir, Supervisor: os.Getpid(),
		Config: filepath.Join(dir, clusterName), CA: filepath.Join(certs, "ca.crt"),
		Admin: keys(pki.Identity{Role: pki.RoleAdmin}),
	}
	for _, name := range append([]string{DefaultClient}, clients...) {
		s.Clients = append(s.Clients, NamedKeys{name, keys(pki.Identity{Role: pki.RoleClient, Name: name})})
	}
	var sites []string
	for _, p := range f.Processes() {
		if n := len(sites); n == 0 || sites[n-1] != site(p) {
			sites = append(sites, site(p))
		}
		s.Processes = append(s.Processes, Process{
			Name: p.Name, Role: string(p.Role), Region: p.Region,
			API: p.API, Votes: p.Votes, Raft: p.Raft, Gossip: p.Gossip, Metrics: p.Metrics,
			KeyPair: keys(pki.Identity{Role: pki.Role(p.Role), Region: p.Region, Name: p.Name}),
			Config:  s.Config, Certs: certs,
			Faults:  filepath.Join(dir, faultsName, p.Name+".json"),
			DataDir: filepath.Join(dir, dataName, p.Name),
			Log:     filepath.Join(dir, logsName, p.Name+".log"),
		})
	}
	for _, p := range caches(f) {
		p.DataDir, p.Log = filepath.Join(dir, dataName, p.Name), filepath.Join(dir, logsName, p.Name+".log")
		s.Processes = append(s.Processes, p)
	}
	for i, a := range sites {
		for _, b := range sites[i+1:] {
			s.RTT = append(s.RTT, RTTEstimate{a, b, (2 * oneWay(m.RTT(a, b))).Milliseconds()})
		}
	}
	return s
}

func (s State) write() error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("state of the development cluster: %w", err)
	}
	return writeAtomic(filepath.Join(s.Dir, StateFile), append(data, '\n'))
}

// stat is what /proc tells of a process.
type stat struct {
	// state is one letter: T is stopped, Z a zombie.
	state string
	ticks uint64
}

func readStat(pid int) (stat, bool) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return stat{}, false
	}
	// The command's name, in parentheses, may hold anything.
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	if len(fields) < 20 {
		return stat{}, false
	}
	ticks, err := strconv.ParseUint(fields[19], 10, 64)
	return stat{fields[0], ticks}, err == nil
}

// startTicks reads when a process started; ok is false if there is none, or
// only its zombie.
func startTicks(pid int) (ticks uint64, ok bool) {
	s, ok := readStat(pid)
	return s.ticks, ok && s.state != "Z" && s.state != "X"
}

// alive reports whether the very process that the state names still runs.
func (p Process) alive() bool {
	if p.PID == 0 {
		return false
	}
	ticks, ok := startTicks(p.PID)
	return ok && ticks == p.StartTicks
}
