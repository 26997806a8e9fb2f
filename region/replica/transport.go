package replica

import (
	"sync"

	"github.com/hashicorp/raft"
)

// transport is hashicorp/raft's network transport with a pipeline that cannot
// get stuck.
//
// In hashicorp/raft v1.8.0 the reader of a replication pipeline stops for good
// at the first answer that is not a success or shows a newer term, but the
// sender may be waiting, with no way out, to hand its next request over: only
// that very sender would close the pipeline. A deposed leader then never
// finishes Shutdown, and a leader to whom a follower once said no never
// replicates to it again while heartbeats go on (docs/decisions/0011).
//
// It also keeps a follower's answer from raft until the entries are on the own disk
// (lateLog).
type transport struct {
	*raft.NetworkTransport
	// onDisk waits for an entry to be on the own disk, until stop.
	onDisk func(index uint64, stop <-chan struct{}) error
	// stopped is closed when Raft has stopped.
	stopped <-chan struct{}
}

var (
	_ raft.WithPreVote = transport{}
	_ raft.WithClose   = transport{}
)

// AppendEntriesPipeline wraps the pipeline so that it closes itself with the
// answer at which its reader stops.
func (t transport) AppendEntriesPipeline(id raft.ServerID, target raft.ServerAddress) (raft.AppendPipeline, error) {
	in, err := t.NetworkTransport.AppendEntriesPipeline(id, target)
	if err != nil {
		return nil, err
	}
	return newPipeline(in, t.onDisk), nil
}

// AppendEntries is replication outside a pipeline, and heartbeats.
func (t transport) AppendEntries(id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	if err := t.NetworkTransport.AppendEntries(id, target, args, resp); err != nil {
		return err
	}
	return withheld(t.onDisk, t.stopped, args, resp)
}

type pipeline struct {
	raft.AppendPipeline
	onDisk func(index uint64, stop <-chan struct{}) error
	out    chan raft.AppendFuture
	closed chan struct{}
	once   sync.Once
}

func newPipeline(in raft.AppendPipeline, onDisk func(uint64, <-chan struct{}) error) *pipeline {
	p := &pipeline{AppendPipeline: in, onDisk: onDisk, out: make(chan raft.AppendFuture), closed: make(chan struct{})}
	go p.forward()
	return p
}

// forward passes answers on until the last one; it ends with the pipeline,
// which its user always closes.
func (p *pipeline) forward() {
	for {
		select {
		case <-p.closed:
			return
		case f := <-p.AppendPipeline.Consumer():
			req, resp := f.Request(), f.Response()
			last := !resp.Success || resp.Term > req.Term
			if withheld(p.onDisk, p.closed, req, resp) != nil {
				_ = p.AppendPipeline.Close()
				return // the pipeline is closed, or its server stops
			}
			if last {
				// First, so that the sender is free whatever the reader does next.
				_ = p.AppendPipeline.Close()
			}
			select {
			case p.out <- f:
			case <-p.closed:
				return
			}
			if last {
				return
			}
		}
	}
}

// Consumer returns the answers in order.
func (p *pipeline) Consumer() <-chan raft.AppendFuture { return p.out }

// Close ends the pipeline; it may be called again.
func (p *pipeline) Close() error {
	p.once.Do(func() { close(p.closed) })
	return p.AppendPipeline.Close()
}
