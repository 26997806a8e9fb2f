// Package e2e tests whole clusters of real processes: their disks, sockets and
// deaths. It has tests only; run them one at a time (-p 1), since a dozen
// processes per cluster share the machine.
package e2e
