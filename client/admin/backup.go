package admin

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// SaveBackup asks a region for a backup and passes its frames on, in order. Its
// servers are asked in turn until one begins; a stream that breaks after that is
// an error.
func (c *Cluster) SaveBackup(ctx context.Context, region string, put func(*pb.BackupFrame) error) error {
	var errs []error
	for _, p := range c.file.RegionProcesses(region) {
		began := false
		err := c.call(ctx, link.PlaneAPI, p, func(ctx context.Context, conn *grpc.ClientConn) error {
			stream, err := pb.NewBackupServiceClient(conn).SaveBackup(ctx, &pb.SaveBackupRequest{})
			if err != nil {
				return err
			}
			for {
				res, err := stream.Recv()
				if errors.Is(err, io.EOF) {
					return nil
				}
				if err != nil {
					return err
				}
				began = true
				if err := put(res.GetFrame()); err != nil {
					return err
				}
			}
		})
		var no *Refused
		if err == nil || began || errors.As(err, &no) && !uninitialised(no.Err) {
			return err
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		return fmt.Errorf("region %q is not in the cluster file, or has no servers there", region)
	}
	return errors.Join(errs...)
}
