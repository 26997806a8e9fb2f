// Package regiontest runs regions in a test: the shipped state machine, lessor,
// services and forwarding, behind gRPC over connections in memory, on a Raft
// double whose Propose applies at once. There is no other part of a region:
// no log, no votes, no head lease but the one that the test gives.
//
// It is made for testing/synctest: everything blocks durably and nothing spins,
// so hours of lease time pass in milliseconds. Build the network, the regions
// and the clients inside the bubble.
//
//	synctest.Test(t, func(t *testing.T) {
//		n := regiontest.NewNetwork(t)
//		eu := n.Region(regiontest.Config{Name: "eu"})
//		eu.Own(1)
//		c, err := client.New(client.Config{Regions: n.Regions(), Links: n.Links("alice")})
//		...
//	})
//
// # Faults
//
// Messages can be delayed, a server frozen (its connections stay open, nothing
// passes) or killed, leadership moved or withheld, the head lease lapsed.
package regiontest
