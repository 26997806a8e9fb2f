// Package clusterfile is cluster.yaml: the one file that names a cluster, its
// timing, its regions with their servers, its witnesses and its partitions.
// Every process starts with the same file plus its own name and data directory.
//
// The package is pure: Parse takes the file's bytes and an environment, and
// sub-package load reads them. Parsing, defaults (withDefaults) and checks
// (Validate) are apart. A file is refused with all its faults at once, each
// naming the field's path, the value and the remedy; an unknown key is a
// fault, too, since a misspelt key that is silently ignored becomes a default
// that nobody chose.
//
// # Environment
//
// Every key can also be set, or overridden, by a variable: HEADLEASE_ and the
// key in upper case, with two underscores between the parts of a path and
// positions, counted from 0, in lists:
//
//	d                         HEADLEASE_D=2s
//	allow_even_witnesses      HEADLEASE_ALLOW_EVEN_WITNESSES=true
//	data_dir                  HEADLEASE_DATA_DIR=/var/lib/headlease
//	name                      HEADLEASE_NAME=eu-1
//	regions[0].servers[1].api HEADLEASE_REGIONS__0__SERVERS__1__API=10.0.0.2:7600
//	partitions[0].prefer      HEADLEASE_PARTITIONS__0__PREFER=eu,us
//	witnesses (all of them)   HEADLEASE_WITNESSES='[{name: w1, host: 10.0.9.1}]'
//
// An empty variable counts as unset. The position just past the end of a list
// adds to it. A variable with the
// prefix HEADLEASE_ that names no key is not refused, as keys in the file are
// (an orchestrator may set HEADLEASE_SERVICE_HOST and the like), but reported as a
// warning if it looks like a misspelt one.
package clusterfile
