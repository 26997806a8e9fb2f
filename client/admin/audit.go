package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// auditTimeout bounds the export of one server.
const auditTimeout = time.Minute

// auditKey orders and names a record; package region/audit has the rest.
type auditKey struct {
	Time   time.Time `json:"time"`
	Region string    `json:"region"`
	Server string    `json:"server"`
	Index  uint64    `json:"index"`
	N      int       `json:"n"`
	Kind   string    `json:"kind"`
}

type auditLine struct {
	auditKey
	raw string
}

// Audit returns the audit records of the given regions (none: all), each once, as
// JSON lines: a region's in the order of its log, those of several merged by time.
// Servers that do not answer are in the error, beside what the others have.
func (c *Cluster) Audit(ctx context.Context, regions ...string) ([]string, error) {
	var servers []clusterfile.Process
	for _, p := range c.file.Processes() {
		if p.Role == clusterfile.RoleRegion && (len(regions) == 0 || slices.Contains(regions, p.Region)) {
			servers = append(servers, p)
		}
	}
	if len(servers) == 0 {
		return nil, fmt.Errorf("no server of %v is in the cluster file", regions)
	}
	found := make([][]auditLine, len(servers))
	errs := make([]error, len(servers))
	var wg sync.WaitGroup
	for i, p := range servers {
		wg.Go(func() { found[i], errs[i] = c.auditOf(ctx, p) })
	}
	wg.Wait()
	return mergeAudit(found), errors.Join(errs...)
}

func (c *Cluster) auditOf(ctx context.Context, p clusterfile.Process) (lines []auditLine, err error) {
	err = c.ask(ctx, link.PlaneAPI, p, auditTimeout, func(ctx context.Context, conn *grpc.ClientConn) error {
		stream, err := pb.NewAuditServiceClient(conn).ExportAudit(ctx, &pb.ExportAuditRequest{})
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
			for _, raw := range res.GetLines() {
				l := auditLine{raw: raw}
				if json.Unmarshal([]byte(raw), &l.auditKey) == nil {
					lines = append(lines, l)
				}
			}
		}
	})
	return lines, err
}

// gapKind marks what a server lacks: it is that server's alone.
const gapKind = "gap"

// mergeAudit takes each record of a region once, by its place in the region's log.
// What one server lacks is told only where no other has anything of that place.
func mergeAudit(found [][]auditLine) []string {
	type place struct {
		region string
		index  uint64
		n      int
	}
	once := map[place]auditLine{}
	for _, lines := range found {
		for _, l := range lines {
			at := place{l.Region, l.Index, l.N}
			if have, ok := once[at]; !ok || have.Kind == gapKind && l.Kind != gapKind || have.Kind == l.Kind && l.Time.Before(have.Time) {
				once[at] = l
			}
		}
	}
	byRegion := map[string][]auditLine{}
	for _, l := range once {
		byRegion[l.Region] = append(byRegion[l.Region], l)
	}
	var all []auditLine
	for _, lines := range byRegion {
		slices.SortFunc(lines, func(a, b auditLine) int { return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.N, b.N)) })
		for i := 1; i < len(lines); i++ { // servers' clocks differ; the log's order stands
			if lines[i].Time.Before(lines[i-1].Time) {
				lines[i].Time = lines[i-1].Time
			}
		}
		all = append(all, lines...)
	}
	slices.SortStableFunc(all, func(a, b auditLine) int {
		if d := a.Time.Compare(b.Time); d != 0 || a.Region != b.Region {
			return cmp.Or(d, cmp.Compare(a.Region, b.Region))
		}
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.N, b.N))
	})
	out := make([]string, len(all))
	for i, l := range all {
		out[i] = l.raw
	}
	return out
}
