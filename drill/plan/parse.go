package plan

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// MaxSize of a scenario file, in bytes.
const MaxSize = 256 << 10

const (
	maxSteps    = 200
	maxSessions = 2000
	maxLocks    = 1000
	maxWaiters  = 1000
	maxHerd     = 5000
	maxPlanes   = 4
)

// Error is everything that is wrong with a file, in the order of its lines.
type Error struct {
	// Source names the file; it may be empty.
	Source string
	Faults []Fault
}

// Fault is one thing that is wrong.
type Fault struct {
	Line    int
	Field   string
	Problem string
}

func (e *Error) Error() string {
	lines := make([]string, len(e.Faults))
	for i, f := range e.Faults {
		at := ""
		if f.Line > 0 {
			at = fmt.Sprintf("line %d: ", f.Line)
		}
		if f.Field != "" {
			at += f.Field + ": "
		}
		lines[i] = at + f.Problem
		if e.Source != "" {
			lines[i] = e.Source + ": " + lines[i]
		}
	}
	return strings.Join(lines, "\n")
}

// Parse reads a scenario. It is strict: unknown keys, keys given twice and
// values of another type are errors. The error is an *Error.
func Parse(data []byte) (Scenario, error) {
	if len(data) > MaxSize {
		return Scenario{}, &Error{Faults: []Fault{{Problem: fmt.Sprintf("has %d bytes, over %d; is it a scenario?", len(data), MaxSize)}}}
	}
	d := yaml.NewDecoder(bytes.NewReader(data))
	var doc, more yaml.Node
	err := d.Decode(&doc)
	if err == nil {
		if err = d.Decode(&more); errors.Is(err, io.EOF) {
			err = nil
		} else if err == nil {
			err = errors.New("has more than one document; write one scenario a file")
		}
	} else if errors.Is(err, io.EOF) {
		err = errors.New("is empty; 'headlease drill show cable-cut' prints a scenario to begin with")
	}
	if err != nil {
		return Scenario{}, &Error{Faults: []Fault{{Problem: "not YAML: " + strings.TrimPrefix(err.Error(), "yaml: ")}}}
	}
	r := &reader{}
	s := r.scenario(doc.Content[0])
	if len(r.faults) > 0 {
		slices.SortStableFunc(r.faults, func(a, b Fault) int { return a.Line - b.Line })
		return Scenario{}, &Error{Faults: r.faults}
	}
	return s, nil
}

// reader reads nodes and collects what is wrong with them.
type reader struct{ faults []Fault }

func (r *reader) wrong(n *yaml.Node, field, format string, args ...any) {
	line := 0
	if n != nil {
		line = n.Line
	}
	r.faults = append(r.faults, Fault{line, field, fmt.Sprintf(format, args...)})
}

// fields reads a mapping; path is the field's own name, "" at the top.
func (r *reader) fields(n *yaml.Node, path string, known map[string]func(n *yaml.Node, field string)) {
	n = resolve(n)
	if n.Kind != yaml.MappingNode {
		r.wrong(n, path, "must be a mapping of %s", strings.Join(names(known), ", "))
		return
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		field := join(path, key.Value)
		read, ok := known[key.Value]
		switch {
		case !ok:
			r.wrong(key, field, "unknown key; use %s", strings.Join(names(known), ", "))
		case seen[key.Value]:
			r.wrong(key, field, "given twice")
		default:
			read(value, field)
		}
		seen[key.Value] = true
	}
}

func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode && n.Alias != nil {
		return n.Alias
	}
	return n
}

func names[V any](m map[string]V) []string {
	var out []string
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// items reads a list.
func (r *reader) items(n *yaml.Node, field string, most int, read func(n *yaml.Node, field string)) {
	n = resolve(n)
	if n.Kind != yaml.SequenceNode {
		r.wrong(n, field, "must be a list")
		return
	}
	if len(n.Content) > most {
		r.wrong(n, field, "has %d entries; at most %d", len(n.Content), most)
		return
	}
	for i, item := range n.Content {
		read(item, fmt.Sprintf("%s[%d]", field, i))
	}
}

func (r *reader) text(n *yaml.Node, field string) string {
	n = resolve(n)
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		r.wrong(n, field, "must be a text")
		return ""
	}
	return n.Value
}

func text(r *reader, to *string, most int) func(*yaml.Node, string) {
	return func(n *yaml.Node, field string) {
		s := strings.TrimSpace(r.text(n, field))
		if len(s) > most {
			r.wrong(n, field, "has %d bytes; at most %d", len(s), most)
			return
		}
		*to = s
	}
}

func whole(r *reader, to *int, low, high int) func(*yaml.Node, string) {
	return func(n *yaml.Node, field string) {
		v, err := strconv.Atoi(r.text(n, field))
		if err != nil || v < low || v > high {
			r.wrong(n, field, "%q; use a number from %d to %d", resolve(n).Value, low, high)
			return
		}
		*to = v
	}
}

func flag(r *reader, to *bool) func(*yaml.Node, string) {
	return func(n *yaml.Node, field string) {
		switch r.text(n, field) {
		case "true":
			*to = true
		case "false":
		default:
			r.wrong(n, field, "%q; use true or false", resolve(n).Value)
		}
	}
}

func span(r *reader, to *Span) func(*yaml.Node, string) {
	return func(n *yaml.Node, field string) {
		s, err := ParseSpan(r.text(n, field))
		if err != nil {
			r.wrong(n, field, "%v", err)
			return
		}
		*to = s
	}
}

func length(r *reader, to *time.Duration, low, high time.Duration) func(*yaml.Node, string) {
	return func(n *yaml.Node, field string) {
		s, err := time.ParseDuration(strings.ReplaceAll(r.text(n, field), " ", ""))
		if err != nil || s < low || s > high {
			r.wrong(n, field, "%q; use a time from %v to %v", resolve(n).Value, low, high)
			return
		}
		*to = s
	}
}

func parsed[V any](r *reader, to *V, parse func(string) (V, error)) func(*yaml.Node, string) {
	return func(n *yaml.Node, field string) {
		v, err := parse(r.text(n, field))
		if err != nil {
			r.wrong(n, field, "%v", err)
			return
		}
		*to = v
	}
}

// rate reads "20/s" or "20".
func rate(s string) (float64, error) {
	v, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(s), "/s")), 64)
	if err != nil || !(v > 0 && v <= 1000) {
		return 0, fmt.Errorf("%q; use writes per second such as 10/s, up to 1000/s", s)
	}
	return v, nil
}

// share reads "20%" or "0.2".
func share(s string) (float64, error) {
	number, percent := strings.CutSuffix(strings.TrimSpace(s), "%")
	v, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if percent {
		v /= 100
	}
	if err != nil || !(v > 0 && v <= 1) || math.IsNaN(v) {
		return 0, fmt.Errorf("%q; use a share such as 20%%", s)
	}
	return v, nil
}

var namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

func (r *reader) scenario(n *yaml.Node) Scenario {
	s := Scenario{
		Cluster:  Shape{D: DefaultD, Regions: 3, Servers: DefaultServers, Witnesses: 3, RTT: "default"},
		Workload: Workload{Sessions: 3, Locks: 3, Waiters: 1, Writes: 5, TTL: DefaultTTL},
		After:    Span{D: 1, Fixed: time.Second},
	}
	var steps *yaml.Node
	r.fields(n, "", map[string]func(*yaml.Node, string){
		"name":    text(r, &s.Name, 63),
		"summary": text(r, &s.Summary, 200),
		"about":   text(r, &s.About, 4000),
		"after":   span(r, &s.After),
		"control": flag(r, &s.Control),
		"cluster": func(n *yaml.Node, f string) {
			r.fields(n, f, map[string]func(*yaml.Node, string){
				"d":         length(r, &s.Cluster.D, time.Second, time.Minute),
				"regions":   whole(r, &s.Cluster.Regions, 2, 5),
				"servers":   whole(r, &s.Cluster.Servers, 1, 5),
				"witnesses": whole(r, &s.Cluster.Witnesses, 1, 7),
				"rtt":       text(r, &s.Cluster.RTT, 500),
				"redis":     flag(r, &s.Cluster.Redis),
			})
		},
		"workload": func(n *yaml.Node, f string) {
			r.fields(n, f, map[string]func(*yaml.Node, string){
				"sessions": whole(r, &s.Workload.Sessions, 1, maxSessions),
				"locks":    whole(r, &s.Workload.Locks, 1, maxLocks),
				"waiters":  whole(r, &s.Workload.Waiters, 0, maxWaiters),
				"writes":   parsed(r, &s.Workload.Writes, rate),
				"reads":    parsed(r, &s.Workload.Reads, rate),
				"hold":     length(r, &s.Workload.Hold, 0, time.Hour),
				"ttl":      length(r, &s.Workload.TTL, 500*time.Millisecond, 10*time.Minute),
			})
		},
		"steps": func(n *yaml.Node, f string) {
			steps = n
			r.items(n, f, maxSteps, func(n *yaml.Node, f string) { s.Steps = append(s.Steps, r.step(n, f)) })
		},
		"expect": func(n *yaml.Node, f string) {
			r.items(n, f, maxSteps, func(n *yaml.Node, f string) {
				var e Expectation
				parsed(r, &e, ParseExpectation)(n, f)
				e.Line = n.Line
				s.Expect = append(s.Expect, e)
			})
		},
	})
	if len(r.faults) == 0 {
		r.check(n, steps, s)
	}
	return s
}

// check finds what is wrong with a scenario whose fields are good by
// themselves.
func (r *reader) check(n, steps *yaml.Node, s Scenario) {
	if !namePattern.MatchString(s.Name) {
		r.wrong(n, "name", "%q; use 1 to 63 of a-z, 0-9 and -", s.Name)
	}
	if s.Summary == "" {
		r.wrong(n, "summary", "is missing; say in one line what is shown")
	}
	if s.Cluster.Servers%2 == 0 {
		r.wrong(n, "cluster.servers", "%d; use 1, 3 or 5", s.Cluster.Servers)
	}
	if s.Cluster.Witnesses%2 == 0 {
		r.wrong(n, "cluster.witnesses", "%d; use an odd number", s.Cluster.Witnesses)
	}
	if len(s.Steps) == 0 {
		r.wrong(n, "steps", "is missing; a drill breaks something")
	}
	frozen := false
	for i, st := range s.Steps {
		field := fmt.Sprintf("steps[%d]", i)
		node := steps.Content[i]
		if i > 0 {
			if was := s.Steps[i-1].At; !later(st.At, was) {
				r.wrong(node, field+".at", "%v is before the step above it, at %v; write steps in the order of their time", st.At, was)
			}
		}
		switch st.Do {
		case Freeze:
			if frozen {
				r.wrong(node, field, "the worker is frozen already")
			}
			frozen = true
		case Thaw:
			if !frozen {
				r.wrong(node, field, "nobody is frozen; write a freeze step before it")
			}
		default:
		}
	}
	for i, e := range s.Expect {
		if e.Fact == StaleWrite && !frozen {
			r.wrong(n, fmt.Sprintf("expect[%d]", i), "%q needs a freeze and a thaw step", e.Text)
		}
	}
	if s.Control && !frozen {
		r.wrong(n, "control", "needs a freeze and a thaw step: without a late write the guard has nothing to refuse")
	}
}

// later reports whether a span is no shorter than another, for every D of a
// second or more and every round trip.
func later(a, b Span) bool {
	for _, d := range []time.Duration{time.Second, time.Minute} {
		for _, rtt := range []time.Duration{0, time.Second} {
			if a.Of(d, rtt) < b.Of(d, rtt) {
				return false
			}
		}
	}
	return true
}
