package redisserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

const slots = 16384

// NewCluster starts a Redis Cluster of n masters without replicas, each with its
// data in a directory of its own below dir, and returns when all of them serve.
func NewCluster(ctx context.Context, dir string, n int, settings ...string) (servers []*Server, err error) {
	defer func() {
		if err != nil {
			for _, s := range servers {
				err = errors.Join(err, s.Close())
			}
			servers = nil
		}
	}()
	for i := range n {
		ports, err := freePorts(ctx, 2)
		if err != nil {
			return servers, err
		}
		all := append([]string{
			"--cluster-enabled", "yes", "--cluster-port", fmt.Sprint(ports[1]), "--cluster-announce-ip", "127.0.0.1",
			"--cluster-node-timeout", "5000",
		}, settings...)
		s, err := newServer(filepath.Join(dir, fmt.Sprint("node", i)), ports[0], all)
		if err != nil {
			return servers, err
		}
		servers = append(servers, s)
		c := redis.NewClient(&redis.Options{Addr: s.Socket()})
		err = c.ClusterAddSlotsRange(ctx, i*slots/n, (i+1)*slots/n-1).Err()
		if err == nil {
			// Not ClusterMeet, which takes no port of the bus.
			err = c.Do(ctx, "CLUSTER", "MEET", "127.0.0.1", servers[0].port, busPort(servers[0])).Err()
		}
		if err := errors.Join(err, c.Close()); err != nil {
			return servers, fmt.Errorf("node %d of the cluster: %w", i, err)
		}
	}
	for _, s := range servers {
		if err := s.joined(ctx, n); err != nil {
			return servers, err
		}
	}
	return servers, nil
}

// NewReplicated starts a server and a replica of it, each below dir, and returns when the
// replica has its data.
func NewReplicated(ctx context.Context, dir string, settings ...string) (primary, replica *Server, err error) {
	ports, err := freePorts(ctx, 2)
	if err != nil {
		return nil, nil, err
	}
	if primary, err = newServer(filepath.Join(dir, "primary"), ports[0], settings); err != nil {
		return nil, nil, err
	}
	replica, err = newServer(filepath.Join(dir, "replica"), ports[1], append([]string{"--replicaof", "127.0.0.1 " + fmt.Sprint(ports[0])}, settings...))
	if err != nil {
		return nil, nil, errors.Join(err, primary.Close())
	}
	c := redis.NewClient(&redis.Options{Addr: replica.Socket(), ContextTimeoutEnabled: true})
	defer func() { _ = c.Close() }()
	for {
		info, err := c.Info(ctx, "replication").Result()
		if err == nil && strings.Contains(info, "master_link_status:up") {
			return primary, replica, nil
		}
		select {
		case <-ctx.Done():
			err = fmt.Errorf("the replica does not follow: %w\n%s", errors.Join(context.Cause(ctx), err), info)
			return nil, nil, errors.Join(err, primary.Close(), replica.Close())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func busPort(s *Server) string {
	for i, arg := range s.settings {
		if arg == "--cluster-port" {
			return s.settings[i+1]
		}
	}
	return ""
}

// joined waits until the server knows all n nodes and serves.
func (s *Server) joined(ctx context.Context, n int) error {
	c := redis.NewClient(&redis.Options{Addr: s.Socket(), ContextTimeoutEnabled: true})
	defer func() { _ = c.Close() }()
	for {
		info, err := c.ClusterInfo(ctx).Result()
		if err == nil && strings.Contains(info, "cluster_state:ok") && strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d\r", n)) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the cluster does not form: %w\n%s", errors.Join(context.Cause(ctx), err), info)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// freePorts returns ports that are free now.
func freePorts(ctx context.Context, n int) (ports []int, err error) {
	for range n {
		// All are held until the last is found, so that they differ.
		ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0") //nolint:forbidigo // nothing is served on it
		if err != nil {
			return nil, err
		}
		defer func() { _ = ln.Close() }()
		ports = append(ports, ln.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}
