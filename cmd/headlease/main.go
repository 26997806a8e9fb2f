// Headlease runs every role of a cluster and is its operator's tool; see
// headlease --help.
package main

import "os"

func main() { os.Exit(execute(os.Args[1:], os.Stdout, os.Stderr)) }
