// Package gometrics shows what hashicorp/raft and memberlist count. They write
// to one global of hashicorp/go-metrics, so only a command may set it: once, and
// for the one region server or witness of its process.
package gometrics

import (
	"fmt"

	gometrics "github.com/hashicorp/go-metrics"
	"github.com/prometheus/client_golang/prometheus"
)

// prefix of all these names.
const prefix = "hashicorp"

// Install makes the process's go-metrics end in reg, from now on.
func Install(reg prometheus.Registerer) error {
	s := newSink()
	if err := reg.Register(s); err != nil {
		return fmt.Errorf("metrics of raft and memberlist: %w", err)
	}
	c := gometrics.DefaultConfig(prefix)
	c.EnableHostname, c.EnableHostnameLabel, c.EnableRuntimeMetrics = false, false, false
	if _, err := gometrics.NewGlobal(c, s); err != nil {
		return fmt.Errorf("metrics of raft and memberlist: %w", err)
	}
	return nil
}
