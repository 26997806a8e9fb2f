// Package explore searches the interleavings of the parts that decide who may
// believe in a lease, as they ship: region/lessor, client/validity and
// region/state. All of it is test code; run it with
//
//	go test -v ./region/lessor/explore
//
// The world is that of spec/lease.pml: one region, one partition, one exclusive
// resource, two sessions that may each hold or wait, and two server slots, the
// leader and a stale one that has not noticed. A leader changes at any step.
// Commands in flight (expiry, revocation, its end) are committed before the new
// leader's tables are built, or are lost; a stale leader goes on sending what
// it may. Each session has a stream to each slot that keeps its order, delays
// as it likes and may break; answers to Acquire have a channel of their own;
// keepalives come at any time; releases are late or lost. The head lease may
// run out, be taken by another region, dropped and won back under a new epoch.
// The two slots may share a session's stream, as a server carries it from one
// leader to the next; a lease may name a lock delay, and a request how long it
// waits. The leader's clock may have a gap (it ran on while the process stood
// still, it jumped ahead, it stood still itself): the leader begins anew in its
// term, and ends its streams.
//
// In every state it asserts that
//   - at most one session believes that it holds the resource (I4);
//   - a believer's session lives, and the head lease runs (I3);
//   - whoever believes in a token holds it in the state machine: no lease that
//     was released, expired, revoked or dropped comes back to life;
//   - tokens rise with each grant (I2);
//   - nobody is granted the resource within a lock delay (I6), and no wait ends
//     before its time.
//
// The search is breadth first over states in a canonical form (instants as
// time left, so that it is finite), in slices that leave actions out to get
// deep enough, as spec/README.md does. A slice either is complete, that is
// every reachable state was seen, or stops at its limit of states, and says
// which.
//
// Not explored, but tested beside the packages: gaps of a client's clock, gaps
// that are noticed late, drift, several resources and partitions in one session,
// batches of expiries, planned drains, cancelled requests, and the client's Poll
// (it only ends beliefs).
//
// Each seeded bug breaks one rule by wrapping the parts (nothing in the shipped
// code knows of it) and must be caught, or the test fails. Seeded random walks
// with everything switched on go deep where the search goes wide.
//
// -explore.time=10m searches for that long in all instead of to the limits,
// -explore.factor=N multiplies the limits, -explore.trace prints the
// counterexamples.
package explore
