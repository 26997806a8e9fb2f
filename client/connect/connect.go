// Package connect makes a client out of what an operator hands to the author of
// a worker: the cluster file and a directory with a client's certificate.
//
// It is apart from package client so that who makes the connections in another
// way does not get a parser of cluster files along.
package connect

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/clusterclient"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/clusterfile/load"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
)

// Options of Open.
type Options struct {
	// File is the path of the cluster file. As with all commands, HEADLEASE_
	// variables of the environment go over what it says.
	File string
	// Name of the client in its certificate, NAME of 'headlease certs --client
	// NAME'.
	Name string
	// Certs is the directory with ca.crt, NAME.crt and NAME.key;
	// empty: the one that the cluster file names.
	Certs string
	// Insecure connects without TLS, to a cluster that runs so, on loopback; not
	// with Certs.
	Insecure bool
	// Client is the rest of the client's configuration: home region, TTL, labels,
	// logger. Cluster, Regions and Links are filled in.
	Client client.Config
}

// Open returns a client of the cluster file. It connects when it is first used,
// and closes its connections at its end. The error names the file or the
// setting, and what to do.
func Open(o Options) (*client.Client, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	cfg := o.Client
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	f, warnings, err := load.File(o.File)
	if err != nil {
		return nil, err
	}
	for _, w := range warnings {
		cfg.Logger.Warn("cluster file", "file", o.File, "warning", w)
	}
	if err := o.plain(f); err != nil {
		return nil, err
	}
	links, err := dial(o, f.Cluster, f.Certs, cfg.Logger)
	if err != nil {
		return nil, err
	}
	cfg.Cluster, cfg.Regions, cfg.Links = f.Cluster, clusterclient.Regions(f), links
	ended := cfg.Ended
	cfg.Ended = func() error {
		err := links.Close()
		if ended != nil {
			err = errors.Join(err, ended())
		}
		return err
	}
	c, err := client.New(cfg)
	if err != nil {
		return nil, errors.Join(err, links.Close())
	}
	return c, nil
}

// validate reports all faults at once.
func (o Options) validate() error {
	var errs []error
	if o.File == "" {
		errs = append(errs, errors.New("file: is missing; give the path of the cluster file"))
	}
	if o.Name == "" {
		errs = append(errs, errors.New("name: is missing; give the client's name in its certificate, NAME of 'headlease certs --client NAME'"))
	} else if err := pki.CheckName("name", o.Name); err != nil {
		errs = append(errs, err)
	}
	if o.Insecure && o.Certs != "" {
		errs = append(errs, errors.New("insecure: certs are given too; leave one of the two out"))
	}
	return errors.Join(errs...)
}

// plain refuses plain text to elsewhere at once: each dial would be refused, and
// tried again until the caller's context ends. Of a host's name the dial finds it
// out.
func (o Options) plain(f clusterfile.File) error {
	if !o.Insecure {
		return nil
	}
	for _, r := range f.Regions {
		for _, s := range r.Servers {
			at, err := netip.ParseAddrPort(s.API)
			if err == nil && !at.Addr().Unmap().IsLoopback() {
				return fmt.Errorf("insecure: server %s is at %s, and plain text is for loopback only; leave insecure out and give certs", s.Name, s.API)
			}
		}
	}
	return nil
}

func dial(o Options, cluster, certs string, log *slog.Logger) (*link.Links, error) {
	cfg := link.Config{Identity: pki.Identity{Cluster: cluster, Role: pki.RoleClient, Name: o.Name}, Insecure: o.Insecure, Logger: log}
	if !o.Insecure {
		if o.Certs != "" {
			certs = o.Certs
		}
		if certs == "" {
			return nil, errors.New("certs: is not set, nor does the cluster file name a directory; 'headlease certs' makes a set")
		}
		var err error
		if cfg.Credentials, err = pki.Load(pki.LoadConfig{Dir: certs, Want: cfg.Identity}); err != nil {
			return nil, fmt.Errorf("certs: %w", err)
		}
	}
	return link.New(cfg)
}
