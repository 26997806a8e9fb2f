package state

import (
	"fmt"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// setValueOf replaces the value on a held lease. A revoked lease may still be
// believed in by its holder, so it takes one too.
func (m *Machine) setValueOf(c *pb.SetValueCommand) *pb.CommandResult {
	r, e := m.holding(c.GetSessionId(), c.GetResource(), fence.Token(c.GetToken()))
	switch {
	case e != nil:
		return failed(e)
	case len(c.GetValue()) > MaxValue:
		return failed(errValueTooLong(len(c.GetValue())))
	}
	if e := m.roomForValue(len(c.GetValue()), len(r.value)); e != nil {
		return failed(e)
	}
	s, ok := m.sessions.Get(r.session)
	if !ok || s.closing {
		return failed(errSessionExpired(c.GetSessionId()))
	}
	r = m.editResource(r)
	m.changeValue(s, r, string(c.GetValue()))
	return &pb.CommandResult{Kind: &pb.CommandResult_SetValue{SetValue: &pb.SetValueResult{Revision: r.revision}}}
}

// changeValue gives a held, editable resource another value, and says so.
func (m *Machine) changeValue(s *session, r *resource, value string) {
	m.setValue(r, value)
	r.revision = m.revision()
	m.emit(ValueChanged{
		Session: r.session, Resource: r.name, Partition: r.partition, Token: r.token, Holder: s.identity,
		Value: r.value, Revision: r.revision,
	})
}

// setValue gives an editable resource another value.
func (m *Machine) setValue(r *resource, value string) {
	if r.value == value {
		return
	}
	m.valueBytes += int64(len(value)) - int64(len(r.value))
	r.value, r.valueHash = value, valueDigest(value)
}

// roomForValue returns why a value of n bytes cannot take the place of one of
// old bytes, or nil.
func (m *Machine) roomForValue(n, old int) *pb.ErrorDetail {
	if n > old && m.valueBytes+int64(n-old) > MaxValueBytes {
		return errOverloaded(fmt.Sprintf("the values of the region have %d bytes in all, of at most %d; keep them elsewhere and a name here", m.valueBytes, MaxValueBytes))
	}
	return nil
}

func errValueTooLong(n int) *pb.ErrorDetail {
	return errInvalid("value", fmt.Sprintf("%d bytes are too many; use up to %d", n, MaxValue))
}
