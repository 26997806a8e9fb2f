package cache

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// ServerConfig says where a region's Redis is.
type ServerConfig struct {
	// Addresses are host:port, or the path of a unix socket: of the one server, of nodes of the
	// cluster, or of the sentinels.
	Addresses []string
	// Cluster: the servers are a Redis Cluster.
	Cluster bool
	// Master is the name under which sentinels watch the server; not with Cluster.
	Master string
	// Username of the ACL; empty: the default user.
	Username string
	// PasswordFile is read at each connection, so that a new password needs no restart;
	// empty: no password.
	PasswordFile string
	// TLS is used, and CAFile, if given, trusted instead of the system's roots.
	TLS    bool
	CAFile string
}

// Validate reports all faults at once.
func (c ServerConfig) Validate() error {
	var errs []error
	if len(c.Addresses) == 0 {
		errs = append(errs, errors.New("addresses: none given; name the Redis server as host:port"))
	}
	if c.Cluster && c.Master != "" {
		errs = append(errs, errors.New("master: is for sentinels, and cluster is set; leave one of them out"))
	}
	if len(c.Addresses) > 1 && !c.Cluster && c.Master == "" {
		errs = append(errs, errors.New("addresses: several are given; set cluster: true for a Redis Cluster, or master for sentinels"))
	}
	if c.CAFile != "" && !c.TLS {
		errs = append(errs, errors.New("ca_file: is given without tls; set tls: true"))
	}
	return errors.Join(errs...)
}

// Client returns a client of the server, with short timeouts and no retries:
// whoever uses a hint goes without it rather than wait. connected may be nil; it
// is called at every new connection to the server, and may be at one to a sentinel.
func (c ServerConfig) Client(timeout time.Duration, connected func(context.Context, *redis.Conn) error) (redis.UniversalClient, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	o := &redis.UniversalOptions{
		Addrs: c.Addresses, IsClusterMode: c.Cluster, MasterName: c.Master, Username: c.Username,
		OnConnect: connected, ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		DialTimeout:              timeout, ReadTimeout: timeout, WriteTimeout: timeout, PoolTimeout: timeout, ConnMaxIdleTime: -1,
	}
	if c.Cluster {
		o.MaxRedirects = 3
	}
	if c.Master != "" && connected != nil {
		// go-redis calls it for its connections to sentinels too, which know but a few commands.
		o.OnConnect = func(ctx context.Context, cn *redis.Conn) error {
			if err := connected(ctx, cn); !redis.HasErrorPrefix(err, "unknown command") {
				return err
			}
			return nil
		}
	}
	if c.PasswordFile != "" {
		o.CredentialsProviderContext = func(context.Context) (string, string, error) {
			password, err := os.ReadFile(c.PasswordFile)
			if err != nil {
				return "", "", fmt.Errorf("password_file: %w", err)
			}
			return c.Username, strings.TrimRight(string(password), "\r\n"), nil
		}
	}
	if c.TLS {
		o.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12}
		if c.CAFile != "" {
			pem, err := os.ReadFile(c.CAFile)
			if err != nil {
				return nil, fmt.Errorf("ca_file: %w", err)
			}
			o.TLSConfig.RootCAs = x509.NewCertPool()
			if !o.TLSConfig.RootCAs.AppendCertsFromPEM(pem) {
				return nil, fmt.Errorf("ca_file: %s has no certificate in PEM", c.CAFile)
			}
		}
	}
	return redis.NewUniversalClient(o), nil
}
