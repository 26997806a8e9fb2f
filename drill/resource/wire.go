package resource

import "github.com/headlease/headlease/fence"

// Paths of the HTTP interface. All bodies are JSON.
const (
	// PathClaim takes POST of a Request without value, answers an Entry.
	PathClaim = "/claim"
	// PathWrite takes POST of a Request, answers an Entry.
	PathWrite = "/write"
	// PathValue answers GET ?resource=NAME with a Value.
	PathValue = "/value"
	// PathJournal answers GET with all entries, one JSON line each.
	PathJournal = "/journal"
	// PathHealth answers GET with 200 while the resource serves.
	PathHealth = "/healthz"
)

// Request is a claim or a write.
type Request struct {
	Resource string      `json:"resource"`
	Token    fence.Token `json:"token"`
	// Writer names who asks, for the journal alone.
	Writer string `json:"writer"`
	Value  string `json:"value,omitempty"`
}

// Value is what a resource holds.
type Value struct {
	Resource string      `json:"resource"`
	Mark     fence.Token `json:"mark"`
	// Written is the newest accepted write; absent if there is none.
	Written *Entry `json:"written,omitempty"`
}

// problem is the body of an answer that is no Entry.
type problem struct {
	Error string `json:"error"`
}
