package detector

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/headlease/headlease/detector/phi"
	"github.com/headlease/headlease/internal/clock"
)

// Defaults.
const (
	// DefaultRejoin is how often missing peers are joined again, for ever.
	DefaultRejoin = 15 * time.Second
	// DefaultFirstJoin is how often that is tried until one join has worked.
	DefaultFirstJoin = time.Second

	keyBytes = 32
)

// Peer is another configured process.
type Peer struct {
	// Name is unique in the cluster ("eu-1", "w1").
	Name string
	// Region is empty for a witness.
	Region string
	// Gossip is host:port.
	Gossip string
}

// Config of a Detector.
type Config struct {
	// Name of this process.
	Name string
	// Region of this process; empty for a witness.
	Region string
	// Cluster's name; packets of another one are dropped.
	Cluster string
	// Key encrypts all gossip: 32 bytes, the same in the whole cluster.
	Key []byte
	// Insecure allows an empty Key, for development on loopback.
	Insecure bool
	// Transport carries the gossip; the detector shuts it down.
	Transport memberlist.NodeAwareTransport
	// Peers are all other configured processes; see SetPeers.
	Peers []Peer
	// D is the head lease's length, see SetD.
	D time.Duration
	// Interval between heartbeats; phi.Interval if zero.
	Interval time.Duration
	// Rejoin and FirstJoin default to DefaultRejoin and DefaultFirstJoin.
	Rejoin, FirstJoin time.Duration
	Clock             clock.Clock
	// Registerer of the detector's metrics; may be nil.
	Registerer prometheus.Registerer
	// Logger defaults to slog.Default.
	Logger *slog.Logger
	// ClusterID tells the id of the configured cluster, empty while unknown;
	// heartbeats of another one are ignored. May be nil.
	ClusterID func() string
	// Heard is called when a peer was heard, at most once a second per peer,
	// from a goroutine of its own [F50]. May be nil.
	Heard func(peer string)
}

func (c Config) withDefaults() Config {
	if c.Interval == 0 {
		c.Interval = phi.Interval
	}
	if c.Rejoin == 0 {
		c.Rejoin = DefaultRejoin
	}
	if c.FirstJoin == 0 {
		c.FirstJoin = DefaultFirstJoin
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.ClusterID == nil {
		c.ClusterID = func() string { return "" }
	}
	if c.Heard == nil {
		c.Heard = func(string) {}
	}
	return c
}

// Validate reports all faults at once.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	if c.Name == "" {
		errs = append(errs, errors.New("name: is empty; give this process its configured name"))
	}
	if c.Cluster == "" || len(c.Cluster) > memberlist.LabelMaxSize {
		errs = append(errs, fmt.Errorf("cluster: %q must have 1 to %d bytes", c.Cluster, memberlist.LabelMaxSize))
	}
	if n := len(c.Key); n != keyBytes && (n != 0 || !c.Insecure) {
		errs = append(errs, fmt.Errorf("key: has %d bytes, %d are needed; use the gossip key that was made with the certificates", n, keyBytes))
	}
	if c.Transport == nil {
		errs = append(errs, errors.New("transport: is missing"))
	}
	if c.Clock == nil {
		errs = append(errs, errors.New("clock: is missing"))
	}
	if err := checkPeers(c.Name, c.Peers); err != nil {
		errs = append(errs, err)
	}
	if err := (phi.Params{D: c.D, Interval: c.Interval}).Validate(); err != nil {
		errs = append(errs, err)
	}
	if c.Rejoin < 0 || c.FirstJoin < 0 {
		errs = append(errs, errors.New("rejoin, first join: must not be negative"))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("detector: %w", err)
	}
	return nil
}

func checkPeers(self string, peers []Peer) error {
	var errs []error
	names := []string{self}
	for _, p := range peers {
		if p.Name == "" || p.Gossip == "" {
			errs = append(errs, fmt.Errorf("peers: %q at %q needs a name and a gossip address", p.Name, p.Gossip))
		}
		if slices.Contains(names, p.Name) {
			errs = append(errs, fmt.Errorf("peers: %q is there twice; names are unique in a cluster", p.Name))
		}
		names = append(names, p.Name)
	}
	return errors.Join(errs...)
}
