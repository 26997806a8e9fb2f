package redisguard

import (
	"context"
	"errors"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/fencetest"
)

type data struct {
	*Guard
	client *redis.Client
}

func (d data) Write(ctx context.Context, resource string, token fence.Token, value string) error {
	key, err := Key(resource, "value")
	if err != nil {
		return err
	}
	return d.Set(ctx, resource, token, key, value, 0)
}

func (d data) Value(ctx context.Context, resource string) (string, error) {
	key, err := Key(resource, "value")
	if err != nil {
		return "", err
	}
	text, err := d.client.Get(ctx, key).Result()
	if errors.Is(err, redis.Nil) {
		return "", nil
	}
	return text, err
}

func TestGuardAgainstTheCommonModel(t *testing.T) {
	s := startServer(t)
	g, c := s.guard(Options{})
	fencetest.Run(t, data{g, c}, "lock/")
}
