package clusterfile

import (
	"strings"
	"testing"
)

func TestARunningProcessFollowsOnlyItsOwnClustersFile(t *testing.T) {
	parse := func(old, new string) File {
		t.Helper()
		text := strings.Replace(Example(), old, new, 1)
		if text == Example() && old != new {
			t.Fatalf("the example has no %q", old)
		}
		f, _, err := Parse([]byte(text), nil)
		if err != nil {
			t.Fatal(err)
		}
		f.Name = "eu-1"
		return f
	}
	was := parse("", "")
	for _, c := range []struct{ old, new, refused string }{
		{"{name: eu-2, host: 10.1.0.2}", "{name: eu-9, host: 10.1.0.9}", ""},
		{"d: 4s", "d: 5s", ""},
		{"cluster: example", "cluster: other", `cluster: is "other"`},
		{"{name: eu-1, host: 10.1.0.1}", "{name: eu-9, host: 10.1.0.1}", "not in the file"},
		{"{name: eu-1, host: 10.1.0.1}", "{name: eu-1, host: 10.1.0.7}", "restart it"},
	} {
		now := parse(c.old, c.new)
		now.Name = ""
		err := CheckFollow(was, now)
		if (err == nil) != (c.refused == "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s: %v", c.new, err)
		}
	}
}
