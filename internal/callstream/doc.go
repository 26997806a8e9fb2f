// Package callstream carries short unary gRPC calls over one stream per
// connection (proto/headlease/v1/call.proto). gRPC begins and ends a stream,
// with headers both ways, for every unary call; for a grant that was more than
// half of what it cost the leader (docs/decisions/0065).
//
// Callers and services do not see it. DialOption is a client interceptor: it
// takes the calls of chosen methods, and gives to gRPC what does not fit, and
// everything when the server does not have the service. Server dispatches to
// the handlers that the gRPC server has, through the same interceptors, so that
// policy, admission, forwarding and metrics hold for each call.
//
// As with gRPC itself, a call fails with UNAVAILABLE when its stream breaks,
// and may have been done.
//
// Threads: a client's stream has one goroutine, its reader, which ends with the
// stream, at the latest when the connection is closed; when much is unanswered,
// one more that sends. A server has one goroutine per call, of which a
// few wait for the stream's next calls; Calls returns after the last of them.
package callstream
