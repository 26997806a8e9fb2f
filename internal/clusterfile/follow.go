package clusterfile

import "fmt"

// CheckFollow returns why the running process was.Name cannot go over from one
// cluster file to another; nil if it can: it takes the other processes' names
// and addresses from it. What else the file says (d, shards, partitions, timing)
// holds from the next start, or is the cluster's configuration's to say.
func CheckFollow(was, now File) error {
	before, _ := was.Process(was.Name)
	after, ok := now.Process(was.Name)
	switch {
	case now.Cluster != was.Cluster:
		return fmt.Errorf("cluster: is %q, and this process belongs to %q; correct the file", now.Cluster, was.Cluster)
	case !ok:
		return fmt.Errorf("%s, which is this process, is not in the file; add it, or stop the process", was.Name)
	case before != after:
		return fmt.Errorf("%s, which is this process, has other addresses or another region than it was started with; restart it", was.Name)
	}
	return nil
}
