// Package wake wakes goroutines that wait for something to do.
package wake

// Up wakes the one goroutine that receives from c, now or when it next does. c has
// room for one element, so that Up never waits and many calls wake once.
func Up(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
