package api

import (
	"google.golang.org/grpc"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// auditBatch bounds the bytes of lines in one message.
const auditBatch = 64 << 10

// Audits is the AuditService of every server.
type Audits struct {
	pb.UnimplementedAuditServiceServer
	Log interface {
		Export(take func(line []byte) error) error
	}
}

// ExportAudit streams the server's own record.
func (s *Audits) ExportAudit(_ *pb.ExportAuditRequest, ss grpc.ServerStreamingServer[pb.ExportAuditResponse]) error {
	batch, size := &pb.ExportAuditResponse{}, 0
	err := s.Log.Export(func(line []byte) error {
		batch.Lines = append(batch.Lines, string(line))
		if size += len(line); size < auditBatch {
			return nil
		}
		full := batch
		batch, size = &pb.ExportAuditResponse{}, 0
		return ss.Send(full)
	})
	if err != nil || len(batch.GetLines()) == 0 {
		return err
	}
	return ss.Send(batch)
}
