package version

import (
	"runtime/debug"
	"testing"
)

func TestDescribe(t *testing.T) {
	stamped := &debug.BuildInfo{Settings: []debug.BuildSetting{{Key: "vcs.revision", Value: "abc"}, {Key: "vcs.modified", Value: "true"}}}
	stamped.Main.Version = "(devel)"
	installed := &debug.BuildInfo{}
	installed.Main.Version = "v1.2.3"
	for name, c := range map[string]struct {
		release         string
		bi              *debug.BuildInfo
		version, commit string
	}{
		"nothing known": {"", nil, "devel", ""},
		"built":         {"", stamped, "devel", "abc+changes"},
		"installed":     {"", installed, "v1.2.3", ""},
		"released":      {"v2.0.0", stamped, "v2.0.0", "abc+changes"},
	} {
		if got := describe(c.release, c.bi); got.Version != c.version || got.Commit != c.commit || got.Go == "" {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if String() == "" {
		t.Error("no version")
	}
}
