package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/clusterclient"
	clusterload "github.com/headlease/headlease/internal/clusterfile/load"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
)

// scaleVar makes the test binary a client process of the scale test; it holds
// a scaleConfig.
const scaleVar = "HEADLEASE_E2E_SCALE"

// scaleConfig is a client process: Sessions sessions, each with a lock of its
// own, over Connections connections.
type scaleConfig struct {
	Dir                   string
	Name                  string
	Sessions, Connections int
	TTL                   time.Duration
	// Peer is the process for whose locks this one waits.
	Peer string
}

// scaleReport is what a client process says after each command.
type scaleReport struct {
	Done  string
	Error string
	// Held leases that are valid now, of the process's Sessions.
	Held int
	// Lost leases since the process began: no longer valid, or ended, without the
	// process's doing. At most 20 are told why.
	Lost    int
	Why     []string
	TookMS  int64
	Closing int64 // milliseconds of a redeploy that went into closing
	// CPU is the processor time that the process spent on the command.
	CPU time.Duration
	// Woken waiters of a wait, and Grants by how many times a waited-for lock was
	// granted meanwhile, to anybody; Missed: not all of that was seen.
	Woken  int
	Grants map[int]int
	Missed bool
}

// scaleClient runs one client process: commands come as lines, reports go out as
// lines.
func scaleClient(raw string) error {
	var cfg scaleConfig
	if err := json.Unmarshal([]byte(raw), &cfg); err != nil {
		return err
	}
	f, _, err := clusterload.File(filepath.Join(cfg.Dir, "cluster.yaml"))
	if err != nil {
		return err
	}
	p := &scaleProcess{cfg: cfg}
	p.base = client.Config{Regions: clusterclient.Regions(f), TTL: cfg.TTL, Logger: slog.New(slog.DiscardHandler)}
	id := pki.Identity{Cluster: f.Cluster, Role: pki.RoleClient, Name: devcluster.DefaultClient}
	creds, err := pki.Load(pki.LoadConfig{Dir: filepath.Join(cfg.Dir, "certs"), Want: id})
	if err != nil {
		return err
	}
	p.link = link.Config{Identity: id, Credentials: creds, Logger: p.base.Logger}
	watching, stop := context.WithCancel(context.Background())
	defer stop()
	var work sync.WaitGroup
	work.Go(func() { p.watch(watching) })
	out := json.NewEncoder(os.Stdout)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		began, spent := time.Now(), ownCPU()
		r := scaleReport{Done: lines.Text()}
		var err error
		switch lines.Text() {
		case "open":
			err = p.open()
		case "redeploy":
			if err = p.close(); err == nil {
				r.Closing = time.Since(began).Milliseconds()
				err = p.open()
			}
		case "wait":
			err = p.wait(watching)
		case "waited":
			p.waits.report(&r)
		case "report":
		case "close":
			err = p.close()
		default:
			err = fmt.Errorf("command %q", lines.Text())
		}
		if err != nil {
			r.Error = err.Error()
		}
		r.CPU = ownCPU() - spent
		p.count(&r)
		r.TookMS = time.Since(began).Milliseconds()
		if err := out.Encode(r); err != nil {
			return err
		}
	}
	stop()
	work.Wait()
	p.waits.work.Wait()
	return nil
}

// ownCPU is the processor time that this process has spent.
func ownCPU() time.Duration {
	var use syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &use) // fails only for another who
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}

type scaleProcess struct {
	cfg  scaleConfig
	base client.Config
	link link.Config

	links   []*link.Links
	clients []*client.Client
	waits   scaleWaits

	mu     sync.Mutex
	leases map[*client.Lease]bool // false: lost
	lost   int
	why    []string
}

// open opens the connections and on them the sessions, and takes each one's lock.
func (p *scaleProcess) open() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	p.mu.Lock()
	p.leases = map[*client.Lease]bool{}
	p.mu.Unlock()
	errs := make([]error, p.cfg.Connections)
	var work sync.WaitGroup
	for i := range p.cfg.Connections {
		l, err := link.New(p.link)
		if err != nil {
			return err
		}
		cfg := p.base
		cfg.Links = l
		// Each connection begins at another server, so that all carry a part.
		region := cfg.Regions[0]
		region.Servers = slices.Concat(region.Servers[i%len(region.Servers):], region.Servers[:i%len(region.Servers)])
		cfg.Regions = []client.Region{region}
		c, err := client.New(cfg)
		if err != nil {
			return err
		}
		p.links, p.clients = append(p.links, l), append(p.clients, c)
		first, next := i*p.cfg.Sessions/p.cfg.Connections, (i+1)*p.cfg.Sessions/p.cfg.Connections
		work.Go(func() { errs[i] = p.fill(ctx, c, first, next-first) })
	}
	work.Wait()
	return errors.Join(errs...)
}

// fill opens n sessions on a connection, eight at a time.
func (p *scaleProcess) fill(ctx context.Context, c *client.Client, first, n int) error {
	numbers := make(chan int)
	errs := make([]error, 8)
	var work sync.WaitGroup
	for w := range errs {
		work.Go(func() {
			for i := range numbers {
				if errs[w] == nil {
					errs[w] = p.take(ctx, c, i)
				}
			}
		})
	}
	for i := range n {
		numbers <- first + i
	}
	close(numbers)
	work.Wait()
	return errors.Join(errs...)
}

func (p *scaleProcess) take(ctx context.Context, c *client.Client, i int) error {
	s, err := c.NewSession(client.SessionOptions{})
	if err != nil {
		return err
	}
	// Wait: after a redeploy the lock may still be on its way back.
	lease, err := s.Acquire(ctx, fmt.Sprintf("lock/scale/%s/%d", p.cfg.Name, i), client.Wait())
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leases[lease] = true
	return nil
}

// close gives everything back, as a process that is redeployed does.
func (p *scaleProcess) close() error {
	p.mu.Lock()
	p.leases = nil // from here on an end is no loss
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	errs := make([]error, len(p.clients))
	var work sync.WaitGroup
	for i, c := range p.clients {
		work.Go(func() { errs[i] = c.Close(ctx) })
	}
	work.Wait()
	for _, l := range p.links {
		errs = append(errs, l.Close())
	}
	p.links, p.clients = nil, nil
	return errors.Join(errs...)
}

// watch counts losses where they matter: at Valid and the lease's context.
func (p *scaleProcess) watch(ctx context.Context) {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			p.sweep()
		}
	}
}

func (p *scaleProcess) sweep() (held int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for lease, held := range p.leases {
		if held && (!lease.Valid() || lease.Context().Err() != nil) {
			p.leases[lease] = false
			p.lost++
			if len(p.why) < 20 {
				p.why = append(p.why, fmt.Sprintf("%s: valid %v, %v", lease.Resource(), lease.Valid(), context.Cause(lease.Context())))
			}
		}
	}
	for _, ok := range p.leases {
		if ok {
			held++
		}
	}
	return held
}

func (p *scaleProcess) count(r *scaleReport) {
	r.Held = p.sweep()
	p.mu.Lock()
	defer p.mu.Unlock()
	r.Lost, r.Why = p.lost, p.why
}

// scaleRemote is a client process as its test sees it.
type scaleRemote struct {
	cfg     scaleConfig
	in      io.WriteCloser
	reports *json.Decoder
	wait    func() error
	errors  *strings.Builder
}
