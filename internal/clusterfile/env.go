package clusterfile

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/v2"
)

const (
	envPrefix = "HEADLEASE_"
	envSep    = "__"
)

// structured keys are written as YAML in a variable; all others are text.
var structured = []string{"shards", "allow_even_witnesses", "regions", "witnesses", "partitions", "servers", "limits", "in_flight", "rate", "burst", "cache", "addresses", "tls"}

// overlay puts the environment's keys over the file's.
func overlay(k *koanf.Koanf, environ []string) (warnings []string, faults []Fault) {
	vars := slices.Clone(environ)
	slices.Sort(vars) // so that the order of faults does not depend on the caller's
	vars = slices.DeleteFunc(vars, func(kv string) bool {
		name, value, _ := strings.Cut(kv, "=")
		rest, ours := strings.CutPrefix(name, envPrefix)
		if !ours || value == "" {
			return true
		}
		top, _, deep := strings.Cut(rest, envSep)
		if !slices.Contains(topKeys, strings.ToLower(top)) {
			if near := nearest(strings.ToLower(top), topKeys); near != "" {
				warnings = append(warnings, fmt.Sprintf("%s names no key; did you mean %s%s?", name, envPrefix, strings.ToUpper(near)))
			}
			return true
		}
		if deep && slices.ContainsFunc(environ, func(o string) bool {
			return strings.HasPrefix(o, envPrefix+top+"=") && !strings.HasSuffix(o, "=")
		}) {
			faults = append(faults, Fault{Problem: fmt.Sprintf("%s and %s%s are both set; set the whole or its parts", name, envPrefix, top)})
			return true
		}
		return false
	})
	provider := env.Provider("\x00", env.Opt{
		Prefix:      envPrefix,
		EnvironFunc: func() []string { return vars },
		TransformFunc: func(name, value string) (string, any) {
			path := strings.Split(strings.ToLower(strings.TrimPrefix(name, envPrefix)), envSep)
			v, err := envValue(path, value)
			if err != nil {
				faults = append(faults, Fault{Problem: fmt.Sprintf("%s=%q: %v", name, value, err)})
				return "", nil
			}
			return strings.Join(path, "\x00"), v
		},
	})
	err := k.Load(provider, nil, koanf.WithMergeFunc(func(src, dest map[string]any) error {
		for _, key := range sortedKeys(src) {
			v, err := over(dest[key], src[key])
			if err != nil {
				faults = append(faults, Fault{Problem: envPrefix + strings.ToUpper(key) + err.Error()})
				continue
			}
			dest[key] = v
		}
		return nil
	}))
	if err != nil {
		faults = append(faults, Fault{Problem: "environment: " + err.Error()})
	}
	return warnings, faults
}

// envValue gives a variable's text the type that its key wants.
func envValue(path []string, value string) (any, error) {
	key := path[len(path)-1]
	if _, err := strconv.Atoi(key); err == nil && len(path) > 1 { // an item of a list
		key = path[len(path)-2]
	}
	inPartition := path[0] == "partitions" && len(path) == 3
	switch {
	case inPartition && path[2] == "shards":
		return value, nil
	case inPartition && path[2] == "prefer":
		var list []any
		for name := range strings.SplitSeq(strings.Trim(value, "[] "), ",") {
			list = append(list, strings.TrimSpace(name))
		}
		return list, nil
	case !slices.Contains(structured, key):
		return value, nil
	}
	doc, err := yaml.Parser().Unmarshal([]byte("v: " + value))
	if err != nil || len(doc) != 1 {
		return nil, fmt.Errorf("not YAML; write the value as in the file, on one line")
	}
	return doc["v"], nil
}

// over lays src, from the environment, over dest, from the file: mappings by
// key, lists by position.
func over(dest, src any) (any, error) {
	parts, ok := src.(map[string]any)
	if !ok {
		return src, nil
	}
	switch d := dest.(type) {
	case map[string]any:
		for _, key := range sortedKeys(parts) {
			v, err := over(d[key], parts[key])
			if err != nil {
				return nil, fmt.Errorf("%s%s%w", envSep, strings.ToUpper(key), err)
			}
			d[key] = v
		}
		return d, nil
	case []any, nil:
		list, _ := d.([]any)
		keys := sortedKeys(parts)
		if d == nil && !slices.ContainsFunc(keys, isNumber) {
			return parts, nil
		}
		slices.SortStableFunc(keys, func(a, b string) int { return position(a) - position(b) })
		for _, key := range keys {
			i := position(key)
			if i < 0 || i > len(list) {
				return nil, fmt.Errorf("%s%s: no such place; the list has %d, use 0 to %d", envSep, strings.ToUpper(key), len(list), len(list))
			}
			if i == len(list) {
				list = append(list, nil)
			}
			v, err := over(list[i], parts[key])
			if err != nil {
				return nil, fmt.Errorf("%s%s%w", envSep, key, err)
			}
			list[i] = v
		}
		return list, nil
	default:
		return nil, fmt.Errorf(": sets a part of %s, which has none", show(dest))
	}
}

func isNumber(s string) bool { return position(s) >= 0 }

func position(s string) int {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return -1
	}
	return int(n)
}

func sortedKeys(m map[string]any) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
