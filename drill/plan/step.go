package plan

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// use is the fields that a kind of step takes, beside at and do.
type use struct{ needs, may []string }

// uses says which fields a kind of step takes, beside at and do: those that it
// needs, and those that it may have.
var uses = map[Kind]use{
	Cut:            {[]string{"between", "for"}, []string{"planes"}},
	OneWay:         {[]string{"from", "to", "for"}, []string{"planes"}},
	Isolate:        {[]string{"target", "for"}, []string{"planes"}},
	Delay:          {[]string{"for"}, []string{"between", "from", "to", "add", "jitter", "planes"}},
	Loss:           {[]string{"share", "for"}, []string{"between", "from", "to", "planes"}},
	Flap:           {[]string{"between", "up", "down", "for"}, []string{"planes"}},
	Kill:           {[]string{"target"}, []string{"for"}},
	Pause:          {[]string{"target", "for"}, nil},
	Restart:        {[]string{"target"}, nil},
	DiskHang:       {[]string{"target", "for"}, []string{"store"}},
	DiskFull:       {[]string{"target", "for"}, []string{"store"}},
	ClockStep:      {[]string{"target", "step"}, []string{"for", "clock"}},
	RedisDown:      {[]string{"for"}, []string{"target", "how"}},
	Transfer:       {[]string{"partition", "to"}, nil},
	HandOver:       {[]string{"to"}, nil},
	RollingRestart: {[]string{"target"}, []string{"pause"}},
	MassRedeploy:   {nil, nil},
	Herd:           {[]string{"clients"}, []string{"partition"}},
	Freeze:         {[]string{"partition"}, nil},
	Thaw:           {nil, nil},
	Await:          {[]string{"until", "within"}, []string{"partition"}},
}

// Kinds of steps, in the order of their names.
func Kinds() []string {
	var out []string
	for k := range uses {
		out = append(out, string(k))
	}
	slices.Sort(out)
	return out
}

// planeNames as a file writes them.
var planeNames = []string{"api", "votes", "raft", "gossip"}

func (r *reader) step(n *yaml.Node, field string) Step {
	s := Step{Line: n.Line, Pause: time.Second, Clock: WallClock, How: KillIt}
	given := map[string]bool{}
	var do string
	note := func(name string, read func(*yaml.Node, string)) func(*yaml.Node, string) {
		return func(n *yaml.Node, f string) { given[name] = true; read(n, f) }
	}
	known := map[string]func(*yaml.Node, string){
		"do":      text(r, &do, 40),
		"at":      note("at", span(r, &s.At)),
		"for":     span(r, &s.For),
		"target":  parsed(r, &s.Target, ParseTarget),
		"from":    parsed(r, &s.From, ParseTarget),
		"to":      parsed(r, &s.To, ParseTarget),
		"between": func(n *yaml.Node, f string) { r.between(n, f, &s) },
		"planes": func(n *yaml.Node, f string) {
			r.items(n, f, maxPlanes, func(n *yaml.Node, f string) {
				p := r.text(n, f)
				if !slices.Contains(planeNames, p) {
					r.wrong(n, f, "%q; use %s", p, strings.Join(planeNames, ", "))
				}
				s.Planes = append(s.Planes, p)
			})
		},
		"add":       length(r, &s.Add, time.Millisecond, time.Minute),
		"jitter":    length(r, &s.Jitter, time.Millisecond, time.Minute),
		"share":     parsed(r, &s.Share, share),
		"up":        length(r, &s.Up, 100*time.Millisecond, time.Hour),
		"down":      length(r, &s.Down, 100*time.Millisecond, time.Hour),
		"step":      length(r, &s.Step, -time.Hour, time.Hour),
		"clock":     text(r, &s.Clock, 40),
		"how":       text(r, &s.How, 40),
		"store":     text(r, &s.Store, 40),
		"clients":   whole(r, &s.Clients, 1, maxHerd),
		"pause":     length(r, &s.Pause, 0, time.Hour),
		"partition": parsed(r, &s.Partition, ParsePart),
		"until":     text(r, &s.Until, 40),
		"within":    span(r, &s.Within),
	}
	for name, read := range known {
		if name != "do" && name != "at" {
			known[name] = note(name, read)
		}
	}
	before := len(r.faults)
	r.fields(n, field, known)
	s.Do = Kind(do)
	if len(r.faults) == before {
		r.checkStep(n, field, s, given)
	}
	return s
}

func (r *reader) between(n *yaml.Node, field string, s *Step) {
	var ends []Target
	r.items(n, field, 2, func(n *yaml.Node, f string) {
		var t Target
		parsed(r, &t, ParseTarget)(n, f)
		ends = append(ends, t)
	})
	if len(ends) != 2 {
		r.wrong(n, field, "must have two ends: [owner of partition 1, next owner of partition 1]")
		return
	}
	s.From, s.To, s.Both = ends[0], ends[1], true
}

func (r *reader) checkStep(n *yaml.Node, field string, s Step, given map[string]bool) {
	use, ok := uses[s.Do]
	if !ok {
		r.wrong(n, join(field, "do"), "%q; use %s", s.Do, strings.Join(Kinds(), ", "))
		return
	}
	if !given["at"] {
		r.wrong(n, join(field, "at"), "is missing; say when, from the moment at which the cluster works")
	}
	for _, f := range use.needs {
		if !given[f] {
			r.wrong(n, join(field, f), "is missing; %s needs it", s.Do)
		}
	}
	for _, f := range names(given) {
		if f != "at" && !slices.Contains(use.needs, f) && !slices.Contains(use.may, f) {
			r.wrong(n, join(field, f), "means nothing to %s", s.Do)
		}
	}
	if given["for"] {
		r.notNothing(n, join(field, "for"), s.For)
	}
	if given["within"] {
		r.notNothing(n, join(field, "within"), s.Within)
	}
	r.checkKind(n, field, s, given)
}

// notNothing: a rule's end is told in milliseconds.
func (r *reader) notNothing(n *yaml.Node, field string, s Span) {
	if s.Of(time.Second, 100*time.Millisecond) < time.Millisecond {
		r.wrong(n, field, "%v; must be a millisecond or longer", s)
	}
}

func (r *reader) checkKind(n *yaml.Node, field string, s Step, given map[string]bool) {
	if one := []Who{TheRegion, TheServer, TheWitness, TheLeader}; s.Links() && s.Do != Isolate && s.From == s.To && slices.Contains(one, s.From.Who) {
		r.wrong(n, field, "both ends are %v; there is no link to break", s.From)
	}
	switch s.Do {
	case Flap:
		if longest := s.For.Of(time.Minute, time.Second); s.Down > longest {
			r.wrong(n, join(field, "down"), "%v is longer than for, %v; no cut fits in", s.Down, s.For)
		}
	case Delay, Loss:
		if given["between"] == (given["from"] && given["to"]) || given["from"] != given["to"] {
			r.wrong(n, field, "write either between, or from and to")
		}
		if s.Do == Delay && s.Add == 0 && s.Jitter == 0 {
			r.wrong(n, join(field, "add"), "is missing, and jitter too; %s needs one of them", s.Do)
		}
	case RollingRestart:
		if s.Target.Who != TheRegion && s.Target.Who != AllRegions {
			r.wrong(n, join(field, "target"), "%q; a rolling restart is of a region", s.Target)
		}
	case Transfer:
		if s.To.Who != TheRegion {
			r.wrong(n, join(field, "to"), "%q; a partition goes to a region", s.To)
		}
	case HandOver:
		if s.To.Who != AFollower && s.To.Who != TheServer {
			r.wrong(n, join(field, "to"), "%q; leadership goes to a follower of a region, or to server NAME", s.To)
		}
	case ClockStep:
		r.checkClockStep(n, field, s, given)
	case RedisDown:
		if given["target"] && s.Target.Who != TheRegion && s.Target.Who != AllRegions {
			r.wrong(n, join(field, "target"), "%q; a lease cache is of a region", s.Target)
		}
		if s.How != KillIt && s.How != PauseIt {
			r.wrong(n, join(field, "how"), "%q; use %s or %s", s.How, KillIt, PauseIt)
		}
	case Await:
		switch s.Until {
		case UntilSettled:
		case UntilPromotion:
			if s.Partition.IsZero() {
				r.wrong(n, join(field, "partition"), "is missing; say of which partition")
			}
		default:
			r.wrong(n, join(field, "until"), "%q; use %s or %s", s.Until, UntilPromotion, UntilSettled)
		}
	default:
	}
}

func (r *reader) checkClockStep(n *yaml.Node, field string, s Step, given map[string]bool) {
	if s.Step == 0 {
		r.wrong(n, join(field, "step"), "must not be 0")
	}
	switch s.Clock {
	case WallClock:
		if !given["for"] {
			r.wrong(n, join(field, "for"), "is missing; say after how long the wall clock is set right again")
		}
	case LeaseClock:
		if given["for"] {
			r.wrong(n, join(field, "for"), "means nothing to a lease clock: what it has gained stays")
		}
		if s.Step < 0 {
			r.wrong(n, join(field, "step"), "%v; a lease clock never goes back", s.Step)
		}
	default:
		r.wrong(n, join(field, "clock"), "%q; use %s or %s", s.Clock, WallClock, LeaseClock)
	}
}

// Title is the step in a few words.
func (s Step) Title() string {
	out := string(s.Do)
	switch {
	case s.From.Who != Nobody && s.Both:
		out += fmt.Sprintf(" %v and %v", s.From, s.To)
	case s.From.Who != Nobody:
		out += fmt.Sprintf(" from %v to %v", s.From, s.To)
	case s.Target.Who != Nobody:
		out += " " + s.Target.String()
	case !s.Partition.IsZero():
		out += " " + s.Partition.String()
	}
	if s.Do == HandOver {
		out += fmt.Sprintf(" to %v", s.To)
	}
	if s.Do == Await {
		out = "await " + s.Until
		if !s.Partition.IsZero() {
			out += " of " + s.Partition.String()
		}
	}
	if s.Do == ClockStep {
		out += fmt.Sprintf(" of the %s clock by %v", s.Clock, s.Step)
	}
	if s.Do == Loss {
		out += fmt.Sprintf(" of %.4g %%", 100*s.Share)
	}
	if len(s.Planes) > 0 {
		out += " on " + strings.Join(s.Planes, ", ")
	}
	if !s.For.IsZero() {
		out += fmt.Sprintf(" for %v", s.For)
	}
	return out
}
