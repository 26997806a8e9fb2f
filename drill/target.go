package drill

import (
	"errors"
	"fmt"
	"slices"

	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/internal/clusterfile"
)

// site is a place with links to others: a region, or a witness; or one server
// of a region, with links to the others.
type site struct {
	name   string
	region bool
}

// peer is how a fault's rule names the site.
func (s site) peer() string {
	if s.region {
		return "region/" + s.name
	}
	return s.name
}

// world is what roles are resolved by, at one instant.
type world struct {
	file clusterfile.File
	// owners of partitions, and leaders of regions.
	owners, leaders map[string]string
	// chosen is where a number of witnesses begins among them.
	chosen int
	// pick chooses one of n.
	pick func(n int) int
}

func (w world) partition(p plan.Part) (clusterfile.Partition, error) {
	if p.Number > 0 {
		if p.Number > len(w.file.Partitions) {
			return clusterfile.Partition{}, fmt.Errorf("%v: the cluster has %d", p, len(w.file.Partitions))
		}
		return w.file.Partitions[p.Number-1], nil
	}
	for _, q := range w.file.Partitions {
		if q.Name == p.Name {
			return q, nil
		}
	}
	return clusterfile.Partition{}, fmt.Errorf("partition %s: the cluster has none of that name", p.Name)
}

// region resolves a region by its name or its role.
func (w world) region(t plan.Target) (string, error) {
	if t.Role == plan.Named {
		if !slices.Contains(w.file.RegionNames(), t.Name) {
			return "", fmt.Errorf("region %s: the cluster has %v", t.Name, w.file.RegionNames())
		}
		return t.Name, nil
	}
	p, err := w.partition(t.Partition)
	if err != nil {
		return "", err
	}
	owner := w.owners[p.Name]
	if owner == "" {
		return "", fmt.Errorf("partition %s has no owner now", p.Name)
	}
	if t.Role == plan.Owner {
		return owner, nil
	}
	// In the order of preference, then the rest.
	order := slices.Clone(p.Prefer)
	for _, r := range w.file.RegionNames() {
		if !slices.Contains(order, r) {
			order = append(order, r)
		}
	}
	order = slices.DeleteFunc(order, func(r string) bool { return r == owner })
	switch {
	case t.Role == plan.Next && len(order) > 0:
		return order[0], nil
	case t.Role == plan.Bystander && len(order) > 1:
		return order[len(order)-1], nil
	}
	return "", fmt.Errorf("%v: the cluster has too few regions", t)
}

// processes that a target names.
func (w world) processes(t plan.Target) ([]clusterfile.Process, error) {
	switch t.Who {
	case plan.TheServer, plan.TheWitness:
		p, ok := w.file.Process(t.Name)
		if !ok || (p.Role == clusterfile.RoleWitness) != (t.Who == plan.TheWitness) {
			return nil, fmt.Errorf("%v: the cluster has none of that name", t)
		}
		return []clusterfile.Process{p}, nil
	case plan.TheLeader, plan.TheFollowers, plan.AFollower:
		return w.servers(t)
	default:
	}
	sites, err := w.sites(t)
	if err != nil {
		return nil, err
	}
	var out []clusterfile.Process
	for _, s := range sites {
		out = append(out, w.at(s)...)
	}
	return out, nil
}

func (w world) servers(t plan.Target) ([]clusterfile.Process, error) {
	region, err := w.region(t)
	if err != nil {
		return nil, err
	}
	leader := w.leaders[region]
	var followers []clusterfile.Process
	for _, p := range w.file.RegionProcesses(region) {
		if p.Name != leader {
			followers = append(followers, p)
		} else if t.Who == plan.TheLeader {
			return []clusterfile.Process{p}, nil
		}
	}
	switch {
	case leader == "":
		return nil, fmt.Errorf("region %s has no leader now", region)
	case t.Who == plan.TheLeader:
		return nil, fmt.Errorf("region %s: its leader %s is not in the cluster file", region, leader)
	case len(followers) == 0:
		return nil, fmt.Errorf("region %s has no followers", region)
	case t.Who == plan.AFollower:
		i := w.pick(len(followers))
		return followers[i : i+1], nil
	}
	return followers, nil
}

// at returns the processes of a site.
func (w world) at(s site) []clusterfile.Process {
	if s.region {
		return w.file.RegionProcesses(s.name)
	}
	p, _ := w.file.Process(s.name)
	return []clusterfile.Process{p}
}

// sites that a target names.
func (w world) sites(t plan.Target) ([]site, error) {
	var regions, witnesses []site
	for _, r := range w.file.RegionNames() {
		regions = append(regions, site{r, true})
	}
	for _, x := range w.file.Witnesses {
		witnesses = append(witnesses, site{x.Name, false})
	}
	switch t.Who {
	case plan.TheRegion:
		r, err := w.region(t)
		return []site{{r, true}}, err
	case plan.TheWitness:
		_, err := w.processes(t)
		return []site{{t.Name, false}}, err
	case plan.SomeWitnesses:
		if t.Count > len(witnesses) {
			return nil, fmt.Errorf("%v: the cluster has %d", t, len(witnesses))
		}
		out := make([]site, t.Count)
		for i := range out {
			out[i] = witnesses[(w.chosen+i)%len(witnesses)]
		}
		return out, nil
	case plan.AllWitnesses:
		return witnesses, nil
	case plan.AllRegions:
		return regions, nil
	case plan.AllSites:
		return append(regions, witnesses...), nil
	case plan.TheServer, plan.TheLeader, plan.TheFollowers, plan.AFollower:
		servers, err := w.processes(t)
		var out []site
		for _, p := range servers {
			out = append(out, site{p.Name, false})
		}
		return out, err
	default:
		return nil, fmt.Errorf("%v: links are between sites; name a region or a witness", t)
	}
}

// isolated are the sites that a step cuts from all others.
func (w world) isolated(t plan.Target) ([]site, error) {
	switch t.Who {
	case plan.TheServer, plan.TheLeader, plan.TheFollowers, plan.AFollower:
		return nil, fmt.Errorf("%v: a server shares its region's links to others; cut it from the region's other servers", t)
	default:
		return w.sites(t)
	}
}

// check finds what a scenario's targets ask for that no state of this cluster
// can have.
func (w world) check(s plan.Scenario) error {
	// Whoever owns and leads: the first.
	w.owners, w.leaders = map[string]string{}, map[string]string{}
	for _, p := range w.file.Partitions {
		w.owners[p.Name] = w.file.RegionNames()[0]
	}
	for _, r := range w.file.RegionNames() {
		w.leaders[r] = w.file.RegionProcesses(r)[0].Name
	}
	w.pick = func(int) int { return 0 }
	var errs []error
	tell := func(i int, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("step %d (%s, line %d): %w", i+1, s.Steps[i].Title(), s.Steps[i].Line, err))
		}
	}
	for i, st := range s.Steps {
		if st.Target.Who != plan.Nobody {
			_, err := w.processes(st.Target)
			tell(i, err)
		}
		for _, end := range []plan.Target{st.From, st.To} {
			if end.Who != plan.Nobody {
				_, err := w.sites(end)
				tell(i, err)
			}
		}
		if st.Do == plan.RedisDown {
			_, err := w.cacheRegions(st)
			tell(i, err)
		}
		if st.Do == plan.Isolate {
			_, err := w.isolated(st.Target)
			tell(i, err)
		}
		if !st.Partition.IsZero() {
			_, err := w.partition(st.Partition)
			tell(i, err)
		}
	}
	return errors.Join(errs...)
}
