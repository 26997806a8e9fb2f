// Headlease-witness is the witness alone: small, static, without Raft. It is
// `headlease witness` as a program of its own.
package main

import (
	"os"

	"github.com/headlease/headlease/witness/command"
)

func main() {
	stop := stayLean()
	code := command.Main(os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
