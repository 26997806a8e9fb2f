package devcluster

import (
	"fmt"
	"net"
	"os/exec"

	"github.com/headlease/headlease/internal/clusterfile"
)

// RoleRedis is the role of a region's lease cache in the state: a redis-server,
// which is no process of the cluster file.
const RoleRedis = "redis"

// RedisName is the name of the process that a region's lease cache is on, in the
// state and towards drill agents.
func RedisName(region string) string { return "redis-" + region }

// caches are the redis-servers of a cluster, by the addresses in its file.
func caches(f clusterfile.File) []Process {
	var out []Process
	for _, r := range f.Regions {
		if len(r.Cache.Addresses) > 0 {
			out = append(out, Process{Name: RedisName(r.Name), Role: RoleRedis, Region: r.Name, Redis: r.Cache.Addresses[0]})
		}
	}
	return out
}

// findRedis returns the redis-server of PATH.
func findRedis() (string, error) {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return "", fmt.Errorf("redis: the regions' lease caches need redis-server, and PATH has none; "+
			"install it (apt-get install redis-server), or make a cluster without: %w", err)
	}
	return path, nil
}

// redisArgs start a server that keeps nothing: a cache that comes back is empty.
func redisArgs(p Process) ([]string, error) {
	host, port, err := net.SplitHostPort(p.Redis)
	if err != nil {
		return nil, fmt.Errorf("address of %s: %w", p.Name, err)
	}
	return []string{
		"--port", port, "--bind", host, "--dir", p.DataDir, "--save", "", "--appendonly", "no", "--daemonize", "no",
	}, nil
}
