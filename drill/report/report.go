package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// Report is what a drill found, as `--json` prints it. All times are in
// milliseconds from the first moment of the quiet, working cluster.
type Report struct {
	Scenario string `json:"scenario"`
	Summary  string `json:"summary"`
	About    string `json:"about,omitempty"`
	// OK: everything held, and that was shown. Verdict is "ok", "FAILED" or
	// "inconclusive".
	OK      bool   `json:"ok"`
	Verdict string `json:"verdict"`
	// Inconclusive are the reasons for which nothing was shown; Stalled: they
	// are all this machine's, which did not run when it had to.
	Inconclusive []string `json:"inconclusive,omitempty"`
	Stalled      bool     `json:"stalled,omitempty"`
	// Violations of invariants and broken expectations, as text.
	Violations   []string      `json:"violations"`
	Details      []Detail      `json:"details,omitempty"`
	Expectations []Expectation `json:"expectations"`
	// Checked says what the checks rest on.
	Checked []string `json:"checked"`

	Began      time.Time `json:"began"`
	DurationMS int64     `json:"duration_ms"`
	Seed       uint64    `json:"seed"`
	Cluster    string    `json:"cluster"`
	Private    bool      `json:"private"`
	Regions    []string  `json:"regions"`
	Partitions []string  `json:"partitions"`
	Servers    int       `json:"servers"`
	Witnesses  int       `json:"witnesses"`
	DMS        int64     `json:"d_ms"`
	RTTMS      int64     `json:"rtt_ms"`

	// Promotions of any partition, the longest time that one was without an owner, as
	// the questions saw it, and the leases that workers lost.
	Promotions int     `json:"promotions"`
	UnownedMS  float64 `json:"unowned_ms"`
	Lost       int     `json:"lost"`

	// Of a drill with a frozen worker: from the first fault to the first write
	// accepted under the new token, and to the new owner's head lease.
	FailoverMS        int64       `json:"failover_ms,omitempty"`
	PromotedMS        int64       `json:"promoted_ms,omitempty"`
	OldToken          fence.Token `json:"old_token,omitempty"`
	NewToken          fence.Token `json:"new_token,omitempty"`
	StaleWriteRefused *bool       `json:"stale_write_refused,omitempty"`
	// GuardOffViolated: in the control run with the guard off the late write
	// was accepted, so that the drill can fail.
	GuardOffViolated *bool `json:"guard_off_violated,omitempty"`

	Faults []Fault  `json:"faults"`
	Reigns []Reign  `json:"reigns"`
	Phi    []Phi    `json:"phi"`
	Rates  []Rate   `json:"rates"`
	Events []Moment `json:"events"`

	zero     instant.Instant
	timeline Timeline
}

// Header is what a report says of the drill itself.
type Header struct {
	Scenario, Summary, About string
	Began                    time.Time
	Seed                     uint64
	Cluster                  string
	Private                  bool
	Regions                  []string
	Servers, Witnesses       int
}

// Detail is a violation with what happened around it.
type Detail struct {
	Rule string `json:"rule"`
	Text string `json:"text"`
	// AtMS is when it shows; negative: it belongs to no instant.
	AtMS   float64  `json:"at_ms"`
	About  string   `json:"about,omitempty"`
	Around []Moment `json:"around,omitempty"`
}

// Expectation is one of the scenario's, with what was measured.
type Expectation struct {
	Text     string   `json:"text"`
	State    string   `json:"state"`
	Measured string   `json:"measured,omitempty"`
	Why      string   `json:"why,omitempty"`
	Value    *float64 `json:"value,omitempty"`
}

// Fault is a step as it was played.
type Fault struct {
	Step     int      `json:"step"`
	Title    string   `json:"title"`
	Kind     string   `json:"kind"`
	Of       []string `json:"of,omitempty"`
	FromMS   float64  `json:"from_ms"`
	UntilMS  float64  `json:"until_ms"`
	Effect   string   `json:"effect,omitempty"`
	NoEffect string   `json:"no_effect,omitempty"`
	Disrupts bool     `json:"disrupts"`
}

// Reign is a span over which a region held a partition.
type Reign struct {
	Partition string  `json:"partition"`
	Region    string  `json:"region"`
	Epoch     uint64  `json:"epoch"`
	FromMS    float64 `json:"from_ms"`
	UntilMS   float64 `json:"until_ms"`
}

// Phi is an observer's suspicion of a region.
type Phi struct {
	AtMS     float64 `json:"at_ms"`
	Observer string  `json:"observer"`
	Region   string  `json:"region"`
	Phi      float64 `json:"phi"`
}

// Rate is what the workers got in a bucket of time.
type Rate struct {
	AtMS    float64 `json:"at_ms"`
	Grants  int     `json:"grants"`
	Writes  int     `json:"writes"`
	Refused int     `json:"refused"`
	Lost    int     `json:"lost"`
	// P50MS and P99MS of the acquires that waited for no other holder, and
	// WriteP99MS of the writes; null: there were none.
	P50MS      *float64 `json:"p50_ms"`
	P99MS      *float64 `json:"p99_ms"`
	WriteP99MS *float64 `json:"write_p99_ms"`
}

// Moment is something that happened.
type Moment struct {
	AtMS float64 `json:"at_ms"`
	Who  string  `json:"who"`
	Text string  `json:"text"`
}

const (
	// brokenPrefix begins the text of a broken expectation.
	brokenPrefix = "expected "
	// buckets is how many a drill's time is divided into, at least a second
	// each.
	buckets = 120
	// around is how far the events around a violation reach, and mostAround
	// how many there are.
	around     = 3 * time.Second
	mostAround = 40
	// maxDetails is how many violations are told; more say no more.
	maxDetails = 20
	// maxPhi bounds what a chart draws.
	maxPhi = 100
	// phiBend is a difference that a chart does not show.
	phiBend = 0.3
)

// New makes a report of a record and its verdict.
func New(h Header, r *check.Record, v check.Verdict) *Report {
	out := &Report{
		Scenario: h.Scenario, Summary: h.Summary, About: h.About, Began: h.Began.UTC().Truncate(time.Millisecond), Seed: h.Seed,
		Cluster: h.Cluster, Private: h.Private, Regions: h.Regions, Servers: h.Servers, Witnesses: h.Witnesses, Partitions: r.Partitions,
		OK: v.OK(), Verdict: v.Word(), Inconclusive: v.Inconclusive, Stalled: v.Stalled, Checked: v.Checked,
		DMS: r.D.Milliseconds(), RTTMS: r.RTT.Milliseconds(), DurationMS: r.Ended.Sub(r.Began).Milliseconds(),
		Violations: []string{}, Expectations: []Expectation{}, Faults: []Fault{}, Reigns: []Reign{}, Phi: []Phi{}, Rates: []Rate{}, Events: []Moment{},
		zero: r.Began,
	}
	out.addFaults(r)
	out.addReigns(r)
	out.addSums(r)
	out.addRates(r)
	out.addEvents(r)
	for i, x := range v.Violations {
		if i == maxDetails {
			out.Violations = append(out.Violations, fmt.Sprintf("and %d more violations", len(v.Violations)-maxDetails))
			break
		}
		out.Violations = append(out.Violations, x.String())
		d := Detail{Rule: x.Rule, Text: x.Text, AtMS: -1, About: x.About}
		if x.At != 0 {
			d.AtMS = out.ms(x.At)
			d.Around = out.around(r, x)
		}
		out.Details = append(out.Details, d)
	}
	for _, x := range v.Results {
		e := Expectation{Text: x.Text, State: string(x.State), Measured: x.Measured, Why: x.Why}
		if !math.IsNaN(x.Value) {
			e.Value = &x.Value
		}
		out.Expectations = append(out.Expectations, e)
		if x.State == check.Broken {
			out.Violations = append(out.Violations, fmt.Sprintf(brokenPrefix+"%q: %s", x.Text, x.Measured))
		}
	}
	return out
}

func (r *Report) ms(at instant.Instant) float64 {
	return math.Round(float64(at.Sub(r.zero))/float64(time.Microsecond)) / 1000
}

// clamp keeps what began before the steps, or goes on after the end, in the
// picture.
func (r *Report) clamp(at instant.Instant) float64 {
	return min(max(r.ms(at), 0), float64(r.DurationMS))
}

func (r *Report) addFaults(rec *check.Record) {
	for _, f := range rec.Faults {
		r.Faults = append(r.Faults, Fault{
			Step: f.Step + 1, Title: f.Title, Kind: string(f.Kind), Of: f.Of, FromMS: r.clamp(f.From), UntilMS: r.clamp(f.Until),
			Effect: f.Effect, NoEffect: f.NoEffect, Disrupts: f.Disrupts(),
		})
	}
}

func (r *Report) addReigns(rec *check.Record) {
	for _, x := range check.Reigns(rec) {
		if x.Until <= rec.Began {
			continue
		}
		r.Reigns = append(r.Reigns, Reign{x.Partition, x.Region, x.Epoch, r.clamp(x.From), r.clamp(x.Until)})
	}
}

// addSums adds what a table of drills shows.
func (r *Report) addSums(rec *check.Record) {
	r.Promotions = len(check.Changes(rec))
	for _, p := range r.Partitions {
		held := float64(-1) // until then, by the reigns so far
		for _, x := range slices.SortedFunc(slices.Values(r.Reigns), func(a, b Reign) int { return cmp.Compare(a.FromMS, b.FromMS) }) {
			if x.Partition != p {
				continue
			}
			if held >= 0 {
				r.UnownedMS = max(r.UnownedMS, x.FromMS-held)
			}
			held = max(held, x.UntilMS)
		}
		if held >= 0 {
			r.UnownedMS = max(r.UnownedMS, float64(r.DurationMS)-held)
		}
	}
	for _, a := range rec.Actors {
		for _, e := range a.Events {
			if e.Kind == check.Lost && e.At > rec.Began && e.At <= rec.Ended {
				r.Lost++
			}
		}
	}
}

func (r *Report) addRates(rec *check.Record) {
	width := max(time.Second, rec.Ended.Sub(rec.Began)/buckets)
	for from := rec.Began; from < rec.Ended; from = from.Add(width) {
		until := from.Add(width)
		if rec.Ended.Sub(from) < width/2 {
			break // too little to be a rate
		}
		b := Rate{AtMS: r.ms(from.Add(width / 2))}
		for _, a := range rec.Actors {
			for _, e := range a.Events {
				if e.At <= from || e.At > until {
					continue
				}
				switch e.Kind {
				case check.Acquired:
					if !a.Probes {
						b.Grants++
					}
				case check.Wrote:
					b.Writes++
				case check.Refused:
					b.Refused++
				case check.Lost:
					b.Lost++
				default:
				}
			}
		}
		if l := check.Latencies(rec.Actors, check.Acquired, from, until); len(l) > 0 {
			b.P50MS, b.P99MS = fine(check.Quantile(l, 0.5)), fine(check.Quantile(l, 0.99))
		}
		if l := check.Latencies(rec.Actors, check.Wrote, from, until); len(l) > 0 {
			b.WriteP99MS = fine(check.Quantile(l, 0.99))
		}
		r.Rates = append(r.Rates, b)
	}
}

func fine(d time.Duration) *float64 {
	v := math.Round(float64(d)/float64(time.Microsecond)) / 1000
	return &v
}

// lastPhi is the last of the first n that is meant, or -1.
func (r *Report) lastPhi(meant func(Phi) bool, n int) int {
	for i := n - 1; i >= 0; i-- {
		if meant(r.Phi[i]) {
			return i
		}
	}
	return -1
}

// AddPhi adds an observer's suspicion of a region.
func (r *Report) AddPhi(at time.Duration, observer, region string, phi float64) {
	if math.IsNaN(phi) {
		return
	}
	// A line needs only the points at which it bends.
	same := func(p Phi) bool { return p.Observer == observer && p.Region == region }
	if n := r.lastPhi(same, len(r.Phi)); n >= 0 && math.Abs(r.Phi[n].Phi-min(phi, maxPhi)) < phiBend {
		if m := r.lastPhi(same, n); m >= 0 && math.Abs(r.Phi[m].Phi-r.Phi[n].Phi) < phiBend {
			r.Phi[n].AtMS = math.Round(float64(at) / float64(time.Millisecond))
			return
		}
	}
	r.Phi = append(r.Phi, Phi{math.Round(float64(at) / float64(time.Millisecond)), observer, region, math.Round(min(phi, maxPhi)*100) / 100})
}

// Failover fills in the figures of a drill with a frozen worker.
func (r *Report) Failover(rec *check.Record, oldName, newName string) {
	refused := rec.Late.Seen && !rec.Late.Accepted
	r.StaleWriteRefused, r.OldToken = &refused, rec.Late.Token
	var first instant.Instant
	for _, f := range rec.Faults {
		if f.Disrupts() && first == 0 {
			first = f.From
		}
	}
	for _, a := range rec.Actors {
		if a.Name != newName {
			continue
		}
		for _, e := range a.Events {
			if e.Kind == check.Wrote && e.At > first && e.Token > r.OldToken && r.FailoverMS == 0 {
				r.FailoverMS, r.NewToken = e.At.Sub(first).Milliseconds(), e.Token
			}
		}
		for _, c := range check.Changes(rec) {
			if c.Is.Of == a.Partition && c.Is.From > first && r.PromotedMS == 0 {
				r.PromotedMS = c.Is.From.Sub(first).Milliseconds()
			}
		}
	}
	if late := rec.Late; late.Seen {
		what := fmt.Sprintf("REFUSED the late write of the %s: token %s is below %s", oldName, late.Token, late.Mark)
		if late.Accepted {
			what = "ACCEPTED the late write of the " + oldName + ": nothing looked at its token"
		}
		at := rec.Ended
		for _, a := range rec.Actors {
			for i, e := range a.Events {
				if e.Kind == check.Thawed && i+1 < len(a.Events) {
					at = a.Events[i+1].At // when the worker had the answer
				}
			}
		}
		r.timeline.Add(at, "resource", "%s", what)
		r.Events = append(r.Events, Moment{r.ms(at), "resource", what})
		slices.SortStableFunc(r.Events, byTime)
	}
}

// AddControl adds the control run with the resource's guard off, in which the
// late write must have been accepted.
func (r *Report) AddControl(c *Report) {
	violated := false
	for _, d := range c.Details {
		switch {
		case d.Rule == "I5":
			violated = true
		default:
			r.Violations = append(r.Violations, "control run: "+d.Rule+": "+d.Text)
		}
	}
	r.GuardOffViolated = &violated
	if !violated {
		r.Violations = append(r.Violations, "the control run with the guard off shows no violation of I5, so the drill cannot fail")
	}
	for _, x := range c.Inconclusive {
		// Its expectations are not those of the drill.
		if strings.HasPrefix(x, "step ") {
			r.Inconclusive = append(r.Inconclusive, "control run: "+x)
			r.Stalled = false
		}
	}
	switch {
	case len(r.Violations) > 0:
		r.OK, r.Verdict = false, "FAILED"
	case len(r.Inconclusive) > 0:
		r.OK, r.Verdict = false, "inconclusive"
	}
}
