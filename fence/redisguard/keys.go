package redisguard

import (
	"fmt"
	"strings"
)

// MaxResource bounds a resource's name, in bytes.
const MaxResource = 1024

// SlotError refuses a key that Redis Cluster would not keep beside the mark.
type SlotError struct {
	Resource, Key string
	// Want is the hash tag of the resource, Have that of the key.
	Want, Have string
}

func (e *SlotError) Error() string {
	return fmt.Sprintf("key %q of a guarded write to %s: its hash tag is %q and the mark's is %q, so that one script cannot reach both; put {%s} into the key",
		e.Key, e.Resource, e.Have, e.Want, e.Want)
}

// Tag returns the part of a key that Redis Cluster hashes: between the first
// "{" and the next "}" if that is not empty, else the whole key.
func Tag(key string) string {
	if _, after, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(after, "}"); ok && tag != "" {
			return tag
		}
	}
	return key
}

// Key returns a data key with the resource's hash tag: "{tag}:name".
func Key(resource, name string) (string, error) {
	tag, err := tagOf(resource)
	if err != nil {
		return "", err
	}
	return "{" + tag + "}:" + name, nil
}

// MarkKey returns the key of the resource's mark, after checking that the data
// keys may be written under it: a *SlotError names the first with another hash
// tag, and keys of marks are refused.
func (g *Guard) MarkKey(resource string, keys ...string) (string, error) {
	tag, err := tagOf(resource)
	if err != nil {
		return "", err
	}
	for _, key := range keys {
		if have := Tag(key); have != tag {
			return "", &SlotError{Resource: resource, Key: key, Want: tag, Have: have}
		}
		if strings.HasPrefix(key, g.opts.KeyPrefix) {
			return "", fmt.Errorf("key %q of a guarded write to %s: begins with %q, which is for marks; choose another name or KeyPrefix",
				key, resource, g.opts.KeyPrefix)
		}
	}
	// Two resources never have one mark: the prefix has no brace and the tag
	// no "}", so the resource is what follows the first "}:".
	return g.opts.KeyPrefix + "{" + tag + "}:" + resource, nil
}

// tagOf returns the hash tag of a resource's mark and data.
func tagOf(resource string) (string, error) {
	if resource == "" || len(resource) > MaxResource {
		return "", fmt.Errorf("resource of a guarded write: has %d bytes; 1 to %d are allowed", len(resource), MaxResource)
	}
	tag := Tag(resource)
	if strings.Contains(tag, "}") || tag == resource && strings.Contains(tag, "{") {
		// In braces of its own such a name would hash to something else.
		return "", fmt.Errorf("resource %q of a guarded write: has braces and no hash tag; write {tag} or no braces", resource)
	}
	return tag, nil
}
