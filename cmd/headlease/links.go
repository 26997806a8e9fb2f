package main

import (
	"errors"
	"fmt"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
)

// links makes the connections of an operator's or client's command, under the
// identity: the admin's, or a client's name.
func (a *app) links(f clusterfile.File, id pki.Identity) (*link.Links, error) {
	log, err := a.logger()
	if err != nil {
		return nil, err
	}
	id.Cluster = f.Cluster
	cfg := link.Config{Identity: id, Insecure: a.insecure, Logger: log}
	if !a.insecure {
		if f.Certs == "" {
			return nil, errors.New("certs: is not set; give --certs or HEADLEASE_CERTS ('headlease certs' makes a set), or --insecure on loopback")
		}
		if cfg.Credentials, err = pki.Load(pki.LoadConfig{Dir: f.Certs, Want: id}); err != nil {
			return nil, fmt.Errorf("certs: %w", err)
		}
	}
	return link.New(cfg)
}

func admin() pki.Identity { return pki.Identity{Role: pki.RoleAdmin} }

// identity is the admin's, or that of the named client.
func identity(name string) pki.Identity {
	if name == "" {
		return admin()
	}
	return pki.Identity{Role: pki.RoleClient, Name: name}
}
