package cache

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/internal/redisserver"
)

// certificate makes a self-signed one for loopback.
func certificate(t *testing.T) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "redis"}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: cert}, keyFile: {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile
}

// Over TLS the cache is written, and right again after a kill; a server whose
// certificate is not trusted gets nothing.
func TestTLS(t *testing.T) {
	t.Parallel()
	certFile, keyFile := certificate(t)
	s, err := redisserver.NewTLS(t.Context(), t.TempDir(), certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	server := ServerConfig{Addresses: []string{s.Address()}, TLS: true, CAFile: certFile}
	r := newRig(t, server)
	r.churn(10)
	r.right("at first")
	s.Kill()
	r.churn(20)
	r.fails(2)
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	r.right("after a kill")

	server.CAFile = "" // the system's roots
	stranger := newRig(t, server)
	stranger.churn(1)
	stranger.fails(2)
	if _, _, err := stranger.reader.Lookup(t.Context(), "lock/1"); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("without the certificate the reader says %v", err)
	}
}

// A sentinel fails over to a replica that misses the newest writes: the mirror and readers
// find it, leases that ended are not told of as held, and those that began are known.
func TestF45SentinelFailsOverWithLostWrites(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first, second, err := redisserver.NewReplicated(t.Context(), dir, "--repl-diskless-sync-delay", "0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = first.Close(); _ = second.Close() })
	sentinel, err := redisserver.NewSentinel(t.Context(), filepath.Join(dir, "sentinel"), "leases", first)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sentinel.Close() })
	replica, watcher := redis.NewClient(&redis.Options{Addr: second.Socket()}), redis.NewSentinelClient(&redis.Options{Addr: sentinel.Address()})
	t.Cleanup(func() { _ = replica.Close(); _ = watcher.Close() })

	r := newRig(t, ServerConfig{Addresses: []string{sentinel.Address()}, Master: "leases"})
	r.churn(10)
	r.right("at first")
	r.until("the sentinel does not know the replica", func() string {
		all, err := watcher.Replicas(t.Context(), "leases").Result()
		if err == nil && len(all) == 1 && all[0]["flags"] == "slave" && all[0]["master-link-status"] == "ok" {
			return ""
		}
		return fmt.Sprint(all, err)
	})
	// What is written from here on, the replica never sees: its password is wrong.
	for _, setting := range []string{"masteruser", "masterauth"} {
		if err := replica.ConfigSet(t.Context(), setting, "nobody").Err(); err != nil {
			t.Fatal(err)
		}
	}
	if err := replica.Do(t.Context(), "CLIENT", "KILL", "TYPE", "MASTER").Err(); err != nil {
		t.Fatal(err)
	}
	r.churn(12)
	r.right("before the failover")
	newest := r.mirror.key.of("lock/1")
	if kept, err := replica.Get(t.Context(), newest).Result(); err == nil && strings.HasPrefix(kept, r.leases["lock/1"].Token.String()+" ") {
		t.Fatal("the replica has what it was to lose")
	}
	first.Kill()
	r.until("no failover", func() string {
		role, err := replica.Do(t.Context(), "ROLE").Slice()
		if err == nil && len(role) > 0 && role[0] == "master" {
			return ""
		}
		return fmt.Sprint(role, err)
	})
	r.right("after the failover")
}
