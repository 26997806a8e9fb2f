package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"time"
)

const (
	caFile     = "ca.crt"
	caKeyDir   = "ca"
	caKeyFile  = "ca.key"
	gossipFile = "gossip.key"

	gossipKeyLen = 32
	// backdate allows for clocks behind the one that signs.
	backdate = time.Hour
	// caYears outlives any leaf; a new authority is a new set.
	caYears = 20

	pemCertificate = "CERTIFICATE"
	pemKey         = "PRIVATE KEY"
)

// Config says what Generate makes.
type Config struct {
	// Dir is created with mode 0700 if it is missing.
	Dir string
	// Cluster is the name in every identity.
	Cluster string
	// Identities get a certificate each; their Cluster may be left empty.
	Identities []Identity
	// Validity of the certificates; default two years. The authority's own
	// certificate is valid for 20 years.
	Validity time.Duration
}

func (c Config) withDefaults() Config {
	if c.Validity == 0 {
		c.Validity = 2 * 365 * 24 * time.Hour
	}
	ids := make([]Identity, len(c.Identities))
	for i, id := range c.Identities {
		if id.Cluster == "" {
			id.Cluster = c.Cluster
		}
		ids[i] = id
	}
	c.Identities = ids
	return c
}

// Validate reports all faults at once.
func (c Config) Validate() error {
	var errs []error
	if c.Dir == "" {
		errs = append(errs, errors.New("certificate directory: must not be empty"))
	}
	errs = append(errs, CheckName("cluster", c.Cluster))
	if c.Validity < 0 {
		errs = append(errs, fmt.Errorf("validity %v: must be positive", c.Validity))
	}
	files := map[string]Identity{}
	for _, id := range c.Identities {
		if err := id.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("identity %s: %w", id.Path(), err))
			continue
		}
		if id.Cluster != c.Cluster {
			errs = append(errs, fmt.Errorf("identity %s: is of cluster %q, not %q", id.Path(), id.Cluster, c.Cluster))
		}
		if id.File() == "ca" || id.File() == "gossip" {
			errs = append(errs, fmt.Errorf("identity %s: the name %q is taken by the directory's own files; choose another", id.Path(), id.File()))
		}
		if other, taken := files[id.File()]; taken && other != id {
			errs = append(errs, fmt.Errorf("identities %s and %s: both would be %s.crt; give one another name", other.Path(), id.Path(), id.File()))
		}
		files[id.File()] = id
	}
	return errors.Join(errs...)
}

// Made lists the files, relative to the directory, that Generate made and those
// that it found in order.
type Made struct {
	New  []string
	Kept []string
}

// Generate makes what is missing of an authority, a gossip key and the
// certificates asked for. It never overwrites: what is there is checked and
// kept, and what is there and does not fit is an error, by which nothing has
// been changed that was there before. Run again after a crash, it finishes.
func Generate(c Config) (Made, error) {
	c = c.withDefaults()
	var made Made
	if err := c.Validate(); err != nil {
		return made, err
	}
	if err := os.MkdirAll(filepath.Join(c.Dir, caKeyDir), 0o700); err != nil {
		return made, fmt.Errorf("certificate directory: %w", err)
	}
	ca, err := ensureAuthority(c, &made)
	if err != nil {
		return made, err
	}
	if err := ensureGossipKey(c.Dir, &made); err != nil {
		return made, err
	}
	for _, id := range c.Identities {
		if err := ca.ensure(c, id, &made); err != nil {
			return made, err
		}
	}
	return made, nil
}

type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func ensureAuthority(c Config, made *Made) (*authority, error) {
	certPath := filepath.Join(c.Dir, caFile)
	keyName := filepath.Join(caKeyDir, caKeyFile)
	keyPath := filepath.Join(c.Dir, keyName)
	haveCert, haveKey := exists(certPath), exists(keyPath)
	if haveCert && !haveKey {
		return nil, fmt.Errorf("%s: missing beside %s; put the authority's key back, or make a new set in an empty directory", keyPath, certPath)
	}
	key, err := ensureKey(c.Dir, keyName, made)
	if err != nil {
		return nil, err
	}
	if haveCert {
		cert, err := readCertificate(certPath)
		if err != nil {
			return nil, err
		}
		if !cert.IsCA || !key.PublicKey.Equal(cert.PublicKey) {
			return nil, fmt.Errorf("%s: does not belong to %s; put the pair of one authority back", keyPath, certPath)
		}
		if want := authorityName(c.Cluster); cert.Subject.CommonName != want {
			return nil, fmt.Errorf("%s: is %q, not %q; use the directory of cluster %q or an empty one", certPath, cert.Subject.CommonName, want, c.Cluster)
		}
		made.Kept = append(made.Kept, caFile)
		return &authority{cert: cert, key: key}, nil
	}
	now := time.Now()
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: authorityName(c.Cluster)},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.AddDate(caYears, 0, 0),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("sign %s: %w", caFile, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("sign %s: %w", caFile, err)
	}
	if err := writeNew(certPath, pem.EncodeToMemory(&pem.Block{Type: pemCertificate, Bytes: der}), 0o644); err != nil {
		return nil, err
	}
	made.New = append(made.New, caFile)
	return &authority{cert: cert, key: key}, nil
}

func authorityName(cluster string) string { return "headlease " + cluster + " CA" }

// ensure makes one pair. A key without its certificate is what a crash between
// the two leaves; it gets its certificate now.
func (a *authority) ensure(c Config, id Identity, made *Made) error {
	certName, keyName := id.File()+".crt", id.File()+".key"
	certPath, keyPath := filepath.Join(c.Dir, certName), filepath.Join(c.Dir, keyName)
	if exists(certPath) {
		if _, err := Load(LoadConfig{Dir: c.Dir, File: id.File(), Want: id}); err != nil {
			return fmt.Errorf("existing certificate does not fit: %w", err)
		}
		made.Kept = append(made.Kept, certName, keyName)
		return nil
	}
	key, err := ensureKey(c.Dir, keyName, made)
	if err != nil {
		return err
	}
	serial, err := newSerial()
	if err != nil {
		return err
	}
	uri, err := url.Parse(id.URI())
	if err != nil {
		return fmt.Errorf("identity %s: %w", id.Path(), err)
	}
	usage := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if id.Role == RoleRegion || id.Role == RoleWitness {
		usage = append(usage, x509.ExtKeyUsageServerAuth)
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: id.Path()},
		URIs:         []*url.URL{uri},
		NotBefore:    now.Add(-backdate),
		NotAfter:     now.Add(c.Validity),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  usage,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return fmt.Errorf("sign %s: %w", keyPath, err)
	}
	if err := writeNew(certPath, pem.EncodeToMemory(&pem.Block{Type: pemCertificate, Bytes: der}), 0o644); err != nil {
		return err
	}
	made.New = append(made.New, certName)
	return nil
}

// ensureKey reads the private key of that name or makes it.
func ensureKey(dir, name string, made *Made) (*ecdsa.PrivateKey, error) {
	path := filepath.Join(dir, name)
	if exists(path) {
		key, err := readKey(path)
		if err != nil {
			return nil, err
		}
		made.Kept = append(made.Kept, name)
		return key, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make %s: %w", path, err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("make %s: %w", path, err)
	}
	if err := writeNew(path, pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: der}), 0o600); err != nil {
		return nil, err
	}
	made.New = append(made.New, name)
	return key, nil
}

func ensureGossipKey(dir string, made *Made) error {
	path := filepath.Join(dir, gossipFile)
	if exists(path) {
		if _, err := readGossipKey(path); err != nil {
			return err
		}
		made.Kept = append(made.Kept, gossipFile)
		return nil
	}
	key := make([]byte, gossipKeyLen)
	if _, err := rand.Read(key); err != nil {
		return fmt.Errorf("make %s: %w", path, err)
	}
	if err := writeNew(path, []byte(hex.EncodeToString(key)+"\n"), 0o600); err != nil {
		return err
	}
	made.New = append(made.New, gossipFile)
	return nil
}

func newSerial() (*big.Int, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("make serial number: %w", err)
	}
	return serial, nil
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// writeNew makes a file that is never seen half written and never replaces
// one: a temporary file, synced, linked to its name.
func writeNew(path string, data []byte, mode fs.FileMode) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		err = errors.Join(err, os.Remove(f.Name()))
		if err != nil {
			err = fmt.Errorf("write %s: %w", path, err)
		}
	}()
	_, err = f.Write(data)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Link(f.Name(), path)
}
