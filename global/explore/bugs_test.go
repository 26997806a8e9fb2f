package explore

import (
	"flag"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

// longAgo makes a voter's clock say that the head lease is over.
func longAgo(r register.Register, now instant.Instant) register.Register {
	r.Since = now.Add(-100 * d)
	return r
}

var showTraces = flag.Bool("explore.traces", false, "print the way to each seeded bug's violation")

func slice(names ...string) map[string]bool {
	m := map[string]bool{}
	for _, n := range names {
		m[n] = true
	}
	return m
}

// onlyBCampaigns leaves region a with the ballot it has.
func onlyBCampaigns(_ *state, a action) bool { return a.kind != actCampaign || a.a >= 2 }

// seededBugs breaks one rule each, as spec/README.md's flags do (named in
// brackets). Each must be found.
var seededBugs = []struct {
	name   string
	breaks func(*rules)
	opt    option
	// want begins the violation's text.
	want string
}{
	{
		name: "V2 dropped (M_NOV2)", want: "I1:", opt: option{ballots: 2},
		breaks: func(r *rules) {
			r.prepare = func(_ bool, reg register.Register, now instant.Instant, in register.PrepareInput) register.Decision {
				return longAgo(reg, now).Prepare(now, in)
			}
		},
	},
	{
		name: "H1 own promise without V2 (T_OWNV2)", want: "I1:", opt: option{ballots: 2},
		breaks: func(r *rules) {
			r.prepare = func(own bool, reg register.Register, now instant.Instant, in register.PrepareInput) register.Decision {
				if own {
					reg = longAgo(reg, now)
				}
				return reg.Prepare(now, in)
			}
		},
	},
	{
		name: "H2 own vote not required (T_NOOWNVOTE)", want: "I1:", opt: option{
			// Region a's second leader releases while its first one renews with b and the witness.
			ballots: 3, release: true, oneStep: true,
			only: slice("release", "prepare", "accept", "adopt", "leader", "tick", "campaign"),
			guide: func(s *state, a action) bool {
				switch a.kind {
				case actLeader:
					return a.a == 0 && s.cur[0] == 0
				case actRelease:
					return a.a == 1 && a.b == 5 && a.c == 2
				case actCampaign: // b comes after the release
					return a.a >= 2 && s.ballots[0] == 2
				case actPrepare: // a's second leader talks to itself and the witness
					return a.a != 1 || a.b != 1
				case actAccept: // a's first leader renews before that, its second one does not
					return a.a == 0 && s.ballots[0] == 1 || a.a == 1 && a.c != 1 && s.ballots[0] == 2 || a.a >= 2
				}
				return true
			},
		},
		breaks: func(r *rules) { r.ownVoteElsewhere = true },
	},
	{
		name: "a new leader releases while the one before it may hold", want: "I1:", opt: option{
			ballots: 2, release: true, oneStep: true, only: slice("release", "prepare", "accept", "adopt", "leader", "campaign"),
			guide: func(_ *state, a action) bool {
				return (a.kind != actLeader || a.a == 0) && (a.kind != actCampaign || a.a >= 2) && (a.kind != actRelease || a.a < 2)
			},
		},
		breaks: func(r *rules) { r.youngLeaders = true },
	},
	{
		name: "F47 a new leader raises the epoch while the one before it may hold", want: "I1e:", opt: option{
			ballots: 2, raise: true, oneStep: true, only: slice("raise", "prepare", "accept", "adopt", "leader"),
			guide: func(_ *state, a action) bool {
				return (a.kind != actLeader || a.a == 0) && (a.kind != actRaise || a.a < 2)
			},
		},
		breaks: func(r *rules) { r.youngLeaders = true },
	},
	{
		name: "T0 taken from the reply (M_T0REPLY)", want: "I1:", opt: option{
			ballots: 2, oneStep: true, only: slice("tick", "campaign", "prepare", "accept", "adopt"), guide: onlyBCampaigns,
		},
		breaks: func(r *rules) { r.holdFromReply = true },
	},
	{
		name: "an old round counted (M_OLDACK)", want: "I1:", opt: option{
			ballots: 2, oneStep: true, late: true, only: slice("tick", "late", "arrive", "accept", "campaign", "prepare", "adopt"),
			guide: func(s *state, a action) bool {
				return onlyBCampaigns(s, a) && (a.kind != actLate || a.a == 0 && a.c == witness) && (a.kind != actCampaign || s.hold[0] > 0)
			},
		},
		breaks: func(r *rules) { r.oldRoundCounts = true },
	},
	{
		name: "the owner holds for D on its own clock (M_NOMARGIN)", want: "I1:", opt: option{
			ballots: 2, rates: true, oneStep: true, only: slice("tick", "campaign", "prepare", "accept", "adopt"), guide: onlyBCampaigns,
		},
		breaks: func(r *rules) { r.holdWholeD = true },
	},
	{
		name: "a witness forgets its promise (M_NOPERSIST)", want: "I1:", opt: option{
			ballots: 2, oneStep: true, only: slice("tick", "campaign", "prepare", "accept", "adopt", "restart"), guide: onlyBCampaigns,
		},
		breaks: func(r *rules) {
			r.keepAll = true
			r.restart = func(rec register.Record, now instant.Instant, witness bool) register.Register {
				if witness {
					rec.Promised = rec.Accepted
				}
				return register.Restart(rec, now)
			}
		},
	},
	{
		name: "Accept does not raise promised (M_NORAISE)", want: "I1:", opt: option{
			// b wins through a's voter, which then takes a's older Accept again and forgets b's value.
			ballots: 2, oneStep: true, only: slice("tick", "campaign", "prepare", "accept", "lost", "adopt"),
			guide: func(s *state, a action) bool {
				switch a.kind {
				case actCampaign:
					return a.a >= 2 && s.ballots[1] == 0 || a.a < 2 && s.lastEpoch == 2
				case actAccept:
					return a.a >= 2 || s.lastEpoch == 2
				}
				return true
			},
		},
		breaks: func(r *rules) {
			r.keepAll = true
			r.update = func(rec register.Record, c register.Change) (register.Record, bool) {
				out, ok := register.Update(rec, c)
				if ok && c.Accept {
					out.Promised = rec.Promised
				}
				return out, ok
			}
		},
	},
	{
		name: "clocks at zero after a witness's restart (M_CLKZERO_W)", want: "I1:", opt: option{
			ballots: 2, only: slice("tick", "campaign", "prepare", "promise", "accept", "adopt", "restart"), guide: onlyBCampaigns,
		},
		breaks: func(r *rules) {
			r.restart = func(rec register.Record, now instant.Instant, witness bool) register.Register {
				reg := register.Restart(rec, now)
				if witness {
					reg = longAgo(reg, now)
				}
				return reg
			}
		},
	},
	{
		name: "clocks at zero in a region's new term (M_CLKZERO_R)", want: "I1:", opt: option{
			ballots: 2, only: slice("tick", "campaign", "prepare", "promise", "accept", "adopt", "leader"), guide: onlyBCampaigns,
		},
		breaks: func(r *rules) {
			r.restart = func(rec register.Record, now instant.Instant, witness bool) register.Register {
				reg := register.Restart(rec, now)
				if !witness {
					reg = longAgo(reg, now)
				}
				return reg
			}
		},
	},
	{
		name: "H3 a renewal answered while a promise is pending (M_RENEWPEND)", want: "I1:", opt: option{
			ballots: 2, only: slice("tick", "campaign", "prepare", "promise", "accept", "adopt"), guide: onlyBCampaigns,
		},
		breaks: func(r *rules) {
			r.accept = func(reg register.Register, b register.Ballot, v register.Value) register.Decision {
				reg.Pending = reg.Pending && b != reg.Accepted
				return reg.Accept(b, v)
			}
		},
	},
	{
		name: "H3 an Accept taken while a promise is pending (T_ACCPEND)", want: "I1:", opt: option{
			ballots: 2, only: slice("tick", "campaign", "prepare", "promise", "accept", "adopt"),
		},
		breaks: func(r *rules) {
			r.accept = func(reg register.Register, b register.Ballot, v register.Value) register.Decision {
				reg.Pending = reg.Pending && b == reg.Accepted
				return reg.Accept(b, v)
			}
			r.update = func(rec register.Record, c register.Change) (register.Record, bool) {
				c.Guard = rec.Guard() // the guard of the shipped code alone would save it
				return register.Update(rec, c)
			}
		},
	},
	{
		name: "one ballot for two leaders (M_SHARE)", want: "one value per ballot", opt: option{
			ballots: 3, oneStep: true, release: true, only: slice("tick", "campaign", "release", "prepare", "leader"),
			guide: func(s *state, a action) bool {
				return a.kind != actCampaign && a.kind != actRelease && a.kind != actPrepare && a.kind != actLeader || a.a < 2 && s.cur[1] == 0
			},
		},
		breaks: func(r *rules) {
			r.sharedBallot, r.keepAll = true, true
			// The own vote alone would save it: it is taken for granted too.
			r.prepare = func(own bool, reg register.Register, now instant.Instant, in register.PrepareInput) register.Decision {
				dec := reg.Prepare(now, in)
				if own && dec.Action == register.Write {
					dec.Action = register.Answer
				}
				return dec
			}
		},
	},
	{
		name: "H6 Drop on one voter's word (T_DROP)", want: "region a holds epoch 1 after its Drop", opt: option{
			ballots: 2, oneStep: true, only: slice("tick", "campaign", "prepare", "accept", "adopt", "drop", "hearsay"),
		},
		breaks: func(r *rules) { r.hearsayDrop = true },
	},
}

func TestEverySeededBugIsFound(t *testing.T) {
	for _, bug := range seededBugs {
		t.Run(bug.name, func(t *testing.T) {
			opt := bug.opt
			opt.rules = shipped()
			bug.breaks(&opt.rules)
			opt.states, opt.limit = 4_000_000, time.Minute
			r := search(opt)
			t.Logf("%v: %s", r, r.bad)
			if *showTraces {
				t.Log("\n" + strings.Join(r.trace, "\n"))
			}
			if !strings.HasPrefix(r.bad, bug.want) {
				t.Errorf("want a violation %q, have %q", bug.want, r.bad)
			}
			// The same part of the space without the bug has none.
			opt.rules, opt.states = shipped(), r.states
			if r := search(opt); r.bad != "" {
				t.Errorf("the shipped rules: %s\n%s", r.bad, strings.Join(r.trace, "\n"))
			}
		})
	}
}
