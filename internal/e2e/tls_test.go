package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/pki"
)

// TestEveryAddressRefusesStrangers connects in plain text and with a
// certificate of a foreign authority to every address in dev.json: nobody
// answers anything.
func TestEveryAddressRefusesStrangers(t *testing.T) {
	c := start(t, oneRegion())
	foreign := foreignPair(t, c.File().Cluster)
	state, err := devcluster.ReadState(c.Dir())
	if err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(state.CA)
	if err != nil {
		t.Fatal(err)
	}
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM(ca)
	own, err := tls.LoadX509KeyPair(state.Admin.Cert, state.Admin.Key)
	if err != nil {
		t.Fatal(err)
	}
	streams := 0
	for _, p := range state.Processes {
		for plane, address := range map[string]string{"api": p.API, "votes": p.Votes, "raft": p.Raft, "gossip": p.Gossip} {
			if address == "" {
				continue
			}
			streams++
			name := p.Name + " " + plane
			for _, alpn := range []string{"h2", "headlease-" + plane, ""} {
				if err := speak(address, alpn, foreign); err == nil {
					t.Errorf("%s: answered a certificate of a foreign authority (ALPN %q)", name, alpn)
				}
			}
			if answer := plain(t, address); len(answer) > 0 && answer[0] != 0x15 {
				t.Errorf("%s: answered plain text with %q", name, answer)
			}
			if err := health(t, address, insecure.NewCredentials()); err == nil {
				t.Errorf("%s: served gRPC in plain text", name)
			}
		}
		if answer := datagram(t, p.Gossip); len(answer) > 0 {
			t.Errorf("%s gossip: answered a plain datagram with %x", p.Name, answer)
		}
	}
	if streams != 3*4+2 {
		t.Errorf("dev.json has %d addresses, want %d", streams, 3*4+2)
	}
	// The same questions with the cluster's own certificate are answered, so
	// the refusals above are refusals.
	api := state.Processes[0].API
	creds := credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{own}, RootCAs: trusted, NextProtos: []string{"h2"},
		InsecureSkipVerify: true, // names are URIs here; the point is that the server takes us
	})
	if err := health(t, api, creds); err != nil {
		t.Errorf("%s: did not answer the admin: %v", api, err)
	}
}

// foreignPair is an admin's pair of another authority with the same cluster
// name.
func foreignPair(t *testing.T, cluster string) tls.Certificate {
	t.Helper()
	dir := t.TempDir()
	if _, err := pki.Generate(pki.Config{Dir: dir, Cluster: cluster, Identities: []pki.Identity{{Role: pki.RoleAdmin}}}); err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(dir+"/admin.crt", dir+"/admin.key")
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// speak shakes hands with a stranger's certificate and waits for a byte. A TLS
// 1.3 client learns of its refusal with the first read only.
func speak(address, alpn string, pair tls.Certificate) error {
	cfg := &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, InsecureSkipVerify: true}
	if alpn != "" {
		cfg.NextProtos = []string{alpn}
	}
	conn, err := tls.DialWithDialer(&net.Dialer{Timeout: 2 * time.Second}, "tcp", address, cfg)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
	_, err = conn.Read(make([]byte, 1))
	return err
}

func plain(t *testing.T, address string) []byte {
	t.Helper()
	conn, err := net.DialTimeout("tcp", address, 2*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Second))
	if _, err := conn.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")); err != nil {
		return nil
	}
	answer, err := io.ReadAll(conn)
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Logf("%s: %v", address, err)
	}
	return answer
}

func health(t *testing.T, address string, creds credentials.TransportCredentials) error {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err = healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
	return err
}

// datagram sends a memberlist ping in plain text and returns the answer.
func datagram(t *testing.T, address string) []byte {
	t.Helper()
	conn, err := net.Dial("udp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("\x00\x82\xa5SeqNo\x01\xa4Node\xa1x")); err != nil {
		t.Fatal(err)
	}
	_ = conn.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
	buf := make([]byte, 1500)
	n, _ := conn.Read(buf)
	return buf[:n]
}
