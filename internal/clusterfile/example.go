package clusterfile

import _ "embed"

//go:embed example.yaml
var example string

// Example returns a commented cluster file that is good as it stands.
func Example() string { return example }
