// Package telemetry is what a process shows of itself: the names of all
// metrics, the registry's fixed part, and the HTTP server of /metrics, /healthz
// and /readyz.
//
// There is one registry per process and no global: a component takes a
// prometheus.Registerer in its Config and makes its metrics under the names of
// this package; a nil Registerer counts for nobody. docs/metrics.md lists them,
// and a test compares that page with what live processes gather.
//
// The server speaks plain HTTP without authentication. It shows names of
// regions, servers and partitions and counts, and no session, resource,
// identity or value. It binds what the cluster file says, by default loopback;
// any other address is an operator's explicit choice and is logged.
package telemetry
