package replica

import (
	"encoding/json"
	"fmt"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/headlease/headlease/region/state"
)

// dump is all that a View shows, but for what goes on by itself (pulses and
// terms).
func dump(t testing.TB, v state.View) []byte {
	t.Helper()
	d := map[string]any{
		"region": v.Region(), "incarnation": uint64(v.Incarnation()), "ballot_round": v.BallotRound(), "counts": counts(v.Counts()),
	}
	configuration, err := protojson.Marshal(v.Configuration())
	if err != nil {
		t.Fatal(err)
	}
	d["configuration"] = json.RawMessage(configuration)
	var partitions, sessions, leases, waiters, voters []any
	for p := range v.Partitions() {
		record, err := protojson.Marshal(p.Register.Proto())
		if err != nil {
			t.Fatal(err)
		}
		partitions = append(partitions, map[string]any{
			"name": p.Name, "epoch": p.Epoch, "seq": p.Seq, "phase": p.Phase.String(), "dropped": p.Dropped, "register": json.RawMessage(record),
		})
	}
	for s := range v.Sessions() {
		sessions = append(sessions, map[string]any{
			"id": s.ID, "secret": s.SecretHash, "ttl": s.TTLMillis, "identity": s.Identity, "labels": s.Labels,
			"lowest": s.LowestOpen, "closing": s.Closing, "held": s.Held, "waiting": s.Waiting,
		})
	}
	for l := range v.Leases() {
		leases = append(leases, map[string]any{
			"resource": l.Resource, "partition": l.Partition, "session": l.Session, "holder": l.Holder, "token": uint64(l.Token),
			"request": l.Request, "offered": l.Offered, "revoked": l.Revoked, "reason": l.RevokeReason, "waiters": l.Waiters,
		})
		for w := range v.Waiters(l.Resource) {
			waiters = append(waiters, map[string]any{"resource": w.Resource, "partition": w.Partition, "session": w.Session, "request": w.Request})
		}
	}
	for r := range v.Voters() {
		voters = append(voters, map[string]any{"id": r.ID, "incarnation": uint64(r.Incarnation), "life": r.Life, "writes": r.Writes})
	}
	d["partitions"], d["sessions"], d["leases"], d["waiters"], d["voters"] = partitions, sessions, leases, waiters, voters
	out, err := json.MarshalIndent(d, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return append(out, '\n')
}

// counts are those that the first version had: what a later one counts besides
// is zero in its data.
func counts(c state.Counts) string {
	return fmt.Sprintf("{Sessions:%d Leases:%d Waiters:%d Resources:%d Closing:%d}", c.Sessions, c.Leases, c.Waiters, c.Resources, c.Closing)
}
