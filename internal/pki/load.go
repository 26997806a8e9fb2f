package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// LoadConfig says which pair to load, and whose it must be.
type LoadConfig struct {
	// Dir holds ca.crt, the pair, and for servers gossip.key.
	Dir string
	// File is the base of the pair's names; default Want.File().
	File string
	// Want is the identity expected; empty fields are not checked.
	Want Identity
	// Gossip demands the gossip key.
	Gossip bool
}

// Credentials are what a process proves itself with. Immutable.
type Credentials struct {
	Identity    Identity
	Certificate tls.Certificate
	Roots       *x509.CertPool
	// GossipKey has 32 bytes; nil unless asked for.
	GossipKey []byte
}

// Load reads and checks the credentials of one process. Every error names the
// file and what to do.
func Load(c LoadConfig) (*Credentials, error) {
	if c.File == "" {
		c.File = c.Want.File()
	}
	caPath := filepath.Join(c.Dir, caFile)
	certPath := filepath.Join(c.Dir, c.File+".crt")
	keyPath := filepath.Join(c.Dir, c.File+".key")
	ca, err := readCertificate(caPath)
	if err != nil {
		return nil, err
	}
	if !ca.IsCA {
		return nil, fmt.Errorf("%s: is not the certificate of an authority; copy ca.crt of the cluster's set", caPath)
	}
	cert, err := readCertificate(certPath)
	if err != nil {
		return nil, err
	}
	key, err := readKey(keyPath)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	if err := verify(certPath, caPath, cert, roots); err != nil {
		return nil, err
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		return nil, fmt.Errorf("%s: does not belong to %s; copy both files of one pair", keyPath, certPath)
	}
	id, err := FromURIs(cert.URIs)
	if err != nil {
		return nil, fmt.Errorf("%s: %w; make one with 'headlease certs'", certPath, err)
	}
	if err := match(certPath, id, c.Want); err != nil {
		return nil, err
	}
	out := &Credentials{
		Identity:    id,
		Certificate: tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert},
		Roots:       roots,
	}
	if c.Gossip {
		if out.GossipKey, err = readGossipKey(filepath.Join(c.Dir, gossipFile)); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func verify(certPath, caPath string, cert *x509.Certificate, roots *x509.CertPool) error {
	now := time.Now()
	switch {
	case now.After(cert.NotAfter):
		return fmt.Errorf("%s: expired at %s; move the pair away and run 'headlease certs' again", certPath, cert.NotAfter.UTC().Format(time.RFC3339))
	case now.Before(cert.NotBefore):
		return fmt.Errorf("%s: is valid only from %s; check this machine's clock", certPath, cert.NotBefore.UTC().Format(time.RFC3339))
	}
	_, err := cert.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	if err == nil {
		return nil
	}
	if errors.As(err, new(x509.UnknownAuthorityError)) {
		return fmt.Errorf("%s: is not signed by %s; use the certificates of one set (%w)", certPath, caPath, err)
	}
	return fmt.Errorf("%s: %w; make one with 'headlease certs'", certPath, err)
}

func match(path string, id, want Identity) error {
	if want.Cluster != "" && id.Cluster != want.Cluster {
		return fmt.Errorf("%s: is of cluster %q, not %q; use the certificates of this cluster", path, id.Cluster, want.Cluster)
	}
	if want.Role != "" && id.Role != want.Role || want.Region != "" && id.Region != want.Region || want.Name != "" && id.Name != want.Name {
		return fmt.Errorf("%s: is for %s, not %s; use the pair made for this process", path, id.Path(), want.Path())
	}
	return nil
}

func missing(path string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: missing; make it with 'headlease certs' or name the right directory (%w)", path, fs.ErrNotExist)
	}
	if errors.Is(err, syscall.ENOTDIR) {
		return fmt.Errorf("%s: is in no directory; name the directory that 'headlease certs' made (%w)", path, syscall.ENOTDIR)
	}
	return fmt.Errorf("%w; make it readable for this user, or name the right directory", err)
}

func readCertificate(path string) (*x509.Certificate, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, missing(path, err)
	}
	block, rest := pem.Decode(data)
	if block == nil || block.Type != pemCertificate || len(strings.TrimSpace(string(rest))) != 0 {
		return nil, fmt.Errorf("%s: is not one certificate in PEM; copy the file again", path)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w; copy the file again", path, err)
	}
	return cert, nil
}

func readKey(path string) (*ecdsa.PrivateKey, error) {
	data, err := readSecret(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(data)
	if block == nil || block.Type != pemKey {
		return nil, fmt.Errorf("%s: is not a private key in PEM (PKCS #8); copy the file again", path)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w; copy the file again", path, err)
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, fmt.Errorf("%s: is not an ECDSA P-256 key; make one with 'headlease certs'", path)
	}
	return key, nil
}

func readGossipKey(path string) ([]byte, error) {
	data, err := readSecret(path)
	if err != nil {
		return nil, err
	}
	key, err := hex.DecodeString(strings.TrimSpace(string(data)))
	if err != nil || len(key) != gossipKeyLen {
		return nil, fmt.Errorf("%s: is not %d bytes in hex; copy the file again", path, gossipKeyLen)
	}
	return key, nil
}

// readSecret refuses a file that others than its owner may read.
func readSecret(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, missing(path, err)
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if perm := info.Mode().Perm(); perm&0o077 != 0 {
		return nil, fmt.Errorf("%s: mode %04o lets others read it; run 'chmod 600' on it", path, perm)
	}
	data := make([]byte, min(info.Size(), 1<<16))
	n, err := f.ReadAt(data, 0)
	if err != nil && n < len(data) {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return data, nil
}
