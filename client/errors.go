package client

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Errors to test for with errors.Is. The error itself is an *Error and says
// more.
var (
	// ErrNotOwner: the region does not own the resource's partition.
	ErrNotOwner = errors.New("not owner")
	// ErrLapsed: the region's head lease has run out and may be regained.
	ErrLapsed = errors.New("lapsed")
	// ErrMoved: the partition is being handed to another region.
	ErrMoved = errors.New("moved")
	// ErrSessionExpired: the session has ended, and all its leases with it.
	ErrSessionExpired = errors.New("session expired")
	// ErrNotHolder: the token is not held any more.
	ErrNotHolder = errors.New("not holder")
	// ErrOverloaded: ask again later.
	ErrOverloaded = errors.New("overloaded")
	// ErrStaleRequest: the request was answered or cancelled before. The SDK
	// asks under a new id.
	ErrStaleRequest = errors.New("stale request")
	// ErrWaitEnded: the request waited as long as it had asked to.
	ErrWaitEnded = errors.New("wait ended")
	// ErrInvalid: the request is wrong; asking again does not help.
	ErrInvalid = errors.New("invalid")
	// ErrUnavailable: no server that could decide was reached.
	ErrUnavailable = errors.New("unavailable")
	// ErrDenied: the certificate does not allow this.
	ErrDenied = errors.New("denied")
	// ErrClosed: the client was closed.
	ErrClosed = errors.New("client is closed")
	// ErrBusy: somebody else holds the resource. The error is a *BusyError.
	ErrBusy = errors.New("busy")
	// ErrLost is why a lease's context ended, unless it was released. The
	// cause is a *LostError.
	ErrLost = errors.New("lease lost")
	// ErrReleased is why the context of a released lease ended.
	ErrReleased = errors.New("lease released")
	// ErrLeft is why the contexts ended of a client that has left its sessions.
	ErrLeft = errors.New("client has left; the session lives on for its ttl")
)

// Error is a refusal of the service.
type Error struct {
	Code codes.Code
	Text string
	// Detail is nil when the service gave none.
	Detail *pb.ErrorDetail
}

func (e *Error) Error() string { return e.Text }

// Is makes errors.Is(err, ErrNotOwner) and so on work.
func (e *Error) Is(target error) bool { return e.sentinel() == target }

func (e *Error) sentinel() error {
	switch e.Detail.GetKind().(type) {
	case *pb.ErrorDetail_NotOwner:
		return ErrNotOwner
	case *pb.ErrorDetail_Lapsed:
		return ErrLapsed
	case *pb.ErrorDetail_Moved:
		return ErrMoved
	case *pb.ErrorDetail_SessionExpired:
		return ErrSessionExpired
	case *pb.ErrorDetail_NotHolder:
		return ErrNotHolder
	case *pb.ErrorDetail_Overloaded:
		return ErrOverloaded
	case *pb.ErrorDetail_StaleRequest:
		return ErrStaleRequest
	case *pb.ErrorDetail_WaitEnded:
		return ErrWaitEnded
	case *pb.ErrorDetail_Invalid, *pb.ErrorDetail_Refused, *pb.ErrorDetail_Uninitialised:
		return ErrInvalid
	case *pb.ErrorDetail_NotLeader, *pb.ErrorDetail_WrongTerm:
		return ErrUnavailable
	case *pb.ErrorDetail_OtherCluster:
		return ErrDenied
	}
	switch e.Code {
	case codes.InvalidArgument, codes.FailedPrecondition, codes.Unimplemented, codes.OutOfRange:
		return ErrInvalid
	case codes.PermissionDenied, codes.Unauthenticated:
		return ErrDenied
	case codes.ResourceExhausted:
		return ErrOverloaded
	}
	return ErrUnavailable
}

// retryAfter is how long the service asks to wait, from nothing to a second.
func (e *Error) retryAfter() time.Duration {
	ns := e.Detail.GetLapsed().GetRetryNs()
	if o := e.Detail.GetOverloaded(); o != nil {
		ns = o.GetRetryNs()
	}
	return max(0, min(time.Duration(ns), time.Second))
}

// askedToWait is retryAfter of any error.
func askedToWait(err error) time.Duration {
	if e := (*Error)(nil); errors.As(err, &e) {
		return e.retryAfter()
	}
	return 0
}

// errorOf turns the error of a call into an *Error; the inverse of the
// region's mapping.
func errorOf(err error) error {
	if err == nil {
		return nil
	}
	if e := (*Error)(nil); errors.As(err, &e) {
		return err // of this package, not of a call
	}
	st := status.Convert(err)
	e := &Error{Code: st.Code(), Text: link.Reason(err)}
	for _, d := range st.Details() {
		if detail, ok := d.(*pb.ErrorDetail); ok {
			e.Detail = detail
		}
	}
	return e
}

// errorOfDetail is the error of a detail that came without a text, on the
// stream.
func errorOfDetail(d *pb.ErrorDetail) *Error {
	e := &Error{Code: codes.FailedPrecondition, Detail: d}
	switch k := d.GetKind().(type) {
	case *pb.ErrorDetail_NotOwner:
		e.Text = fmt.Sprintf("partition %s is owned by region %q now", k.NotOwner.GetPartition(), k.NotOwner.GetOwner())
	case *pb.ErrorDetail_Moved:
		e.Text = fmt.Sprintf("partition %s is moving to region %q", k.Moved.GetPartition(), k.Moved.GetSuccessor())
	case *pb.ErrorDetail_Overloaded:
		e.Text = "overloaded: " + k.Overloaded.GetWhat()
	case *pb.ErrorDetail_Refused:
		e.Text = k.Refused.GetReason()
	case *pb.ErrorDetail_Invalid:
		e.Text = k.Invalid.GetField() + ": " + k.Invalid.GetRemedy()
	case *pb.ErrorDetail_WaitEnded:
		e.Text = fmt.Sprintf("%s was not free within %v; try again, or wait longer", k.WaitEnded.GetResource(), time.Duration(k.WaitEnded.GetWaitedMs())*time.Millisecond)
	default:
		e.Text = "the waiting request ended: " + e.sentinel().Error()
	}
	return e
}

func invalidResource(err error) *Error {
	return &Error{Code: codes.InvalidArgument, Text: err.Error(), Detail: &pb.ErrorDetail{
		Kind: &pb.ErrorDetail_Invalid{Invalid: &pb.Invalid{Field: "resource", Remedy: err.Error()}},
	}}
}

// BusyError says who holds the resource.
type BusyError struct {
	Resource string
	Holder   string
	Token    fence.Token
	Waiters  uint32
	// Delayed: nobody holds it; a lock delay runs.
	Delayed bool
}

func (e *BusyError) Error() string {
	if e.Delayed {
		return fmt.Sprintf("%s is held by nobody, but its last holder's lock delay runs, with %d waiting; wait for it, or try another resource", e.Resource, e.Waiters)
	}
	return fmt.Sprintf("%s is held by %s with token %s and %d waiting; wait for it, or try another resource", e.Resource, e.Holder, e.Token, e.Waiters)
}

// Is makes errors.Is(err, ErrBusy) true.
func (e *BusyError) Is(target error) bool { return target == ErrBusy }

// LostError says why a lease ended without a release.
type LostError struct {
	Resource string
	Token    fence.Token
	Reason   string
}

func (e *LostError) Error() string {
	return fmt.Sprintf("lease on %s (token %s) lost: %s; stop the work on it", e.Resource, e.Token, e.Reason)
}

// Is makes errors.Is(err, ErrLost) true.
func (e *LostError) Is(target error) bool { return target == ErrLost }
