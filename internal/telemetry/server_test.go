package telemetry_test

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/headlease/headlease/internal/telemetry"
)

func config(address string) telemetry.ServerConfig {
	return telemetry.ServerConfig{
		Address: address, Gatherer: telemetry.NewRegistry("test"), Ready: func(context.Context) error { return nil },
	}
}

// An address in use is an error that names the setting and the address.
func TestListenOnAnOccupiedPort(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	_, err = telemetry.Listen(t.Context(), config(taken.Addr().String()))
	if err == nil || !strings.Contains(err.Error(), "metrics") || !strings.Contains(err.Error(), taken.Addr().String()) {
		t.Errorf("error %v does not name metrics and the address", err)
	}
}

// A process that stops is not ready before it is gone.
func TestNotReadyWhileStopping(t *testing.T) {
	s, err := telemetry.Listen(t.Context(), config("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	background(t, s.Serve)
	at := s.Addr().String()
	get(t, at, "/readyz", 200)
	s.Stopping()
	if body := get(t, at, "/readyz", 503); !strings.Contains(body, "stopping") {
		t.Errorf("body %q does not say why", body)
	}
	get(t, at, "/healthz", 200)
}

func TestListenOnASocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m")
	s, err := telemetry.Listen(t.Context(), config("unix:"+path))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	if s.Addr().String() != path {
		t.Errorf("listens at %s", s.Addr())
	}
}
