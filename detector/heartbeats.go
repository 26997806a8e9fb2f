package detector

import (
	"context"
	"time"

	"github.com/hashicorp/memberlist"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// beatLoop sends heartbeats. Its ticks are late when the process is late, and
// then so are the heartbeats, as they should be.
func (d *Detector) beatLoop(ctx context.Context) {
	tick := time.NewTicker(d.cfg.Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if hb, ok := d.nextBeat(); ok {
			d.send(hb)
		}
	}
}

func (d *Detector) nextBeat() (*pb.Heartbeat, bool) {
	d.mu.Lock()
	beat := d.beat
	d.mu.Unlock()
	if beat == nil || d.cfg.Region == "" {
		return nil, false
	}
	hb, ok := beat()
	if !ok || hb == nil {
		return nil, false
	}
	hb.Region, hb.Server = d.cfg.Region, d.cfg.Name
	d.mu.Lock()
	d.seq++
	hb.Seq = d.seq
	d.mu.Unlock()
	return hb, true
}

func (d *Detector) send(hb *pb.Heartbeat) {
	msg, err := proto.MarshalOptions{}.MarshalAppend([]byte{kindHeartbeat}, hb)
	if err != nil {
		d.cfg.Logger.Error("heartbeat not encoded", "error", err)
		return
	}
	// A leader hears itself: its region is judged here like any other.
	d.take(hb)
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, l := range d.lanes {
		select {
		case l.next <- msg:
		default: // the peer's sender is stuck; the next heartbeat says more
		}
	}
}

// sendLoops gives each lane its sender, until ctx ends and all senders have.
func (d *Detector) sendLoops(ctx context.Context, list *memberlist.Memberlist) error {
	var g errgroup.Group
	for {
		d.mu.Lock()
		for _, l := range d.lanes {
			if !l.sent {
				l.sent = true
				g.Go(func() error { d.sendLoop(ctx, list, l); return nil })
			}
		}
		d.mu.Unlock()
		select {
		case <-ctx.Done():
			return g.Wait()
		case <-d.wake:
		}
	}
}

// sendLoop sends to one peer. Each has its own: the address may be a host name,
// and a name server that hangs must not silence this region for all others.
func (d *Detector) sendLoop(ctx context.Context, list *memberlist.Memberlist, l *lane) {
	p := l.peer
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.gone:
			return
		case msg := <-l.next:
			if err := list.SendToAddress(memberlist.Address{Addr: p.Gossip, Name: p.Name}, msg); err != nil {
				d.cfg.Logger.Debug("heartbeat not sent", "peer", p.Name, "address", p.Gossip, "error", err)
			}
		}
	}
}

// receive takes a gossip message. raw is valid during the call only; nothing
// of it is kept.
func (d *Detector) receive(raw []byte) {
	if len(raw) == 0 || raw[0] != kindHeartbeat {
		d.ignore("unknown kind")
		return
	}
	var hb pb.Heartbeat
	if err := proto.Unmarshal(raw[1:], &hb); err != nil {
		d.ignore("not a heartbeat")
		return
	}
	if p, ok := d.peer(hb.GetServer()); !ok || p.Region == "" || p.Region != hb.GetRegion() {
		d.ignore("server is not configured in that region")
		return
	}
	if own := d.cfg.ClusterID(); own != "" && hb.GetClusterId() != own {
		d.ignore("another cluster's id")
		return
	}
	d.take(&hb)
	d.note(hb.GetServer())
}

func (d *Detector) ignore(why string) {
	d.mu.Lock()
	d.ignored++
	n := d.ignored
	d.mu.Unlock()
	if n&(n-1) == 0 { // 1, 2, 4, 8, …: a flood logs little
		d.cfg.Logger.Warn("gossip message ignored", "reason", why, "ignored", n)
	}
}

func (d *Detector) take(hb *pb.Heartbeat) {
	now := d.cfg.Clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if judge := d.regions[hb.GetRegion()]; judge != nil && judge.Heard(now, hb.GetTerm(), hb.GetSeq()) {
		d.beats[hb.GetRegion()]++
	}
}

// note passes on that a peer lives. It is called under memberlist's lock and
// must not block: when the queue is full the news is dropped, the next
// heartbeat brings it again.
func (d *Detector) note(peer string) {
	now := d.cfg.Clock.Now()
	d.mu.Lock()
	last, seen := d.notable[peer]
	fresh := !seen || now.Sub(last) >= heardEvery
	if fresh {
		d.notable[peer] = now
	}
	d.mu.Unlock()
	if !fresh {
		return
	}
	select {
	case d.heard <- peer:
	default:
	}
}

func (d *Detector) heardLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case peer := <-d.heard:
			d.cfg.Heard(peer)
		}
	}
}
