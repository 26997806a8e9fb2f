package main

import "github.com/headlease/headlease/drill/worker"

// freezeProcess stops this process and returns after its SIGCONT.
func freezeProcess() error { return worker.Freeze() }
