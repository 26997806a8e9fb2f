// Package version is what this build calls itself.
package version

import (
	"runtime"
	"runtime/debug"
)

// release is set by the linker for released builds.
var release string

// Info is what is known of a build.
type Info struct {
	// Version is the release, the module's version, or "devel".
	Version string `json:"version"`
	// Commit of the source, with "+changes" if the tree had some; empty if
	// the build was not stamped.
	Commit string `json:"commit,omitempty"`
	Go     string `json:"go"`
	OS     string `json:"os"`
	Arch   string `json:"arch"`
}

// Get reads the build's information.
func Get() Info {
	bi, _ := debug.ReadBuildInfo()
	return describe(release, bi)
}

// String is the version alone, as it goes over the wire.
func String() string { return Get().Version }

func describe(release string, bi *debug.BuildInfo) Info {
	info := Info{Version: "devel", Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
	if bi != nil {
		if v := bi.Main.Version; v != "" && v != "(devel)" {
			info.Version = v
		}
		changed := false
		for _, s := range bi.Settings {
			switch s.Key {
			case "vcs.revision":
				info.Commit = s.Value
			case "vcs.modified":
				changed = s.Value == "true"
			}
		}
		if info.Commit != "" && changed {
			info.Commit += "+changes"
		}
	}
	if release != "" {
		info.Version = release
	}
	return info
}
