package devcluster

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"syscall"
)

const loopback = "127.0.0.1"

// Ports are chosen below the kernel's ephemeral range, from which the cluster's
// own connections take theirs: a server that comes back after kill -9 must find
// its port free.
const (
	lowPort  = 10000
	highPort = 32000
)

// FreePorts returns n ports that are free for TCP and UDP on loopback.
func FreePorts(n int) ([]int, error) {
	var ports []int
	start := lowPort + rand.IntN(highPort-lowPort)
	for i := range highPort - lowPort {
		port := lowPort + (start-lowPort+i)%(highPort-lowPort)
		switch err := probe(port); {
		case err == nil:
			ports = append(ports, port)
		case !errors.Is(err, syscall.EADDRINUSE):
			return nil, fmt.Errorf("look for free ports on %s: %w", loopback, err)
		}
		if len(ports) == n {
			return ports, nil
		}
	}
	return nil, fmt.Errorf("only %d of %d ports between %d and %d are free on %s; stop another cluster", len(ports), n, lowPort, highPort, loopback)
}

// probe asks whether a port is free by binding it for a moment.
func probe(port int) error {
	address := net.JoinHostPort(loopback, strconv.Itoa(port))
	//nolint:forbidigo // Bound and closed: nothing is served on it, so no fault table is passed by.
	stream, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	//nolint:forbidigo // As above.
	datagram, err := net.ListenPacket("udp", address)
	if err != nil {
		return errors.Join(err, stream.Close())
	}
	return closeAll(stream, datagram)
}

func closeAll(cs ...io.Closer) error {
	var errs []error
	for _, c := range cs {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// checkPorts reports every address of a process that something else uses.
func (c *Cluster) checkPorts(p Process) error {
	if c.opts.Places != nil {
		return nil // nobody else is there
	}
	var errs []error
	for _, a := range []struct{ plane, address string }{{"api", p.API}, {"votes", p.Votes}, {"raft", p.Raft}, {"gossip", p.Gossip}, {"redis", p.Redis}} {
		if a.address == "" {
			continue
		}
		_, port, err := net.SplitHostPort(a.address)
		if err != nil {
			return fmt.Errorf("%s address of %s: %w", a.plane, p.Name, err)
		}
		n, err := strconv.Atoi(port)
		if err != nil {
			return fmt.Errorf("%s address of %s: port %q is not a number", a.plane, p.Name, port)
		}
		if err := probe(n); errors.Is(err, syscall.EADDRINUSE) {
			errs = append(errs, fmt.Errorf("%s address %s of %s is used by another process; stop that one, or make a cluster in a new directory", a.plane, a.address, p.Name))
		} else if err != nil {
			errs = append(errs, fmt.Errorf("%s address %s of %s: %w", a.plane, a.address, p.Name, err))
		}
	}
	return errors.Join(errs...)
}
