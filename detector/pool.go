package detector

import (
	"context"
	"log"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// poolConfig starts from memberlist's LAN values: its WAN ones need 35 to 45 s
// to notice a crash. Round trips between regions are under 400 ms.
func (d *Detector) poolConfig() *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	c.Name = d.cfg.Name
	c.Label = d.cfg.Cluster
	c.SecretKey = d.cfg.Key
	c.GossipVerifyIncoming, c.GossipVerifyOutgoing = true, true
	c.EnableCompression = false // LZW on every packet, for nothing
	c.Transport = d.cfg.Transport
	c.BindAddr, c.BindPort = "", 0
	c.AdvertiseAddr, c.AdvertisePort = "", 0 // the transport says it; the default port would be advertised otherwise
	c.ProbeInterval, c.ProbeTimeout = 500*time.Millisecond, 400*time.Millisecond
	c.TCPTimeout = joinTimeout
	c.DeadNodeReclaimTime = 10 * time.Second // a rescheduled process comes back at another address
	c.Delegate = messages{d}
	c.Events = events{d}
	c.Ping = pings{d}
	c.Logger = log.New(&logWriter{logger: d.cfg.Logger.With("part", "memberlist"), now: time.Now}, "", 0)
	return c
}

// The delegates run on memberlist's goroutines, some under its locks: they
// copy what they need and never call memberlist.

// messages is the memberlist.Delegate.
type messages struct{ d *Detector }

func (m messages) NotifyMsg(raw []byte)          { m.d.receive(raw) }
func (messages) NodeMeta(int) []byte             { return nil }
func (messages) GetBroadcasts(int, int) [][]byte { return nil }
func (messages) LocalState(bool) []byte          { return nil }
func (messages) MergeRemoteState([]byte, bool)   {}

// events is the memberlist.EventDelegate.
type events struct{ d *Detector }

func (e events) NotifyJoin(n *memberlist.Node)  { e.d.setMember(strings.Clone(n.Name), true) }
func (e events) NotifyLeave(n *memberlist.Node) { e.d.setMember(strings.Clone(n.Name), false) }
func (e events) NotifyUpdate(*memberlist.Node)  {}

// pings is the memberlist.PingDelegate.
type pings struct{ d *Detector }

func (pings) AckPayload() []byte { return nil }
func (p pings) NotifyPingComplete(n *memberlist.Node, rtt time.Duration, _ []byte) {
	p.d.setRoundTrip(strings.Clone(n.Name), rtt)
}

// logLines is how many lines of memberlist pass per second: a stranger that
// floods the port must not flood the log.
const logLines = 20

// logWriter turns memberlist's lines ("[WARN] memberlist: …") into records.
type logWriter struct {
	logger *slog.Logger
	now    func() time.Time

	mu      sync.Mutex
	second  int64
	lines   int
	dropped int
}

func (w *logWriter) Write(p []byte) (int, error) {
	line := strings.TrimSpace(string(p))
	level := slog.LevelInfo
	for prefix, l := range map[string]slog.Level{
		"[DEBUG]": slog.LevelDebug, "[INFO]": slog.LevelInfo, "[WARN]": slog.LevelWarn, "[ERR]": slog.LevelWarn, "[ERROR]": slog.LevelWarn,
	} {
		if rest, ok := strings.CutPrefix(line, prefix); ok {
			level, line = l, strings.TrimSpace(rest)
			break
		}
	}
	line = strings.TrimPrefix(line, "memberlist: ")
	if !w.logger.Enabled(context.Background(), level) {
		return len(p), nil
	}
	w.mu.Lock()
	if s := w.now().Unix(); s != w.second {
		w.second, w.lines = s, 0
	}
	w.lines++
	drop, before := w.lines > logLines, 0
	if drop {
		w.dropped++
	} else {
		before, w.dropped = w.dropped, 0
	}
	w.mu.Unlock()
	switch {
	case drop:
	case before > 0:
		w.logger.Log(context.Background(), level, line, "lines_dropped", before)
	default:
		w.logger.Log(context.Background(), level, line)
	}
	return len(p), nil
}
