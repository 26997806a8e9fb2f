package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/internal/netns"
)

// standing asks, of faults of links that were put in, whether all of them are
// still in force. What it returns as effect adds to what was measured.
type standing func(ctx context.Context) (effect string, err error)

// putLinks puts a fault of links in, which ends by itself after lasts: by the
// fault tables of the senders, or by the packet filters between the sites.
func (p *player) putLinks(ctx context.Context, id string, w world, s plan.Step, links []link, lasts time.Duration) (standing, error) {
	if p.rig.lab == nil {
		rules := w.rules(id, s, links, lasts)
		return func(ctx context.Context) (string, error) {
			var errs []error
			for _, name := range sortedKeys(rules) {
				process, _ := p.rig.file().Process(name)
				if !p.isDown(name) {
					errs = append(errs, p.inForce(ctx, process, rules[name]))
				}
			}
			return "", errors.Join(errs...)
		}, p.set(ctx, rules, lasts)
	}
	var cables []netns.Link
	for _, l := range links {
		cables = append(cables, netns.Link{From: l.from.name, To: l.to.name})
	}
	return func(ctx context.Context) (string, error) {
		dropped, err := p.rig.lab.Dropped(ctx)
		if err != nil {
			return "", err
		}
		frames := 0
		for _, c := range cables {
			n, cut := dropped[c]
			if !cut || n == 0 {
				return "", fmt.Errorf("the packet filters dropped nothing of what %s sent to %s", c.From, c.To)
			}
			frames += n
		}
		return fmt.Sprintf("; the filters had dropped %d frames", frames), nil
	}, p.rig.lab.Cut(ctx, cables, lasts)
}

// filterable refuses a scenario with faults that packet filters cannot put in.
func filterable(s plan.Scenario) error {
	for i, st := range s.Steps {
		whole := slices.Contains([]plan.Kind{plan.Cut, plan.OneWay, plan.Isolate, plan.Flap}, st.Do)
		for _, end := range []plan.Target{st.Target, st.From, st.To} {
			whole = whole && !slices.Contains([]plan.Who{plan.TheServer, plan.TheLeader, plan.TheFollowers, plan.AFollower}, end.Who)
		}
		if st.Links() && (!whole || len(st.Planes) > 0) {
			return fmt.Errorf("step %d (%s, line %d): packet filters cut whole cables: cut, one-way, isolate and flap, of all planes and between sites; "+
				"run it without --netns", i+1, st.Title(), st.Line)
		}
	}
	return nil
}
