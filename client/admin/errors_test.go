package admin

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestTransferToARegionThatIsNone(t *testing.T) {
	f := clusterfile.File{Regions: []clusterfile.Region{{Name: "eu", Servers: []clusterfile.Server{{Name: "eu-1"}}}}}
	_, err := New(f, nil).Transfer(t.Context(), Transfer{Partition: "east", To: "ap"}) // without links: it asks nobody
	if want := `--to "ap" is not a region of the cluster file`; err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

func TestARegionThatIsNone(t *testing.T) {
	f := clusterfile.File{Regions: []clusterfile.Region{{Name: "eu", Servers: []clusterfile.Server{{Name: "eu-1"}}}}}
	want := `"ap" is not a region of the cluster file; it has eu`
	if st, err := New(f, nil).RegionStatus(t.Context(), "ap"); err == nil || err.Error() != want {
		t.Errorf("%v, %v; want %s", st, err, want)
	}
	if _, err := New(f, nil).Drain(t.Context(), "ap", time.Second, nil); err == nil || err.Error() != want {
		t.Errorf("drained: %v; want %s", err, want)
	}
}

func TestUnreachableSaysOnceWhereAndWhatToDo(t *testing.T) {
	w1 := clusterfile.Process{Role: "witness", Name: "w1", Votes: "10.9.1.1:7601"}
	const at = `dial votes of witness/w1 at 10.9.1.1:7601: `
	for message, want := range map[string]string{
		`connection error: desc = "transport: Error while dialing: ` + at + `dial tcp 10.9.1.1:7601: connect: connection refused"`: "connection refused; start it, or correct its address in the cluster file",
		`latest balancer error: connection refused: context deadline exceeded`:                                                     "latest balancer error: connection refused: context deadline exceeded; start it, or correct its address in the cluster file",
		"context deadline exceeded": "context deadline exceeded; see whether it runs and is neither cut off nor overloaded, or correct its address in the cluster file",
		`connection error: desc = "transport: authentication handshake failed: ` + at + `TLS: \"x\" is unknown"`: `TLS: "x" is unknown; both ends need certificates of one set, made for their names, or both --insecure`,
	} {
		err := &Unreachable{Process: w1, Plane: link.PlaneVotes, Err: status.Error(codes.Unavailable, message)}
		if got, want := err.Error(), "witness/w1 did not answer on the votes plane at 10.9.1.1:7601: "+want; got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

// A server without a leader does answer: to start it is no remedy.
func TestUnreachableLeavesAServersOwnWords(t *testing.T) {
	eu1 := clusterfile.Process{Role: "region", Region: "eu", Name: "eu-1", API: "10.1.0.1:7600"}
	st, err := status.New(codes.Unavailable, "the region has no leader right now; ask again in a moment").WithDetails(
		&pb.ErrorDetail{Kind: &pb.ErrorDetail_Lapsed{Lapsed: &pb.Lapsed{RetryNs: int64(time.Second)}}})
	if err != nil {
		t.Fatal(err)
	}
	got := (&Unreachable{Process: eu1, Plane: link.PlaneAPI, Err: st.Err()}).Error()
	if want := "region/eu/eu-1 at 10.1.0.1:7600 cannot say now: the region has no leader right now; ask again in a moment"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
