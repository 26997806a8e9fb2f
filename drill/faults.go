package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// link is one direction between two sites.
type link struct{ from, to site }

// links of a step, each direction once.
func (w world) links(s plan.Step) ([]link, error) {
	var from, to []site
	var err error
	if s.Do == plan.Isolate {
		if from, err = w.isolated(s.Target); err == nil {
			to, err = w.sites(plan.Target{Who: plan.AllSites})
		}
	} else if from, err = w.sites(s.From); err == nil {
		to, err = w.sites(s.To)
	}
	if err != nil {
		return nil, err
	}
	var out []link
	add := func(a, b site) {
		if l := (link{a, b}); a != b && !slices.Contains(out, l) {
			out = append(out, l)
		}
	}
	for _, a := range from {
		for _, b := range to {
			if s.Do == plan.Isolate && slices.Contains(from, b) {
				continue // those that are isolated see each other
			}
			add(a, b)
			if s.Both || s.Do == plan.Isolate {
				add(b, a)
			}
		}
	}
	if len(out) == 0 {
		return nil, errors.New("both ends are the same site; there is no link to break")
	}
	return out, nil
}

var wirePlanes = map[string]pb.Plane{
	"api": pb.Plane_PLANE_API, "votes": pb.Plane_PLANE_VOTES, "raft": pb.Plane_PLANE_RAFT, "gossip": pb.Plane_PLANE_GOSSIP,
}

// rules are what each sender of the links gets, by process. They expire by
// themselves after lasts.
func (w world) rules(id string, s plan.Step, links []link, lasts time.Duration) map[string]*pb.SetFaultsRequest {
	planes := []pb.Plane{pb.Plane_PLANE_UNSPECIFIED}
	if len(s.Planes) > 0 {
		planes = nil
		for _, p := range s.Planes {
			planes = append(planes, wirePlanes[p])
		}
	}
	out := map[string]*pb.SetFaultsRequest{}
	for _, l := range links {
		for _, p := range w.at(l.from) {
			if out[p.Name] == nil {
				out[p.Name] = &pb.SetFaultsRequest{}
			}
			for _, plane := range planes {
				f := &pb.Fault{
					Id: fmt.Sprintf("%s-%d", id, len(out[p.Name].Faults)), Peer: l.to.peer(), Plane: plane, ExpiresMs: lasts.Milliseconds(),
				}
				switch s.Do {
				case plan.Delay:
					f.DelayMs, f.JitterMs = s.Add.Milliseconds(), s.Jitter.Milliseconds()
				case plan.Loss:
					f.Loss = s.Share
				default:
					f.Drop = true
				}
				out[p.Name].Faults = append(out[p.Name].Faults, f)
			}
		}
	}
	return out
}

// carried is what each process was told to do, so that one that starts again
// in the meantime can be told once more.
type carried struct {
	mu    sync.Mutex
	rules map[string][]carriedRule // by process
}

type carriedRule struct {
	req  *pb.SetFaultsRequest
	ends instant.Instant
}

func (c *carried) note(process string, req *pb.SetFaultsRequest, ends instant.Instant) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.rules == nil {
		c.rules = map[string][]carriedRule{}
	}
	c.rules[process] = append(c.rules[process], carriedRule{req, ends})
}

// left returns what a process still has to do.
func (c *carried) left(process string, now instant.Instant) *pb.SetFaultsRequest {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := &pb.SetFaultsRequest{}
	for _, r := range c.rules[process] {
		ms := r.ends.Sub(now).Milliseconds()
		if ms < 1 {
			continue
		}
		for _, f := range r.req.GetFaults() {
			out.Faults = append(out.Faults, &pb.Fault{
				Id: f.Id, Peer: f.Peer, Plane: f.Plane, Drop: f.Drop, DelayMs: f.DelayMs, JitterMs: f.JitterMs, Loss: f.Loss, ExpiresMs: ms,
			})
		}
		for _, f := range r.req.GetDiskFaults() {
			out.DiskFaults = append(out.DiskFaults, &pb.DiskFault{Id: f.Id, Store: f.Store, Stall: f.Stall, Full: f.Full, ExpiresMs: ms})
		}
		for _, f := range r.req.GetClockFaults() {
			if f.WallStepMs != 0 { // a lease clock has taken its step, or is another one now
				out.ClockFaults = append(out.ClockFaults, &pb.ClockFault{Id: f.Id, WallStepMs: f.WallStepMs, ExpiresMs: ms})
			}
		}
	}
	return out
}

// set tells each process its rules, all at once, and makes sure that each
// lists them.
func (p *player) set(ctx context.Context, rules map[string]*pb.SetFaultsRequest, lasts time.Duration) error {
	var mu sync.Mutex
	var errs []error
	var wg sync.WaitGroup
	for name, req := range rules {
		process, _ := p.rig.file().Process(name)
		wg.Go(func() {
			ends := p.rig.clock.Now().Add(lasts)
			err := p.rig.admin.SetFaults(ctx, process, req)
			if err == nil {
				p.carried.note(name, req, ends)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", name, err))
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// inForce says which of the rules a process does not list; nil: it lists all.
func (p *player) inForce(ctx context.Context, process clusterfile.Process, req *pb.SetFaultsRequest) error {
	list, err := p.rig.admin.ListFaults(ctx, process)
	if err != nil {
		return err
	}
	ids := map[string]bool{}
	for _, f := range list.GetFaults() {
		ids[f.GetId()] = true
	}
	for _, f := range list.GetDiskFaults() {
		ids[f.GetId()] = true
	}
	for _, f := range list.GetClockFaults() {
		ids[f.GetId()] = true
	}
	var want []string
	for _, f := range req.GetFaults() {
		want = append(want, f.GetId())
	}
	for _, f := range req.GetDiskFaults() {
		want = append(want, f.GetId())
	}
	for _, f := range req.GetClockFaults() {
		want = append(want, f.GetId())
	}
	for _, id := range want {
		if !ids[id] {
			return fmt.Errorf("%s does not list fault %s", process.Name, id)
		}
	}
	return nil
}

// heal ends every fault in every process that answers.
func (r *rig) heal(ctx context.Context) error {
	var mu sync.Mutex
	var errs []error
	var wg sync.WaitGroup
	for _, p := range r.file().Processes() {
		wg.Go(func() {
			if err := r.admin.ClearFaults(ctx, p); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		})
	}
	wg.Wait()
	if r.lab != nil {
		errs = append(errs, r.lab.Heal(ctx))
	}
	return errors.Join(errs...)
}
