package telemetry

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Votes counts a voter's answers, per partition, by method and rule. Its
// counters are resolved beforehand: counting one is an atomic addition.
type Votes struct {
	prepare, accept rules
}

// rules are the counters by pb.RefusalRule.
type rules []prometheus.Counter

// NewVotes registers the counters; reg may be nil.
func NewVotes(reg prometheus.Registerer) *Votes {
	vec := promauto.With(reg).NewCounterVec(prometheus.CounterOpts{
		Name: VotesAnswered, Help: "Answers given as a voter, one per partition of a message, by the rule that refused; rule \"none\" is a yes.",
	}, []string{LabelMethod, LabelRule})
	v := &Votes{}
	for method, r := range map[string]*rules{"prepare": &v.prepare, "accept": &v.accept} {
		*r = make(rules, len(pb.RefusalRule_name))
		for rule := range *r {
			(*r)[rule] = vec.WithLabelValues(method, ruleName(pb.RefusalRule(rule)))
		}
	}
	return v
}

// Prepared counts the answers to a Prepare.
func (v *Votes) Prepared(answers []*pb.PrepareAnswer) {
	for _, a := range answers {
		v.prepare.count(a.GetRefusal())
	}
}

// Accepted counts the answers to an Accept or a renewal.
func (v *Votes) Accepted(answers []*pb.AcceptAnswer) {
	for _, a := range answers {
		v.accept.count(a.GetRefusal())
	}
}

func (r rules) count(refusal *pb.Refusal) {
	if rule := int(refusal.GetRule()); rule >= 0 && rule < len(r) {
		r[rule].Inc()
	}
}

func ruleName(r pb.RefusalRule) string {
	if r == pb.RefusalRule_REFUSAL_RULE_UNSPECIFIED {
		return "none"
	}
	return strings.ToLower(strings.TrimPrefix(r.String(), "REFUSAL_RULE_"))
}
