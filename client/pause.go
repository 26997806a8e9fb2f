package client

import (
	"math/rand/v2"
	"time"
)

// giveBackWithin is over how long what is lost together is given back: all clients
// lose what they hold of a partition at the same instant, and hear its region
// again at the same one.
const giveBackWithin = 500 * time.Millisecond

// dice returns a random time of at least nothing and less than n, which is
// positive. What has many clients pause has them all do so at once; none of their
// pauses is without it.
type dice func(n time.Duration) time.Duration

func fairDice(n time.Duration) time.Duration { return rand.N(n) }

// about pause: from half of it to one and a half.
func (d dice) about(pause time.Duration) time.Duration { return pause/2 + d(pause) }

// spread is a pause of about that length, and not under what was asked for: clients
// whose server has died do not come again all at once.
func (d dice) spread(pause, asked time.Duration) time.Duration {
	return max(d.about(pause), asked+d(asked/4+1))
}
