// Package admin is what an operator does to a whole cluster: set it up, and
// look at it. Every command is safe to repeat.
package admin

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Links makes the connections, with an admin's identity.
type Links interface {
	DialGRPC(plane link.Plane, peer link.Peer, extra ...grpc.DialOption) (*grpc.ClientConn, error)
}

// Cluster is a cluster file's processes as an operator reaches them. Safe for
// concurrent use; close it when done.
type Cluster struct {
	file  clusterfile.File
	links Links

	mu    sync.Mutex
	conns map[key]*grpc.ClientConn
}

type key struct {
	plane link.Plane
	name  string
}

// New returns the cluster of a file. It connects when asked something.
func New(file clusterfile.File, links Links) *Cluster {
	return &Cluster{file: file, links: links, conns: map[key]*grpc.ClientConn{}}
}

// File is the cluster file.
func (c *Cluster) File() clusterfile.File { return c.file }

// Close ends the connections.
func (c *Cluster) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for _, conn := range c.conns {
		errs = append(errs, conn.Close())
	}
	clear(c.conns)
	return errors.Join(errs...)
}

func (c *Cluster) conn(plane link.Plane, p clusterfile.Process) (*grpc.ClientConn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := key{plane, p.Name}
	if conn := c.conns[k]; conn != nil {
		return conn, nil
	}
	conn, err := c.links.DialGRPC(plane, link.Peer{Name: p.Name, Region: p.Region, Role: pki.Role(p.Role), Address: addressOf(p, plane)})
	if err != nil {
		return nil, err
	}
	c.conns[k] = conn
	return conn, nil
}

// Unreachable is a process that did not answer on a plane, or only that it cannot now.
type Unreachable struct {
	Process clusterfile.Process
	Plane   link.Plane
	Err     error
}

func (u *Unreachable) Error() string {
	who, address := u.Process.Identity(), addressOf(u.Process, u.Plane)
	why := strings.TrimPrefix(link.Reason(u.Err), fmt.Sprintf("dial %s of %s at %s: ", u.Plane, who, address))
	if len(status.Convert(u.Err).Details()) > 0 { // its own words, with what to do
		return fmt.Sprintf("%s at %s cannot say now: %s", who, address, why)
	}
	remedy := "start it, or correct its address in the cluster file"
	switch {
	case strings.Contains(why, context.DeadlineExceeded.Error()) && !strings.Contains(why, syscall.ECONNREFUSED.Error()):
		remedy = "see whether it runs and is neither cut off nor overloaded, or correct its address in the cluster file"
	case link.RefusedHandshake(u.Err):
		remedy = "both ends need certificates of one set, made for their names, or both --insecure"
	}
	return fmt.Sprintf("%s did not answer on the %s plane at %s: %s; %s", who, u.Plane, address, why, remedy)
}

// Unwrap is the cause.
func (u *Unreachable) Unwrap() error { return u.Err }

// Refused is a process that answered that it will not do what was asked; asking
// again is of no use.
type Refused struct {
	Process clusterfile.Process
	Plane   link.Plane
	Err     error
}

func (r *Refused) Error() string {
	return fmt.Sprintf("%s at %s refuses: %s", r.Process.Identity(), addressOf(r.Process, r.Plane), status.Convert(r.Err).Message())
}

// Unwrap is the cause.
func (r *Refused) Unwrap() error { return r.Err }

func addressOf(p clusterfile.Process, plane link.Plane) string {
	if plane == link.PlaneVotes {
		return p.Votes
	}
	return p.API
}

// refusal reports whether an error is a process's last word.
func refusal(err error) bool {
	switch status.Code(err) {
	case codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied, codes.Unauthenticated,
		codes.FailedPrecondition, codes.OutOfRange, codes.Unimplemented, codes.DataLoss:
		return true
	default:
		return false
	}
}

// askTimeout bounds one question to one process.
const askTimeout = 2 * time.Second

// ask calls one process on a plane.
func (c *Cluster) ask(ctx context.Context, plane link.Plane, p clusterfile.Process, timeout time.Duration, call func(context.Context, *grpc.ClientConn) error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return c.call(ctx, plane, p, call)
}

func (c *Cluster) call(ctx context.Context, plane link.Plane, p clusterfile.Process, call func(context.Context, *grpc.ClientConn) error) error {
	conn, err := c.conn(plane, p)
	if err == nil {
		err = call(ctx, conn)
	}
	switch {
	case refusal(err):
		return &Refused{Process: p, Plane: plane, Err: err}
	case err != nil:
		return &Unreachable{Process: p, Plane: plane, Err: err}
	}
	return nil
}

// DescribeServer asks one region server what it is.
func (c *Cluster) DescribeServer(ctx context.Context, p clusterfile.Process) (res *pb.DescribeServerResponse, err error) {
	err = c.ask(ctx, link.PlaneAPI, p, askTimeout, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
		res, err = pb.NewClusterServiceClient(conn).DescribeServer(ctx, &pb.DescribeServerRequest{})
		return err
	})
	return res, err
}

// DescribeVoter asks one process what it is as a voter; a region's server
// forwards to its leader.
func (c *Cluster) DescribeVoter(ctx context.Context, p clusterfile.Process) (res *pb.DescribeVoterResponse, err error) {
	err = c.ask(ctx, link.PlaneVotes, p, askTimeout, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
		res, err = pb.NewVoteServiceClient(conn).DescribeVoter(ctx, &pb.DescribeVoterRequest{})
		return err
	})
	return res, err
}

// RegionStatus asks a region's servers in turn for its status, which its
// leader answers.
func (c *Cluster) RegionStatus(ctx context.Context, region string) (res *pb.StatusResponse, err error) {
	servers := c.file.RegionProcesses(region)
	if len(servers) == 0 { // or nobody would be an answer
		return nil, fmt.Errorf("%q is not a region of the cluster file; it has %s", region, strings.Join(c.file.RegionNames(), ", "))
	}
	var errs []error
	for _, p := range servers {
		err := c.ask(ctx, link.PlaneAPI, p, askTimeout, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
			res, err = pb.NewClusterServiceClient(conn).Status(ctx, &pb.StatusRequest{})
			return err
		})
		if err == nil {
			return res, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// ServerStatus asks one server for its region's status, which its leader
// answers.
func (c *Cluster) ServerStatus(ctx context.Context, p clusterfile.Process) (res *pb.StatusResponse, err error) {
	err = c.ask(ctx, link.PlaneAPI, p, askTimeout, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
		res, err = pb.NewClusterServiceClient(conn).Status(ctx, &pb.StatusRequest{})
		return err
	})
	return res, err
}

// ListFaults lists the faults in force in one process, those of its start-up
// table included.
func (c *Cluster) ListFaults(ctx context.Context, p clusterfile.Process) (res *pb.ListFaultsResponse, err error) {
	err = c.faults(ctx, p, func(ctx context.Context, f pb.FaultServiceClient) (err error) {
		res, err = f.ListFaults(ctx, &pb.ListFaultsRequest{})
		return err
	})
	return res, err
}

// SetFaults sets faults in one process of a cluster under drill. They act on
// what that process sends, reads or times, and expire by themselves.
func (c *Cluster) SetFaults(ctx context.Context, p clusterfile.Process, req *pb.SetFaultsRequest) error {
	return c.faults(ctx, p, func(ctx context.Context, f pb.FaultServiceClient) error {
		_, err := f.SetFaults(ctx, req)
		return err
	})
}

// ClearFaults ends all faults that SetFaults has set in one process.
func (c *Cluster) ClearFaults(ctx context.Context, p clusterfile.Process) error {
	return c.faults(ctx, p, func(ctx context.Context, f pb.FaultServiceClient) error {
		_, err := f.ClearFaults(ctx, &pb.ClearFaultsRequest{})
		return err
	})
}

func (c *Cluster) faults(ctx context.Context, p clusterfile.Process, call func(context.Context, pb.FaultServiceClient) error) error {
	plane := link.PlaneAPI
	if p.Role == clusterfile.RoleWitness {
		plane = link.PlaneVotes
	}
	return c.ask(ctx, plane, p, askTimeout, func(ctx context.Context, conn *grpc.ClientConn) error {
		return call(ctx, pb.NewFaultServiceClient(conn))
	})
}

// each calls f for every process at once and joins the errors.
func each(processes []clusterfile.Process, f func(i int, p clusterfile.Process) error) error {
	var wg sync.WaitGroup
	errs := make([]error, len(processes))
	for i, p := range processes {
		wg.Go(func() { errs[i] = f(i, p) })
	}
	wg.Wait()
	return errors.Join(errs...)
}
