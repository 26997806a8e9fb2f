// Package api is a region server's gRPC face: sessions, leases, the cluster and
// votes. Any server takes any call: what only the leader can answer is
// forwarded to it, once, with the caller's identity ([Forwarder]).
//
// One table ([Policy]) says for every method how long it may take, how large
// its request may be and who may call it; a served method without an entry
// stops the start. Refusals are typed ([DetailError]) and name the next step.
//
// One Acquire: policy → forward → [Leases.Acquire] → replica (commit) →
// lessor (validity, computed when answering) → reply.
package api
