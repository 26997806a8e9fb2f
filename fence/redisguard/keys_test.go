package redisguard

import (
	"errors"
	"testing"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"
)

func TestTag(t *testing.T) {
	// The examples of the Redis Cluster specification, and some.
	for key, want := range map[string]string{
		"{user1000}.following": "user1000", "foo{}{bar}": "foo{}{bar}", "foo{{bar}}zap": "{bar",
		"foo{bar}{zap}": "bar", "plain": "plain", "a{b": "a{b", "a}b{c}": "c", "": "",
	} {
		if got := Tag(key); got != want {
			t.Errorf("Tag(%q) = %q, want %q", key, got, want)
		}
	}
}

func TestKeysOfAnotherSlotAreRefused(t *testing.T) {
	c := redis.NewClient(&redis.Options{})
	t.Cleanup(func() { c.Close() })
	g, err := New(c, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		resource, key string
		slot          bool // refused for its slot
		other         bool // refused for another reason
	}{
		{resource: "orders/7", key: "{orders/7}:total"},
		{resource: "orders/7", key: "orders/7"},
		{resource: "a{u}b", key: "x{u}"},
		{resource: "orders/7", key: "orders/7:total", slot: true},
		{resource: "orders/7", key: "{orders/8}:total", slot: true},
		{resource: "orders/7", key: "{}orders/7", slot: true},
		{resource: "orders/7", key: "headlease:mark:{orders/7}:orders/7", other: true},
		{resource: "", key: "k", other: true},
		{resource: "a{b", key: "a{b", other: true},
		{resource: "a}b", key: "a}b", other: true},
		{resource: "{}a", key: "{}a", other: true},
		{resource: string(make([]byte, MaxResource+1)), key: "k", other: true},
	} {
		_, err := g.MarkKey(tc.resource, tc.key)
		var slot *SlotError
		if errors.As(err, &slot) != tc.slot || (err != nil) != (tc.slot || tc.other) {
			t.Errorf("key %q of %q: %v", tc.key, tc.resource, err)
		}
	}
}

func TestMarksAreBesideTheirDataAndDistinct(t *testing.T) {
	c := redis.NewClient(&redis.Options{})
	t.Cleanup(func() { c.Close() })
	g, err := New(c, Options{})
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		names := rapid.StringOfN(rapid.RuneFrom([]rune("{}:a")), 1, 8, -1)
		a, b := names.Draw(t, "a"), names.Draw(t, "b")
		markA, errA := g.MarkKey(a)
		markB, errB := g.MarkKey(b)
		if errA == nil && errB == nil && (markA == markB) != (a == b) {
			t.Fatalf("marks of %q and %q: %q, %q", a, b, markA, markB)
		}
		if errA != nil {
			return
		}
		if Tag(markA) != Tag(a) {
			t.Fatalf("mark %q of %q has tag %q", markA, a, Tag(markA))
		}
		key, err := Key(a, b)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := g.MarkKey(a, key); err != nil {
			t.Fatalf("Key(%q, %q) = %q: %v", a, b, key, err)
		}
	})
}
