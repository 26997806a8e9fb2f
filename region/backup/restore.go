package backup

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/google/uuid"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/region/replica"
)

const (
	// epochJump is how far above the highest epoch in a backup the first one after
	// its restore is, at least: the backup may be older than the last epoch used,
	// and where the region is the only voter nobody else knows that one
	// (docs/decisions/0052).
	epochJump fence.Epoch = 1 << 10
	// termJump does the same for Raft's terms, by which clients and detectors tell
	// old news from new.
	termJump = 1 << 20
)

// Target is a server of the restored region.
type Target struct {
	Name string
	// DataDir must be absent or empty.
	DataDir string
}

// Restored is what Restore has made.
type Restored struct {
	Region string
	// Incarnation of the region's new data.
	Incarnation uint64
	Servers     []replica.Server
	// Floors are the epochs, by partition, above which its next ones will be.
	Floors map[string]fence.Epoch
}

// Restore makes the data directories of a region's servers from a backup:
// together they form the region's new Raft group. All must be given, since a
// restored region forms its group from them; more servers may join it later. It
// makes all directories or, after an error, none.
func Restore(c Content, targets []Target) (out Restored, err error) {
	if len(targets) == 0 {
		return out, errors.New("restore: no server is named")
	}
	out = Restored{Region: c.View.Region(), Incarnation: randomIncarnation(), Floors: map[string]fence.Epoch{}}
	m, err := c.View.Reincarnate(register.Incarnation(out.Incarnation), epochJump)
	if err != nil {
		return out, fmt.Errorf("restore: %w", err)
	}
	view := m.View()
	for p := range view.Partitions() {
		out.Floors[p.Name] = p.Epoch
	}
	for _, t := range targets {
		id, err := uuid.NewRandom()
		if err != nil {
			return out, fmt.Errorf("restore: %w", err)
		}
		out.Servers = append(out.Servers, replica.Server{Name: t.Name, RaftID: t.Name + "/" + id.String(), Voter: true})
	}
	var made []string
	defer func() {
		if err != nil {
			for _, dir := range made {
				err = errors.Join(err, os.RemoveAll(dir))
			}
		}
	}()
	for i, t := range targets {
		if err := replica.Seed(replica.SeedConfig{
			DataDir: t.DataDir, Cluster: c.Header.GetCluster(), Region: out.Region, RaftID: out.Servers[i].RaftID,
			Servers: out.Servers, Index: view.AppliedIndex(), Term: c.Header.GetTerm() + termJump, Snapshot: view.WriteSnapshot,
		}); err != nil {
			return out, fmt.Errorf("restore: %w", err)
		}
		made = append(made, t.DataDir)
	}
	return out, nil
}

func randomIncarnation() uint64 {
	var b [8]byte
	for {
		_, _ = rand.Read(b[:]) // never fails
		if n := binary.LittleEndian.Uint64(b[:]); n != 0 {
			return n
		}
	}
}
