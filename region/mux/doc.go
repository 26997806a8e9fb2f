// Package mux gives the Attach streams of a server's clients to the leader of
// the region: to the lessor of this process when this server leads, otherwise
// over one stream to the leader that carries all of them [F41]. A client's
// stream lives as long as its server and its connection to it do; leaders come
// and go behind it.
//
// # Order [L5]
//
// To a client, the messages of one leader's term on one stream are a unit: they
// begin with a complete ack for each session, keep the order in which the lessor
// decided them, and end where a message of a later term begins. So a client's
// stream may go on under the leader of a later term: the first ack of each
// session names all again, and what was lost of the former term is lost with a
// stream that is over. It may not go on in the term in which something of it
// may be lost: when the stream to a leader breaks and the same term answers
// again, those of the clients' streams to which something of that term was
// passed on are ended, and their clients attach anew.
//
// # Re-attaching
//
// An Edge keeps the newest keepalive of each session per client stream, with its
// secret, and repeats it to a new leader, so that the leader's first ack reaches
// the client without a word from it. That extends no session's life by more than
// the new term itself did, and can only make what a client maps shorter: its
// clock was read before that keepalive was first sent.
//
// # Bounds
//
// Nothing waits for a client. Keepalives of one session replace each other;
// sessions per client stream, messages per client, messages per mux and client
// streams are bounded; a client that reads too slowly is ended alone. A mux that
// is not read ends, and its leader is asked for a new one. The server ends a mux
// on which it has heard nothing for a while, a frozen leader's, by itself. Clients
// without a leader are told so after a while, a few at a time.
//
// # Threads
//
// [Edge.Run] follows the leadership and owns the goroutines of the mux: its
// writer, its reader, and the one that ends many clients. Handlers of Attach
// call [Edge.Open], [Client.Request] and [Client.Next]. [Server.Carry] is the
// leader's side: a reader, and a writer. Locks: the shell's is outermost, then the
// edge's or the outlet's, or a client's; no two of these are held at once.
package mux
