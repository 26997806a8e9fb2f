// Package pki makes and loads what the processes of a cluster prove themselves
// with: one certificate authority per cluster, one certificate per process,
// client or admin, and the key that encrypts gossip.
//
// An identity is a URI in the certificate's subject alternative names:
//
//	headlease://CLUSTER/region/REGION/SERVER
//	headlease://CLUSTER/witness/NAME
//	headlease://CLUSTER/client/NAME
//	headlease://CLUSTER/admin
//
// A directory made by Generate holds
//
//	ca.crt              the authority's certificate      every process
//	gossip.key          the gossip key, hex, mode 0600   region servers and witnesses
//	NAME.crt, NAME.key  one pair per identity            the process of that name alone
//	ca/ca.key           the authority's key, mode 0600   no process: keep it apart
package pki

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
)

// Role is what a certificate's bearer may be.
type Role string

// The roles of a cluster.
const (
	RoleRegion  Role = "region"
	RoleWitness Role = "witness"
	RoleClient  Role = "client"
	RoleAdmin   Role = "admin"
)

const (
	scheme = "headlease"
	// maxName bounds cluster, region and process names; an identity's URI then
	// stays under MaxURI.
	maxName = 63
	// MaxURI bounds an identity's text.
	MaxURI = 256
)

// Identity is who a process or a client is. Region is set for region servers
// only; Name is empty for admin only.
type Identity struct {
	Cluster string
	Role    Role
	Region  string
	Name    string
}

// URI is the identity as its certificate carries it.
func (id Identity) URI() string {
	return scheme + "://" + id.Cluster + "/" + id.Path()
}

// Path is the identity without its cluster: "region/eu/eu-1", "witness/w1",
// "client/NAME", "admin".
func (id Identity) Path() string {
	switch id.Role {
	case RoleRegion:
		return string(id.Role) + "/" + id.Region + "/" + id.Name
	case RoleAdmin:
		return string(id.Role)
	default:
		return string(id.Role) + "/" + id.Name
	}
}

// String is Path.
func (id Identity) String() string { return id.Path() }

// File is the base of the identity's file names.
func (id Identity) File() string {
	if id.Role == RoleAdmin {
		return string(RoleAdmin)
	}
	return id.Name
}

// Validate reports all faults at once.
func (id Identity) Validate() error {
	errs := []error{CheckName("cluster", id.Cluster)}
	switch id.Role {
	case RoleRegion:
		errs = append(errs, CheckName("region", id.Region), CheckName("name", id.Name))
	case RoleWitness, RoleClient:
		errs = append(errs, CheckName("name", id.Name))
		if id.Region != "" {
			errs = append(errs, fmt.Errorf("region %q: only region servers have a region", id.Region))
		}
	case RoleAdmin:
		if id.Region != "" || id.Name != "" {
			errs = append(errs, errors.New("admin has neither region nor name"))
		}
	default:
		errs = append(errs, fmt.Errorf("role %q: must be region, witness, client or admin", id.Role))
	}
	return errors.Join(errs...)
}

// CheckName refuses what is not 1 to 63 characters of [A-Za-z0-9._-], begun by
// a letter or a digit, so that a name is safe in a URI and as a file's name.
func CheckName(field, name string) error {
	if name == "" {
		return fmt.Errorf("%s: must not be empty", field)
	}
	if len(name) > maxName {
		return fmt.Errorf("%s %.20q…: is %d characters long; at most %d", field, name, len(name), maxName)
	}
	for i := range len(name) {
		c := name[i]
		alnum := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
		if !alnum && (i == 0 || c != '.' && c != '_' && c != '-') {
			return fmt.Errorf("%s %q: use letters, digits, '.', '_' and '-', beginning with a letter or a digit", field, name)
		}
	}
	return nil
}

// ParseURI is the inverse of URI; it accepts nothing else.
func ParseURI(s string) (Identity, error) {
	if len(s) > MaxURI {
		return Identity{}, fmt.Errorf("identity of %d bytes: at most %d", len(s), MaxURI)
	}
	rest, ok := strings.CutPrefix(s, scheme+"://")
	if !ok {
		return Identity{}, fmt.Errorf("identity %q: does not begin with %s://", s, scheme)
	}
	parts := strings.Split(rest, "/")
	id := Identity{Cluster: parts[0]}
	switch {
	case len(parts) == 4 && parts[1] == string(RoleRegion):
		id.Role, id.Region, id.Name = RoleRegion, parts[2], parts[3]
	case len(parts) == 3 && (parts[1] == string(RoleWitness) || parts[1] == string(RoleClient)):
		id.Role, id.Name = Role(parts[1]), parts[2]
	case len(parts) == 2 && parts[1] == string(RoleAdmin):
		id.Role = RoleAdmin
	default:
		return Identity{}, fmt.Errorf("identity %q: not of the form %s://CLUSTER/ROLE/…", s, scheme)
	}
	if err := id.Validate(); err != nil {
		return Identity{}, fmt.Errorf("identity %q: %w", s, err)
	}
	return id, nil
}

// FromURIs finds the one identity among a certificate's URIs.
func FromURIs(uris []*url.URL) (Identity, error) {
	var found []string
	for _, u := range uris {
		if u.Scheme == scheme {
			found = append(found, u.String())
		}
	}
	if len(found) != 1 {
		return Identity{}, fmt.Errorf("certificate carries %d %s:// identities; exactly one is needed", len(found), scheme)
	}
	return ParseURI(found[0])
}
