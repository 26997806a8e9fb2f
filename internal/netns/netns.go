// Package netns puts the sites of a cluster into network namespaces of their
// own, joined by a bridge in the namespace of this process, and cuts the cables
// between them by packet filters (nftables). So the faults of drills come from
// the kernel, and not from the fault table of the processes that are tested.
//
// Nothing of it can be left behind: the namespaces have no names, so that each
// lives as long as a descriptor of this process or a process in it, and veths,
// bridge and filters end with the namespaces they are in. This process must be
// in a namespace of its own, which `unshare --net` makes. A cut is an element
// of a set that the kernel drops when its time is over. Linux and root only;
// needs ip, nft and nsenter.
package netns

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	bridge = "hl0"
	table  = "bridge headlease"
	// The sites are 10.213.0.2 and on, this process is 10.213.0.1.
	network  = "10.213.0."
	maxSites = 200
)

// Link is one direction between two sites.
type Link struct{ From, To string }

// Lab is sites and their cables. Safe for concurrent use.
type Lab struct {
	sites []string
	homes []*os.File // the namespaces, in the order of sites

	mu   sync.Mutex // held while filters are changed
	ends map[Link]time.Time
}

// New makes a namespace for each site and joins them. It refuses to do so in a
// namespace that has interfaces of somebody else's.
func New(ctx context.Context, sites []string) (*Lab, error) {
	if len(sites) > maxSites {
		return nil, fmt.Errorf("network namespaces: %d sites; use %d or fewer", len(sites), maxSites)
	}
	if err := alone(); err != nil {
		return nil, err
	}
	l := &Lab{sites: slices.Clone(sites), ends: map[Link]time.Time{}}
	if err := l.build(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("network namespaces: %w", err), l.Close())
	}
	return l, nil
}

// alone refuses a namespace that others use.
func alone() error {
	all, err := net.Interfaces()
	if err != nil {
		return fmt.Errorf("network interfaces: %w", err)
	}
	for _, i := range all {
		if i.Flags&net.FlagLoopback == 0 {
			return fmt.Errorf("network namespaces: this process shares a namespace that has interface %s; start it as root under 'unshare --net'", i.Name)
		}
	}
	return nil
}

func (l *Lab) build(ctx context.Context) error {
	hub := []string{
		"link set lo up",
		"link add " + bridge + " type bridge",
		"addr add " + network + "1/24 dev " + bridge,
		"link set " + bridge + " up",
	}
	for i := range l.sites {
		home, err := namespace()
		if err != nil {
			return err
		}
		l.homes = append(l.homes, home)
		hub = append(hub,
			fmt.Sprintf("link add %s type veth peer name eth0 netns %s", l.end(i), l.path(i)),
			fmt.Sprintf("link set %s master %s up", l.end(i), bridge))
	}
	if err := run(ctx, hub, "ip", "-batch", "-"); err != nil {
		return err
	}
	for _, site := range l.sites {
		within := []string{"link set lo up", "addr add " + l.Host(site) + "/24 dev eth0", "link set eth0 up"}
		command := append(l.Enter(site), "ip", "-batch", "-")
		if err := run(ctx, within, command[0], command[1:]...); err != nil {
			return fmt.Errorf("site %s: %w", site, err)
		}
	}
	// A frame is dropped on the bridge, between the cables' ends: ARP as well.
	return run(ctx, []string{
		"table " + table + " {",
		"  set cut { type ifname . ifname; flags timeout; counter; }",
		"  chain forward { type filter hook forward priority 0; iifname . oifname @cut drop; }",
		"}",
	}, "nft", "-f", "-")
}

// namespace makes a network namespace, which lives as long as the file is open
// or a process is in it.
func namespace() (*os.File, error) {
	type made struct {
		file *os.File
		err  error
	}
	result := make(chan made)
	go func() {
		// Never unlocked: the thread is in the new namespace and ends with this
		// goroutine.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			result <- made{nil, fmt.Errorf("a new network namespace: %w; it takes root", err)}
			return
		}
		file, err := os.Open("/proc/thread-self/ns/net")
		result <- made{file, err}
	}()
	m := <-result
	return m.file, m.err
}

// end is the name of the bridge's end of a site's cable.
func (l *Lab) end(i int) string { return fmt.Sprintf("hl-%d", i+1) }

// path names a site's namespace for other processes, while this one lives.
func (l *Lab) path(i int) string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), l.homes[i].Fd()) }

// Host is the address that processes of a site listen on. The site must be one
// of New's.
func (l *Lab) Host(site string) string {
	return fmt.Sprintf("%s%d", network, slices.Index(l.sites, site)+2)
}

// Enter is the command that runs the one appended to it at a site, as the same
// process.
func (l *Lab) Enter(site string) []string {
	return []string{"nsenter", "--net=" + l.path(slices.Index(l.sites, site))}
}

// Cut drops every frame of the links for so long, whatever becomes of this
// process meanwhile. A link that is cut for longer already stays so.
func (l *Lab) Cut(ctx context.Context, links []Link, lasts time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	ends := map[Link]time.Time{}
	var script []string
	for _, link := range links {
		key, err := l.key(link)
		if err != nil {
			return err
		}
		if old := l.ends[link]; old.After(now.Add(lasts)) {
			continue
		} else if old.After(now) {
			// Its time would stay as it was, so it goes first: it may be over by
			// now, and what there is not cannot be deleted. The script is one
			// transaction: the link is never whole in between.
			element := fmt.Sprintf("element %s cut { %s }", table, key)
			script = append(script, "add "+element, "delete "+element)
		}
		ends[link] = now.Add(lasts)
		script = append(script, fmt.Sprintf("add element %s cut { %s timeout %dms }", table, key, lasts.Milliseconds()))
	}
	if err := run(ctx, script, "nft", "-f", "-"); err != nil {
		return fmt.Errorf("cut %v: %w", links, err)
	}
	for link, at := range ends {
		l.ends[link] = at
	}
	return nil
}

func (l *Lab) key(link Link) (string, error) {
	from, to := slices.Index(l.sites, link.From), slices.Index(l.sites, link.To)
	if from < 0 || to < 0 {
		return "", fmt.Errorf("link %s to %s: the sites are %v", link.From, link.To, l.sites)
	}
	return fmt.Sprintf("%q . %q", l.end(from), l.end(to)), nil
}

// Dropped returns the links that are cut now, with the number of frames that
// each has lost by it.
func (l *Lab) Dropped(ctx context.Context) (map[Link]int, error) {
	out, err := exec.CommandContext(ctx, "nft", "-j", "list set "+table+" cut").Output()
	if err != nil {
		return nil, fmt.Errorf("list the cuts: %w", err)
	}
	var listed struct {
		Nftables []struct {
			Set struct {
				Elem []struct {
					Elem struct {
						Val     struct{ Concat []string }
						Counter struct{ Packets int }
					}
				}
			}
		}
	}
	if err := json.Unmarshal(out, &listed); err != nil {
		return nil, fmt.Errorf("list the cuts: %w", err)
	}
	names := map[string]string{}
	for i, site := range l.sites {
		names[l.end(i)] = site
	}
	cuts := map[Link]int{}
	for _, object := range listed.Nftables {
		for _, e := range object.Set.Elem {
			if len(e.Elem.Val.Concat) == 2 {
				cuts[Link{names[e.Elem.Val.Concat[0]], names[e.Elem.Val.Concat[1]]}] = e.Elem.Counter.Packets
			}
		}
	}
	return cuts, nil
}

// Heal ends every cut.
func (l *Lab) Heal(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.ends)
	if err := run(ctx, []string{"flush set " + table + " cut"}, "nft", "-f", "-"); err != nil {
		return fmt.Errorf("end the cuts: %w", err)
	}
	return nil
}

// Close takes cables, bridge and filters away and lets the namespaces go, each of
// which ends with its last process.
func (l *Lab) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var errs []error
	var gone []string
	for i, home := range l.homes {
		gone = append(gone, "link del "+l.end(i))
		errs = append(errs, home.Close())
	}
	l.homes = nil
	// A lab that was not built to its end lacks some of it, hence -force.
	_ = run(ctx, append(gone, "link del "+bridge), "ip", "-force", "-batch", "-")
	if err := alone(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(append(errs, run(ctx, []string{"add table " + table, "delete table " + table}, "nft", "-f", "-"))...)
}

// run gives lines to a command.
func run(ctx context.Context, lines []string, name string, args ...string) error {
	if len(lines) == 0 {
		return nil
	}
	c := exec.CommandContext(ctx, name, args...)
	c.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	var said bytes.Buffer
	c.Stdout, c.Stderr = &said, &said
	if err := c.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(said.String()))
	}
	return nil
}
