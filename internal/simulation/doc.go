// Package simulation has no code of its own: its tests run whole clusters in
// virtual time, replayable bit for bit from a seed, and look at the invariants
// of the design after every step.
//
// # What runs
//
// The shipped pure cores: a voter's judgement (global/register), proposers
// (global/campaign), every region's state machine (region/state), the decision on
// configurations and the steps of an operator (global/config,
// global/reconfigure), failure detectors (detector/phi), and in a third of the
// worlds the leaders' tables of sessions and leases (region/lessor) and clients
// that believe (client/validity). What the shells do between them is done here
// in their place, by one thread and one queue of events; messages are Go values,
// so nothing is encoded.
//
// A region's Raft group is one state machine and whoever leads: what the leader
// proposes is committed a little later, in order, while it leads and the region
// has a quorum whose disks move. At a change of leader each open proposal was
// committed before, is lost, or comes late, under the next term. A deposed leader
// goes on until it notices.
//
// # Worlds
//
// 2 to 5 regions, 1 to 5 witnesses (more over time, by replacements), 1 to 64
// partitions, D from 1 s to 10 s, one-way delays up to 100 ms; each process has a
// clock of its own at a rate within ±ρ, half of them at the bound. Messages are
// lost, doubled, late, and overtake each other.
//
// # Faults
//
// Cuts, full and one-way, of a pair, of a site, of all but a minority, of all but
// a chain; links that flap, are slow or lossy; leaders that change, are frozen,
// or stand still with their clock; regions that lose their quorum, or whose disks
// hang, or that lose all their data; witnesses that crash, freeze, are slow, are
// wiped; detectors that are wrong; campaigns in a hurry; planned transfers, some
// aborted, with the drain that the lessor makes of them; changes of the
// configuration, and replacements of what was wiped, whose operator may die at any
// point. They come in bursts, with quiet times between.
//
// Votes go over connections, and a connection needs both directions: where no
// acknowledgement comes back, a one-way cut stops votes after 2 s. I7 rests on
// that: by datagrams, an owner that is heard and hears nobody would go on
// renewing.
//
// # Checks
//
// I1, I2, I3, I4 and I7 as in docs/design.md, §7, and: one value per ballot; one
// configuration per version; no epoch is held after its Drop, nor dropped while a
// leader holds it; no grant passes a drain, and nobody believes in a lease of what
// has drained [F26]; a Prepare, but for an owner's release and its successor's, is
// preceded by a dry one that a majority would grant [F31]; one message per voter serves all partitions [F38]; who is refused does
// not ask all the time [F39]. I7 is looked at whenever nothing has changed for
// as long as it allows.
//
// # What is not simulated
//
// A voter whose disk is rolled back ([F5]; docs/decisions/0151 says why), eras and
// force-quorum [F16], restored regions [F4], sizes of messages, and connections
// [F50]. docs/testing.md says which tests show those.
//
// # Running
//
//	go test ./internal/simulation                      # the share of `make test`
//	make sim SEED=7                                    # one world again
//	make sim HOURS=300                                 # many
//
// A failure prints its seed and the tail of its trace. Mutants (testdata/mutants)
// are the test of these tests; make mutants-sim runs them all.
package simulation
