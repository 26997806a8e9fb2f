package detector

import (
	"context"
	"time"

	"github.com/hashicorp/memberlist"
	"golang.org/x/sync/errgroup"
)

// joinLoop joins missing configured peers: often until the first one answers,
// then at the slow pace for ever [F42].
func (d *Detector) joinLoop(ctx context.Context, list *memberlist.Memberlist) {
	d.mu.Lock()
	every, joined := d.cfg.FirstJoin, len(d.lanes) == 0
	d.mu.Unlock()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if d.joinMissing(ctx, list) > 0 {
			joined = true
		}
		if joined {
			every = d.cfg.Rejoin
		}
		timer.Reset(every)
	}
}

// joinMissing tries every missing peer once, at most 8 at a time: dead ones
// cost their full timeout, and the living ones must not wait behind them.
func (d *Detector) joinMissing(ctx context.Context, list *memberlist.Memberlist) int {
	var missing []Peer
	d.mu.Lock()
	for name, l := range d.lanes {
		if !d.members[name] {
			missing = append(missing, l.peer)
		}
	}
	d.mu.Unlock()
	joined := make([]int, len(missing))
	var g errgroup.Group
	g.SetLimit(8)
	for i, p := range missing {
		g.Go(func() error {
			select {
			case <-ctx.Done():
			default:
				joined[i] = d.join(list, p)
			}
			return nil
		})
	}
	_ = g.Wait()
	total := 0
	for _, n := range joined {
		total += n
	}
	return total
}

func (d *Detector) join(list *memberlist.Memberlist, p Peer) int {
	n, err := list.Join([]string{p.Name + "/" + p.Gossip})
	if err != nil {
		d.cfg.Logger.Debug("gossip peer not reached", "peer", p.Name, "address", p.Gossip, "error", err)
	}
	return n
}
