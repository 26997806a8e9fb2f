// Package devcluster runs a whole cluster as child processes on loopback, with
// the delays of a wide area network between its regions: what `headlease dev`
// and the drills stand on.
//
// A directory holds all of it:
//
//	cluster.yaml       the cluster, with the ports chosen when it was made
//	certs/             the authority and a certificate for each process
//	faults/NAME.json   the process's start-up fault table: the WAN delays
//	data/NAME          the process's data directory; also of redis-REGION, if each
//	                   region has a lease cache on a redis-server of its own
//	logs/NAME.log      what it wrote, appended over restarts
//	dev.json           State: pids, addresses and certificates, for scripts
//	dev.lock           held while a supervisor runs
//
// Starting on the same directory resumes: same ports, certificates and data.
// A directory of another shape is refused.
//
// Supervision is plain on purpose: nothing is restarted by itself, since a
// drill that kills a process wants it dead. Every child leads a process group
// of its own, so that a Ctrl-C at the terminal reaches the supervisor alone and
// Stop ends whole groups; and it dies with the supervisor (Pdeathsig), also by
// SIGKILL. Linux only.
//
// Goroutines: per Group one that forks, locked to its thread, and one reaper per
// running child; per Cluster one per running process that records its end. Stop
// ends them all.
package devcluster
