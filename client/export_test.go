package client

// MoveCalls has the calls in a region go to its next server, as when one has
// failed; the stream stays.
func (c *Client) MoveCalls(region string) {
	conns := c.regions[region].conns
	if x, err := conns.current(); err == nil {
		conns.leave(x, false)
	}
}
