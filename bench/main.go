// Command peerbench measures coordination services side by side on the same
// work, on one machine, in one run. See README.md.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strings"
	"syscall"
	"time"
)

var (
	flagDrivers   = flag.String("drivers", "all", "comma-separated drivers, or all")
	flagWorkloads = flag.String("workloads", "W0,W1", "comma-separated workloads (W0..W8), or all")
	flagRounds    = flag.Int("rounds", 0, "interleaved rounds per workload (0: the workload's own default)")
	flagData      = flag.String("data", ".data", "data root; must be on the real disk")
	flagOut       = flag.String("out", "results", "folder for JSON results and markdown tables")
	flagEtcd      = flag.String("etcd", "../bin/etcd", "etcd server binary")
	flagHeadlease = flag.String("headlease", "../bin/headlease", "headlease binary")
	flagTiming    = flag.String("timing", "lan", "timing preset of headlease: lan (its default) or calm (for profiles on a busy machine)")
	flagEtcdArgs  = flag.String("etcdargs", "", "extra arguments for etcd, space-separated (such as --enable-pprof)")
	flagDur       = flag.Duration("dur", 3*time.Second, "measured window of one W1/W2/W3 cell")
	flagWarm      = flag.Duration("warm", time.Second, "warm-up of one W1/W2/W3 cell")
	flagPrewarm   = flag.Duration("prewarm", 5*time.Second, "unmeasured load on every system before W1-W3")
	flagForeign   = flag.Float64("foreign", 0.15, "CPUs that other processes may use during a cell")
	flagQuietWait = flag.Duration("quietwait", 60*time.Second, "longest wait for a quiet machine before a cell")
	flagTries     = flag.Int("tries", 3, "how often a disturbed cell is repeated at most")
	flagPriority  = flag.Int("priority", 0, "scheduling priority (nice, negative is higher) of harness and servers alike, for a shared machine")
	flagSessions  = flag.Int("sessions", 10000, "sessions in W4 and W6")
	flagTTL       = flag.Duration("ttl", 10*time.Second, "session TTL in W4 and W6")
	flagHold      = flag.Duration("hold", 20*time.Second, "how long W4 keeps the sessions alive")
	flagKills     = flag.Int("kills", 5, "leader kills in W5")
	flagW7TTL     = flag.Duration("w7ttl", 6*time.Second, "TTL in W7 (the leader stops for twice this)")
	flagVariants  = flag.String("variants", "", "W5, W7 and W8: only the variants (fault modes, timers) whose name contains this")
	flagProfile   = flag.String("cpuprofile", "", "write the CPU profile of harness and clients here")
	flagList      = flag.Bool("list", false, "list drivers and workloads")
)

// absolute is for a program that is started in another working directory.
func absolute(p *string) {
	if abs, err := filepath.Abs(*p); err == nil {
		*p = abs
	}
}

// Result is one cell of one round.
type Result struct {
	Workload string             `json:"workload"`
	Variant  string             `json:"variant,omitempty"`
	Driver   string             `json:"driver"`
	Round    int                `json:"round"`
	At       time.Time          `json:"at"`
	M        map[string]float64 `json:"metrics"`
	Note     string             `json:"note,omitempty"`
	Err      string             `json:"error,omitempty"`
}

// Runner runs the workloads and collects the results.
type Runner struct {
	env     *Env
	started map[string]System
	warmed  map[string]System
	results []Result
	infos   map[string]string
}

// system returns a running shared system.
func (r *Runner) system(ctx context.Context, name string) (System, error) {
	if s := r.started[name]; s != nil {
		return s, nil
	}
	s := systems[name]()
	t := time.Now()
	if err := s.Start(ctx, r.env); err != nil {
		s.Stop()
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	logf("started %s in %.1fs: %s", name, time.Since(t).Seconds(), s.Info())
	r.started[name] = s
	r.infos[name] = s.Info()
	return s, nil
}

// fresh returns a newly started system and a function that stops it.
func (r *Runner) fresh(ctx context.Context, name string) (System, func(), error) {
	r.stopAll()
	s, err := r.system(ctx, name)
	return s, r.stopAll, err
}

func (r *Runner) stopAll() {
	for n, s := range r.started {
		s.Stop()
		delete(r.started, n)
	}
}

func (r *Runner) add(w, variant, driver string, round int, m map[string]float64, note string, err error) {
	res := Result{Workload: w, Variant: variant, Driver: driver, Round: round, At: time.Now(), M: m, Note: note}
	if err != nil {
		res.Err = err.Error()
	}
	r.results = append(r.results, res)
	b, _ := json.Marshal(m)
	logf("%s %-14s %-14s round %d %s %s %s", w, variant, driver, round, b, note, res.Err)
}

func logf(f string, a ...any) {
	fmt.Fprintf(os.Stderr, "%s "+f+"\n", append([]any{time.Now().Format("15:04:05.000")}, a...)...)
}

type workload struct {
	name   string
	title  string
	rounds int
	run    func(ctx context.Context, r *Runner, ds []*Spec, rounds int)
	cols   []col
}

var workloads []*workload

func main() {
	if len(os.Args) > 1 && os.Args[1] == "floor-node" {
		floorMain(os.Args[2:])
		return
	}
	flag.Parse()
	for _, p := range []*string{flagData, flagEtcd, flagHeadlease} {
		absolute(p)
	}
	slices.SortFunc(workloads, func(a, b *workload) int { return strings.Compare(a.name, b.name) })
	if *flagList {
		for _, n := range order {
			fmt.Printf("%-14s %-28s %s\n", n, specs[n].Workloads, specs[n].Note)
		}
		for _, w := range workloads {
			fmt.Printf("%s  %s\n", w.name, w.title)
		}
		return
	}
	lim := syscall.Rlimit{Cur: 20000, Max: 20000}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		logf("warning: RLIMIT_NOFILE: %v", err)
	}
	if *flagPriority != 0 {
		// The autogroup is what counts between sessions (start under setsid).
		if err := os.WriteFile("/proc/self/autogroup", []byte(fmt.Sprint(*flagPriority)), 0); err != nil {
			logf("warning: autogroup: %v", err)
		}
		if err := syscall.Setpriority(syscall.PRIO_PROCESS, 0, *flagPriority); err != nil {
			logf("warning: setpriority: %v", err)
		}
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()

	if *flagProfile != "" {
		f, err := os.Create(*flagProfile)
		if err == nil {
			err = pprof.StartCPUProfile(f)
		}
		if err != nil {
			logf("no profile: %v", err)
		}
		defer pprof.StopCPUProfile()
	}
	var names []string
	if *flagDrivers == "all" {
		names = order
	} else {
		names = strings.Split(*flagDrivers, ",")
	}
	for _, n := range names {
		if specs[n] == nil {
			fmt.Fprintf(os.Stderr, "no driver %q (see -list)\n", n)
			os.Exit(2)
		}
	}
	for _, dir := range []string{*flagData, *flagOut} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			logf("%v", err)
			os.Exit(1)
		}
	}
	r := &Runner{env: &Env{Root: *flagData}, started: map[string]System{}, warmed: map[string]System{}, infos: map[string]string{}}
	defer killAll()
	facts := machineFacts()
	start := time.Now()
	for _, w := range workloads {
		if *flagWorkloads != "all" && !slices.Contains(strings.Split(*flagWorkloads, ","), w.name) {
			continue
		}
		var ds []*Spec
		for _, n := range names {
			if slices.Contains(strings.Fields(specs[n].Workloads), w.name) {
				ds = append(ds, specs[n])
			}
		}
		if len(ds) == 0 && w.name != "W0" {
			continue
		}
		rounds := w.rounds
		if *flagRounds > 0 {
			rounds = *flagRounds
		}
		logf("== %s: %s (%d rounds)", w.name, w.title, rounds)
		t := time.Now()
		w.run(ctx, r, ds, rounds)
		logf("== %s took %.0fs", w.name, time.Since(t).Seconds())
		if ctx.Err() != nil {
			break
		}
	}
	r.stopAll()

	md := report(r.results) + judge(r.results)
	fmt.Println(md)
	stamp := start.Format("20060102-150405") + "-" + strings.ReplaceAll(*flagWorkloads, ",", "_")
	doc := map[string]any{"started": start, "seconds": time.Since(start).Seconds(), "args": os.Args[1:], "machine": facts, "systems": r.infos, "results": r.results}
	b, _ := json.MarshalIndent(doc, "", " ")
	for ext, text := range map[string][]byte{".json": b, ".md": []byte(md)} {
		if err := os.WriteFile(filepath.Join(*flagOut, stamp+ext), text, 0o644); err != nil {
			logf("%v", err)
		}
	}
	logf("wrote %s.{json,md}, %.0fs in all", filepath.Join(*flagOut, stamp), time.Since(start).Seconds())
}
