// Command etcd is the etcd server of the version in go.mod, for comparison: built
// from its Go module, apart from the harness, whose dependencies it must not move.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
