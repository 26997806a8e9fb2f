package main

import (
	"fmt"
	"strings"
)

// figure names one number of the results: the median over rounds, or the worst.
type figure struct {
	workload, variant, driver, metric string
	worst                             bool
}

// aim is what headlease is to reach, as a ratio to a peer in the same run, or
// (with an empty peer) as a number.
type aim struct {
	what  string
	own   figure
	peer  figure
	limit float64
	// least: the ratio must be at least the limit, not at most.
	least bool
}

func aims() []aim {
	f := func(w, variant, driver, metric string) figure { return figure{w, variant, driver, metric, false} }
	const (
		one, few, many   = "1 clients", "64 clients", "512 clients"
		waiters, crowd   = "64 waiters", "1000 waiters"
		kill, hang       = "kill -9", "SIGSTOP (hung)"
		hl, hlLead, zoo  = "headlease", "headlease-leader", "zk"
		wide             = "headlease-regions"
		etcd, lead, fast = "etcd", "etcd-leader", "etcd-fast"
	)
	list := []aim{
		{"acquire, one client, p50, to the floor", f("W1", one, hl, "acq_p50"), f("W1", one, "floor", "acq_p50"), 1.3, false},
		{"acquire, one client, p50, to etcd", f("W1", one, hl, "acq_p50"), f("W1", one, etcd, "acq_p50"), 0.7, false},
		{"acquire, one client, p50, to etcd with a lease per acquire", f("W1", one, hl, "acq_p50"), f("W1", one, "etcd-perlease", "acq_p50"), 0.35, false},
		{"server CPU per cycle, one client, to etcd", f("W1", one, hl, "cpu_us"), f("W1", one, etcd, "cpu_us"), 0.55, false},
		{"cycles/s, 64 clients, to etcd on the leader", f("W2", few, hlLead, "ops"), f("W2", few, lead, "ops"), 2.2, true},
		{"cycles/s, 64 clients, to Redlock", f("W2", few, hlLead, "ops"), f("W2", few, "redlock5", "ops"), 1, true},
		{"cycles/s, 512 clients, to etcd on the leader", f("W2", many, hlLead, "ops"), f("W2", many, lead, "ops"), 2.3, true},
		{"cycles/s, 512 clients, to ZooKeeper", f("W2", many, hlLead, "ops"), f("W2", many, zoo, "ops"), 1.4, true},
		{"p99 of an acquire, 512 clients, to etcd on the leader", f("W2", many, hlLead, "acq_p99"), f("W2", many, lead, "acq_p99"), 0.6, false},
		{"hand-over, 64 waiters, p50, to the floor", f("W3", waiters, hl, "ho_p50"), f("W3", waiters, "floor", "ho_p50"), 1.3, false},
		{"hand-over, notifications", f("W3", waiters, hl, "notif"), figure{}, 1.01, false},
		{"hand-over, 1,000 waiters, p50, to 64", f("W3", crowd, hl, "ho_p50"), f("W3", waiters, hl, "ho_p50"), 1.2, false},
		{"server CPU, sessions sharing connections, to etcd", f("W4", "", hl, "cpu_pct"), f("W4", "", etcd, "cpu_pct"), 0.15, false},
		{"server CPU, a connection per session, to etcd", f("W4", "", "headlease-1conn", "cpu_pct"), f("W4", "", "etcd-1conn", "cpu_pct"), 0.5, false},
		{"server memory, sessions sharing connections, to etcd", f("W4", "", hl, "rss"), f("W4", "", etcd, "rss"), 1, false},
		{"sessions lost", figure{"W4", "", hl, "lost", true}, figure{}, 0, false},
		{"leader killed, outage, median, to tuned etcd", f("W5", kill, hl, "outage"), f("W5", kill, fast, "outage"), 1.1, false},
		{"leader killed, outage, worst, to tuned etcd", figure{"W5", kill, hl, "outage", true}, figure{"W5", kill, fast, "outage", true}, 1.1, false},
		{"leader frozen, outage, median, to tuned etcd", f("W5", hang, hl, "outage"), f("W5", hang, fast, "outage"), 1.1, false},
		{"last key free after the TTL, s", f("W6", "", hl, "over_s"), figure{}, 0.5, false},
		{"unrelated p99 meanwhile, to before", f("W6", "", hl, "m_p99"), f("W6", "", hl, "b_p99"), 2, false},
		{"acquire in the far region, p50, to etcd", f("W8", "default timers, leader in A, client in C", wide, "acq_p50"), f("W8", "hb 250/el 2500 (advised for WAN), leader in A, client in C", etcd, "acq_p50"), 1.0 / 60, false},
		{"a region cut off: outage of the others, worst, s", figure{"W8", "default timers, leader region cut both ways", wide, "other2_s", true}, figure{}, 0.1, false},
		{"a region cut off: serving again after healing, worst, s", figure{"W8", "default timers, leader region cut both ways", wide, "back_s", true}, figure{}, 2, false},
		{"two believers, ms", figure{"W7", "", hl, "overlap", true}, figure{}, 0, false},
	}
	return list
}

// value looks a figure up; an empty variant stands for all of them.
func (f figure) value(rs []Result) (float64, bool) {
	var v []float64
	for _, r := range rs {
		if x, ok := r.M[f.metric]; ok && r.Workload == f.workload && r.Driver == f.driver && (f.variant == "" || f.variant == r.Variant) {
			v = append(v, x)
		}
	}
	if len(v) == 0 {
		return 0, false
	}
	if f.worst {
		return sortedFloats(v)[len(v)-1], true
	}
	return median(v), true
}

// judge compares the results with the aims that they have numbers for.
func judge(rs []Result) string {
	var b strings.Builder
	for _, a := range aims() {
		own, ok := a.own.value(rs)
		if !ok {
			continue
		}
		ratio, form := own, ""
		if a.peer != (figure{}) {
			peer, ok := a.peer.value(rs)
			if !ok || peer == 0 {
				continue
			}
			ratio, form = own/peer, "×"
		}
		met, bound := ratio <= a.limit, "≤"
		if a.least {
			met, bound = ratio >= a.limit, "≥"
		}
		verdict := "missed"
		if met {
			verdict = "met"
		}
		if b.Len() == 0 {
			b.WriteString("### Aims\n\n| workload | what | measured | aim | |\n|---|---|--:|--:|---|\n")
		}
		fmt.Fprintf(&b, "| %s | %s | %.2f%s | %s %v%s | %s |\n", a.own.workload, a.what, ratio, form, bound, a.limit, form, verdict)
	}
	return b.String()
}
