package drill

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/pause"
)

// breakLinks sets the rules of a step's links, which expire by themselves, and
// measures what they did.
func (p *player) breakLinks(ctx context.Context, i int, s plan.Step, lasts time.Duration) error {
	w := p.world()
	links, err := w.links(s)
	if err != nil {
		return err
	}
	var of []string
	for _, l := range links {
		for _, name := range []string{l.from.name, l.to.name} {
			if !slices.Contains(of, name) {
				of = append(of, name)
			}
		}
	}
	f := p.begin(i, s, of, nil)
	// A disturbance of over a round trip may cost a region's follower its
	// leader for a moment, but no site is cut from itself: nobody falls silent.
	if s.Do == plan.Flap {
		p.background(ctx, f, func(ctx context.Context) error { return p.flap(ctx, f, w, s, links, lasts) })
		return nil
	}
	inForce, err := p.putLinks(ctx, fmt.Sprintf("drill-%d", i+1), w, s, links, lasts)
	if err != nil {
		return err
	}
	f.Full = p.rig.clock.Now()
	p.background(ctx, f, func(ctx context.Context) error {
		if err := pause.For(ctx, max(lasts/2, lasts-time.Second)); err != nil {
			return err
		}
		effect, err := inForce(ctx)
		if err != nil && ctx.Err() == nil {
			f.NoEffect = err.Error()
		}
		if err := pause.For(ctx, p.until(f.From.Add(lasts))); err != nil {
			return err
		}
		f.Until = p.rig.clock.Now()
		if w.leaderless(s, links, lasts) != "" {
			if err := pause.For(ctx, afterStep); err != nil { // it may have taken that long
				return err
			}
		}
		p.measure(f, s, w, links, lasts)
		f.Effect += effect
		return nil
	})
	return nil
}

func (p *player) until(at instant.Instant) time.Duration { return max(0, at.Sub(p.rig.clock.Now())) }

// flap cuts the links again and again.
func (p *player) flap(ctx context.Context, f *check.Fault, w world, s plan.Step, links []link, lasts time.Duration) error {
	ends := f.From.Add(lasts)
	cuts, felt := 0, 0
	for n := 0; p.rig.clock.Now().Add(s.Down) <= ends; n++ {
		began := p.rig.clock.Now()
		if _, err := p.putLinks(ctx, fmt.Sprintf("drill-%d-%d", f.Step+1, n), w, s, links, s.Down); err != nil {
			return err
		}
		if f.Full == 0 {
			f.Full = p.rig.clock.Now()
		}
		if err := pause.For(ctx, s.Down); err != nil {
			return err
		}
		cuts++
		if silent, _ := p.silent(links, began, p.rig.clock.Now().Add(sampleEvery)); silent > s.Down/3 {
			felt++
		}
		if err := pause.For(ctx, s.Up); err != nil {
			return err
		}
	}
	f.Until = p.rig.clock.Now()
	f.Effect = fmt.Sprintf("%d cuts of %v, of which %d were felt", cuts, s.Down, felt)
	if cuts == 0 || felt < (cuts+1)/2 {
		f.NoEffect = f.Effect
	}
	return nil
}

// silent is how long, over the links that carry heartbeats, the receivers had
// not heard the senders: the least, and whether there was such a link.
func (p *player) silent(links []link, from, until instant.Instant) (least time.Duration, any bool) {
	for _, l := range links {
		if !l.from.region || p.isDown(l.to.name) {
			continue // only regions send heartbeats
		}
		s := p.rig.watch.silence(l.to.name, l.from.name, from, until)
		if !any || s < least {
			least = s
		}
		any = true
	}
	return least, any
}

// measure says what the links' fault did, by what others saw.
func (p *player) measure(f *check.Fault, s plan.Step, w world, links []link, lasts time.Duration) {
	heartbeats := len(s.Planes) == 0 || slices.Contains(s.Planes, "gossip")
	votes := len(s.Planes) == 0 || slices.Contains(s.Planes, "votes")
	region := w.within(links)
	switch {
	case region != "" && s.Do != plan.Delay && s.Do != plan.Loss:
		must := w.leaderless(s, links, lasts) != ""
		until := f.Until.Add(sampleEvery)
		if must {
			until = f.Until.Add(afterStep)
		}
		if p.rig.watch.beganAnew(region, f.From, until) {
			f.Effect = region + " elected another leader"
		} else if must {
			f.NoEffect = region + " elected no other leader, whose old one had no majority"
		}
	case s.Do == plan.Delay:
		p.measureDelay(f, s, w, links, heartbeats, votes)
	case s.Do == plan.Loss && heartbeats:
		p.measureLoss(f, s, links)
	case s.Do != plan.Delay && s.Do != plan.Loss && heartbeats:
		silent, any := p.silent(links, f.From, f.Until.Add(sampleEvery))
		if !any {
			break
		}
		f.Effect = fmt.Sprintf("every receiver missed its sender's heartbeats for %.1f s or more", silent.Seconds())
		// Heartbeats that a region with no quorum does not send are missed as well.
		if want := max(lasts-faultSlack, lasts/3); silent < want {
			f.NoEffect = fmt.Sprintf("a receiver missed its sender for %.1f s only, of %.1f s", silent.Seconds(), lasts.Seconds())
		}
	}
	if f.Effect == "" && f.NoEffect == "" {
		f.Effect = "every sender listed the fault; nothing measures this one"
	}
}

// measureDelay looks for it in the round trips that owners measure (an answer
// that comes after its round counts for nothing, and is not measured), and in
// the silence with which a delay begins.
func (p *player) measureDelay(f *check.Fault, s plan.Step, w world, links []link, heartbeats, votes bool) {
	for _, l := range links {
		for _, ends := range []link{l, {l.to, l.from}} {
			if !votes || !ends.from.owns(w) {
				continue // only who renews measures
			}
			var names []string
			for _, q := range w.at(ends.to) {
				names = append(names, q.Name)
			}
			if got := p.rig.watch.rtt(ends.from.name, names, f.Full, f.Until); got >= s.Add*3/4 {
				f.Effect = fmt.Sprintf("%s measured round trips up to %d ms to %s", ends.from.name, got.Milliseconds(), ends.to.name)
				return
			}
		}
		if heartbeats && l.from.region {
			if silent := p.rig.watch.silence(l.to.name, l.from.name, f.From, f.Until); silent >= s.Add*3/4 {
				f.Effect = fmt.Sprintf("%s missed heartbeats of %s for %d ms when it began", l.to.name, l.from.name, silent.Milliseconds())
			}
		}
	}
	if f.Effect == "" && (votes || heartbeats) && s.Add >= faultSlack/2 {
		f.NoEffect = "no round trip and no heartbeat was late by as much"
	}
}

// within is the region whose servers all the links are between; empty: they are
// between sites.
func (w world) within(links []link) (region string) {
	for _, l := range links {
		for _, end := range []site{l.from, l.to} {
			q, ok := w.file.Process(end.name)
			if end.region || !ok || q.Region == "" || region != "" && region != q.Region {
				return ""
			}
			region = q.Region
		}
	}
	return region
}

// leaderless is the region whose leader the links part from so many of its servers,
// for so long, that it cannot stay leader; empty: none.
func (w world) leaderless(s plan.Step, links []link, lasts time.Duration) (region string) {
	region = w.within(links)
	if region == "" || lasts < electedWithin || len(s.Planes) > 0 && !slices.Contains(s.Planes, "raft") || s.Do == plan.Delay || s.Do == plan.Loss || s.Do == plan.Flap {
		return ""
	}
	parted := map[string]bool{}
	for _, l := range links {
		switch w.leaders[region] {
		case l.from.name:
			parted[l.to.name] = true
		case l.to.name:
			parted[l.from.name] = true
		}
	}
	if n := len(w.file.RegionProcesses(region)); n-len(parted) > n/2 {
		return ""
	}
	return region
}

// electedWithin is by when a region has another leader, also at calm timing.
const electedWithin = 2 * time.Second

// heartbeatEvery is the pause between two heartbeats of a region.
const heartbeatEvery = 250 * time.Millisecond

// missedOne is longer than a receiver waits between two heartbeats of 250 ms, and
// less than it does when one is lost.
const missedOne = 400 * time.Millisecond

// measureLoss looks for heartbeats that receivers missed.
func (p *player) measureLoss(f *check.Fault, s plan.Step, links []link) {
	missed, of := 0, 0
	var worst time.Duration
	for _, l := range links {
		if !l.from.region || p.isDown(l.to.name) {
			continue // only regions send heartbeats
		}
		of++
		silent := p.rig.watch.silence(l.to.name, l.from.name, f.Full, f.Until)
		if worst = max(worst, silent); silent > missedOne {
			missed++
		}
	}
	if of == 0 {
		return
	}
	f.Effect = fmt.Sprintf("%d of %d receivers missed heartbeats, for up to %d ms", missed, of, worst.Milliseconds())
	if lost := s.Share * float64(f.Until.Sub(f.Full)/heartbeatEvery); missed == 0 || missed < of/2 && lost > 5 {
		f.NoEffect = f.Effect
	}
}

func (s site) owns(w world) bool {
	for _, owner := range w.owners {
		if s.region && owner == s.name {
			return true
		}
	}
	return false
}
