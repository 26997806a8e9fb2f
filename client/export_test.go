package client

import "time"

// LoadDice has the client's pauses take f's times in the place of random ones.
func (c *Config) LoadDice(f func(n time.Duration) time.Duration) { c.random = f }

// MoveCalls has the calls in a region go to its next server, as when one has
// failed; the stream stays.
func (c *Client) MoveCalls(region string) {
	conns := c.regions[region].conns
	if x, err := conns.current(); err == nil {
		conns.leave(x, false)
	}
}

// Move counts moves from one server of the region to the next.
func (c *Client) Move(region string, n int) {
	for range n {
		c.regions[region].moved()
	}
}

// Connected are the servers of a region to which there are connections.
func (c *Client) Connected(region string) (names []string) {
	conns := c.regions[region].conns
	conns.mu.Lock()
	defer conns.mu.Unlock()
	for i, x := range conns.open {
		if x != nil {
			names = append(names, conns.servers[i].Name)
		}
	}
	return names
}
