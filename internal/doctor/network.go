package doctor

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
)

const (
	// probes of each peer and plane; the shortest is the round trip.
	probes       = 5
	probeTimeout = 2 * time.Second
	pingTimeout  = time.Second
)

// path is what was found of the way to one process on one plane.
type path struct {
	process clusterfile.Process
	plane   link.Plane
	address string
	rtt     time.Duration
	secured time.Duration
	err     error
}

// planes of a process that this one talks to.
func planes(self clusterfile.Process, p clusterfile.Process) map[link.Plane]string {
	out := map[link.Plane]string{link.PlaneVotes: p.Votes}
	if p.Role == clusterfile.RoleRegion {
		out[link.PlaneAPI] = p.API
		if p.Region == self.Region {
			out[link.PlaneRaft] = p.Raft
		}
	}
	return out
}

// examineNetwork probes every other process on every plane, and says what the
// round trips are enough for. speed is the disk's.
func examineNetwork(ctx context.Context, c Config, speed latencies) []Check {
	if c.Links == nil {
		return nil
	}
	var paths []*path
	for _, p := range c.File.Peers(c.Self.Name) {
		at := planes(c.Self, p)
		for _, plane := range []link.Plane{link.PlaneVotes, link.PlaneAPI, link.PlaneRaft} {
			if address, ok := at[plane]; ok {
				paths = append(paths, &path{process: p, plane: plane, address: address})
			}
		}
	}
	pings := make([]*path, 0, len(paths))
	for _, p := range c.File.Peers(c.Self.Name) {
		pings = append(pings, &path{process: p, plane: link.PlaneGossip, address: p.Gossip})
	}
	var wg sync.WaitGroup
	for _, p := range paths {
		wg.Go(func() { p.probe(ctx, c.Links) })
	}
	wg.Go(func() { pingAll(ctx, c, pings) })
	wg.Wait()
	out := own(ctx, c)
	for _, p := range append(paths, pings...) {
		out = append(out, p.check(c))
	}
	return append(out, judgePaths(c, paths, speed)...)
}

func (p *path) peer() link.Peer {
	return link.Peer{Name: p.process.Name, Region: p.process.Region, Role: pki.Role(p.process.Role), Address: p.address}
}

func (p *path) probe(ctx context.Context, links *link.Links) {
	for range probes {
		attempt, cancel := context.WithTimeout(ctx, probeTimeout)
		r, err := links.Probe(attempt, p.plane, p.peer())
		cancel()
		if err != nil {
			p.err = err
			return
		}
		if p.rtt == 0 || r.Connect < p.rtt {
			p.rtt, p.secured = r.Connect, r.Secured
		}
	}
}

// pingAll sends every process a gossip ping, without joining the pool.
func pingAll(ctx context.Context, c Config, pings []*path) {
	setAll := func(err error) {
		for _, p := range pings {
			p.err = err
		}
	}
	if len(pings) == 0 {
		return
	}
	if c.GossipKey == nil && !c.Links.Insecure() {
		setAll(errNoKey)
		return
	}
	host := "0.0.0.0"
	if c.Links.Insecure() {
		host = "127.0.0.1"
	}
	if c.Self.Gossip != "" {
		host, _, _ = net.SplitHostPort(c.Self.Gossip)
	}
	transport, err := c.Links.GossipTransport(link.GossipConfig{
		Listen: net.JoinHostPort(host, "0"),
		Resolve: func(name, address string) (link.Peer, bool) {
			for _, p := range pings {
				if p.process.Name == name || name == "" && p.address == address {
					return p.peer(), true
				}
			}
			return link.Peer{}, false
		},
	})
	if err != nil {
		setAll(err)
		return
	}
	conf := memberlist.DefaultLANConfig()
	conf.Name, conf.Label, conf.SecretKey = "doctor", c.File.Cluster, c.GossipKey
	conf.Transport, conf.ProbeTimeout, conf.ProbeInterval = transport, pingTimeout, 2*pingTimeout
	conf.EnableCompression = false
	conf.BindAddr, conf.BindPort, conf.AdvertiseAddr, conf.AdvertisePort = "", 0, "", 0
	conf.Logger = log.New(discard{}, "", 0)
	list, err := memberlist.Create(conf)
	if err != nil {
		setAll(errors.Join(err, transport.Shutdown()))
		return
	}
	defer func() { _ = list.Shutdown() }()
	var wg sync.WaitGroup
	for _, p := range pings {
		wg.Go(func() {
			address, err := net.ResolveUDPAddr("udp", p.address)
			if err != nil {
				p.err = err
				return
			}
			for range 3 { // a datagram may be lost
				if ctx.Err() != nil {
					p.err = ctx.Err()
					return
				}
				if p.rtt, p.err = list.Ping(p.process.Name, address); p.err == nil {
					p.rtt = max(0, p.rtt)
					return
				}
			}
		})
	}
	wg.Wait()
	// A ping tells who sends it, and the pool would miss "doctor" and suspect it. It
	// leaves, which goes out with what is sent next.
	_ = list.Leave(pingTimeout)
	for _, p := range pings {
		if p.err == nil {
			wg.Go(func() {
				if address, err := net.ResolveUDPAddr("udp", p.address); err == nil {
					_, _ = list.Ping(p.process.Name, address)
				}
			})
		}
	}
	wg.Wait()
}

var errNoKey = errors.New("no gossip key")

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// check judges one path by itself.
func (p *path) check(c Config) Check {
	out := Check{
		Name: fmt.Sprintf("network: %s of %s", p.plane, p.process.Identity()), Verdict: OK, Needed: p.address,
	}
	var timeout net.Error
	var noPing memberlist.NoPingResponseError
	var resolve *net.DNSError
	switch {
	case p.err == nil && p.plane == link.PlaneGossip:
		out.Found = "answers a ping in " + ms(p.rtt)
	case p.err == nil:
		out.Found = fmt.Sprintf("round trip %s, handshake %s", ms(p.rtt), ms(p.secured))
	case errors.Is(p.err, errNoKey):
		out.Verdict, out.Found = Warn, "not asked: no gossip key here"
		out.Remedy = "examine with the certificates of a server or witness (--name)"
	case errors.Is(p.err, syscall.ECONNREFUSED):
		out.Verdict, out.Found = Warn, "nobody listens there"
		out.Remedy = "start it, or correct its address in the cluster file"
	case errors.As(p.err, &noPing):
		// UDP does not tell a closed port from a lost packet.
		out.Verdict, out.Found = Warn, "no answer to three pings"
		out.Remedy = "start it; if it runs, open its gossip port for UDP and TCP in both directions, and compare the gossip keys"
	case errors.As(p.err, &resolve):
		out.Verdict, out.Found = Fail, resolve.Error()
		out.Remedy = "correct the host name in the cluster file, or the name service"
	case errors.As(p.err, &timeout) && timeout.Timeout(), errors.Is(p.err, context.DeadlineExceeded):
		out.Verdict, out.Found = Fail, fmt.Sprintf("no answer within %v", probeTimeout)
		out.Remedy = "open the port in the firewalls on the way, or correct the address in the cluster file"
	default:
		out.Verdict, out.Found = Fail, p.err.Error()
		out.Remedy = "see what is at that address; certificates must be of one set, each with its own process's name"
	}
	return out
}

// own looks at the addresses of this process: free, or served by it.
func own(ctx context.Context, c Config) []Check {
	if c.Self.Name == "" {
		return nil
	}
	addresses := planes(c.Self, c.Self)
	out := Check{Name: "network: own addresses", Verdict: OK, Found: "free to listen on", Needed: "this process listens on them"}
	var bad []string
	running := 0
	for _, plane := range []link.Plane{link.PlaneAPI, link.PlaneVotes, link.PlaneRaft} {
		address, ok := addresses[plane]
		if !ok {
			continue
		}
		attempt, cancel := context.WithTimeout(ctx, probeTimeout)
		p := path{process: c.Self, plane: plane, address: address}
		_, err := c.Links.Probe(attempt, plane, p.peer())
		cancel()
		if err == nil {
			running++
			continue
		}
		ln, err := c.Links.Listen(plane, address)
		if err != nil {
			bad = append(bad, err.Error())
			continue
		}
		_ = ln.Close()
	}
	if running == 0 && c.Self.Metrics != "" { // it asks for no certificate, so a process does not tell that it is this one
		ln, _, err := link.ListenPlain(ctx, "metrics", c.Self.Metrics)
		if err != nil {
			bad = append(bad, err.Error())
		} else {
			_ = ln.Close()
		}
	}
	switch {
	case len(bad) > 0:
		out.Verdict, out.Found = Fail, fmt.Sprint(bad)
		out.Remedy = "give this process addresses of this host that nothing else uses"
	case running > 0:
		out.Found = "the process runs and answers on them"
	}
	return []Check{out}
}

// judgePaths says what the measured round trips are enough for.
func judgePaths(c Config, paths []*path, speed latencies) []Check {
	longest := func(within func(*path) bool) (time.Duration, string, bool) {
		var all []*path
		for _, p := range paths {
			if p.err == nil && within(p) {
				all = append(all, p)
			}
		}
		if len(all) == 0 {
			return 0, "", false
		}
		worst := slices.MaxFunc(all, func(a, b *path) int { return int(a.rtt - b.rtt) })
		return worst.rtt, worst.process.Name, true
	}
	var out []Check
	add := func(check Check) {
		if check.Verdict == OK {
			check.Remedy = ""
		}
		out = append(out, check)
	}
	near := func(p *path) bool { return p.process.Region != "" && p.process.Region == c.Self.Region }
	if rtt, name, ok := longest(near); ok {
		raft := paceOf(c.File.Timing)
		needed := fmt.Sprintf("to %s: a leader's lease is %s (timing %s), and each leadership check must end within a heartbeat", ms(raft.lease/10), ms(raft.lease), raft.name)
		add(Check{
			Name: "numbers: Raft's timing", Verdict: level(rtt, raft.lease/10, raft.lease*2/5), Found: fmt.Sprintf("longest round trip in the region %s, to %s", ms(rtt), name),
			Needed: needed, Remedy: "put the servers of a region into one metropolitan network; a region is a failure domain, not a continent",
		})
		if speed.n > 0 {
			// A grant is the leader's sync, a follower's, and a round trip between.
			grant := 2*speed.p50 + rtt
			add(Check{
				Name: "numbers: a grant", Verdict: level(grant, 5*time.Millisecond, 25*time.Millisecond), Found: "about " + ms(grant) + ", from disk and round trip",
				Needed: "a few milliseconds", Remedy: "a faster disk, or servers closer to each other; nothing breaks, grants are slower",
			})
		}
	} else if speed.n > 0 {
		add(Check{
			Name: "numbers: a grant", Verdict: level(2*speed.p50, 5*time.Millisecond, 25*time.Millisecond), Found: "about " + ms(2*speed.p50) + " and a round trip, from the disk alone",
			Needed: "a few milliseconds", Remedy: "a faster disk",
		})
	}
	voters := func(p *path) bool { return p.plane == link.PlaneVotes && (c.Self.Region == "" || !near(p)) }
	if rtt, name, ok := longest(voters); ok {
		d := c.File.D
		add(Check{
			Name: "numbers: D", Verdict: level(rtt, d/10, d/4), Found: fmt.Sprintf("longest round trip to a voter %s, to %s; D is %v", ms(rtt), name, d),
			Needed: "to D/10: head leases are renewed each D/5, and a promotion takes three rounds", Remedy: "raise d in the cluster's configuration",
		})
	}
	return out
}
