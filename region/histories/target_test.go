package histories

import "fmt"

// target is what clients contend for: a lock, or any slot of a semaphore.
type target struct {
	name  string
	slots uint32 // 0: a lock
}

func (t target) slot(i int) string { return fmt.Sprintf("%s#%d", t.name, i) }

// names are the resources that can be held.
func (t target) names() []string {
	if t.slots == 0 {
		return []string{t.name}
	}
	var out []string
	for i := range int(t.slots) {
		out = append(out, t.slot(i))
	}
	return out
}

// targets are n, one of them a semaphore of two slots.
func targets(n int) []target {
	out := []target{{"lock/slots", 2}}
	for i := range n - 1 {
		out = append(out, target{name: fmt.Sprintf("lock/%c", 'a'+i)})
	}
	return out
}

func allNames(of []target) []string {
	var out []string
	for _, t := range of {
		out = append(out, t.names()...)
	}
	return out
}
