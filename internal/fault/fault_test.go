package fault

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"net"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T, startup Rules) *Table {
	t.Helper()
	tbl, err := NewTable(startup)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tbl.Close)
	return tbl
}

func drop(id, peer string, expires time.Duration) LinkRule {
	return LinkRule{ID: id, Peer: peer, Link: Link{Drop: true}, Expires: expires}
}

func set(t *testing.T, tbl *Table, rules Rules) {
	t.Helper()
	if err := tbl.Set(rules); err != nil {
		t.Fatal(err)
	}
}

func TestRulesExpireByThemselvesAndTell(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tbl := open(t, Rules{})
		before := tbl.Changed()
		set(t, tbl, Rules{Links: []LinkRule{drop("a", "w1", time.Second), drop("b", "w1", 2*time.Second)}})
		<-before
		if left := tbl.Rules().Links[0].Expires; left != time.Second {
			t.Errorf("time left %v", left)
		}
		start, version := time.Now(), tbl.Version()
		<-tbl.Changed()
		if at := time.Since(start); at != time.Second || tbl.Version() == version {
			t.Errorf("changed after %v, version %d", at, tbl.Version())
		}
		if !tbl.Link(PlaneAPI, "w1", "").Drop {
			t.Error("b went with a")
		}
		<-tbl.Changed()
		if at := time.Since(start); at != 2*time.Second || !tbl.Link(PlaneAPI, "w1", "").Clean() {
			t.Errorf("changed after %v", at)
		}
	})
}

func TestARuleSetAgainExpiresAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tbl := open(t, Rules{})
		set(t, tbl, Rules{Links: []LinkRule{drop("a", "w1", time.Second)}})
		time.Sleep(900 * time.Millisecond)
		set(t, tbl, Rules{Links: []LinkRule{drop("a", "w1", time.Second)}})
		time.Sleep(999 * time.Millisecond)
		synctest.Wait()
		if !tbl.Link(PlaneAPI, "w1", "").Drop || len(tbl.Rules().Links) != 1 {
			t.Error("the first rule's end ended the second")
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if len(tbl.Rules().Links) != 0 {
			t.Error("does not end")
		}
	})
}

func TestRulesMatchByNameRegionAndPlane(t *testing.T) {
	tbl := open(t, Rules{Links: []LinkRule{
		{ID: "wan", Peer: "region/us", Link: Link{Delay: 40 * time.Millisecond, Jitter: time.Millisecond, Loss: 0.5}},
		{ID: "name", Peer: "us-1", Plane: PlaneVotes, Link: Link{Delay: time.Millisecond, Loss: 0.5}},
	}})
	for _, c := range []struct {
		plane        Plane
		name, region string
		want         Link
	}{
		{PlaneRaft, "us-1", "us", Link{Delay: 40 * time.Millisecond, Jitter: time.Millisecond, Loss: 0.5}},
		{PlaneVotes, "us-1", "us", Link{Delay: 41 * time.Millisecond, Jitter: time.Millisecond, Loss: 0.75}},
		{PlaneVotes, "us-2", "us", Link{Delay: 40 * time.Millisecond, Jitter: time.Millisecond, Loss: 0.5}},
		{PlaneVotes, "", "us", Link{Delay: 40 * time.Millisecond, Jitter: time.Millisecond, Loss: 0.5}},
		{PlaneVotes, "w1", "", Link{}},
		{PlaneVotes, "us", "", Link{}},
		{PlaneVotes, "", "", Link{}},
	} {
		if got := tbl.Link(c.plane, c.name, c.region); got != c.want {
			t.Errorf("%s to %q of %q: %+v, not %+v", c.plane, c.name, c.region, got, c.want)
		}
	}
}

func TestStartupRulesStay(t *testing.T) {
	tbl := open(t, Rules{Links: []LinkRule{drop("wan", "w1", 0)}})
	set(t, tbl, Rules{Links: []LinkRule{drop("cut", "w2", time.Minute), drop("cut2", "w2", time.Minute)}})
	if err := tbl.Set(Rules{Links: []LinkRule{drop("wan", "w1", time.Minute)}}); err == nil || !strings.Contains(err.Error(), "start-up table") {
		t.Error(err)
	}
	tbl.Clear("wan", "cut", "never-set")
	if got := tbl.Rules().Links; len(got) != 2 || got[0].ID != "wan" || got[0].Expires != 0 || got[1].ID != "cut2" {
		t.Errorf("%+v", got)
	}
	tbl.Clear()
	if got := tbl.Rules().Links; len(got) != 1 || got[0].ID != "wan" {
		t.Errorf("%+v", got)
	}
}

func TestValidationNamesFieldAndRemedyAllAtOnce(t *testing.T) {
	tbl := open(t, Rules{})
	err := tbl.Set(Rules{
		Links: []LinkRule{
			{ID: "", Peer: "w1", Link: Link{Drop: true}, Expires: 1},
			{ID: "a", Peer: "", Link: Link{Drop: true}, Expires: 1},
			{ID: "a", Peer: "region/", Link: Link{Drop: true}, Expires: 1},
			{ID: "b", Peer: "x", Link: Link{Drop: true}},
			{ID: "c", Peer: "x", Link: Link{Delay: -1}, Expires: 1},
			{ID: "d", Peer: "x", Link: Link{Loss: math.NaN()}, Expires: 1},
			{ID: "e", Peer: "x", Expires: 1},
			{ID: "f", Peer: "x", Plane: 9, Link: Link{Drop: true}, Expires: 1},
			{ID: "g", Peer: "x", Link: Link{Jitter: time.Hour}, Expires: 48 * time.Hour},
		},
		Disks:  []DiskRule{{ID: "h", Expires: 1}, {ID: "i", Error: true, Full: true, Expires: 1}},
		Clocks: []ClockRule{{ID: "j", Expires: 1}, {ID: "k", Rate: -2, Step: 48 * time.Hour, WallStep: -48 * time.Hour, Expires: 1}},
	})
	if err == nil {
		t.Fatal("taken")
	}
	for _, want := range []string{
		`fault id: must not be empty; give each rule a name by which to clear it`,
		`fault id "a": given twice; each rule needs its own`,
		`fault "a": peer: must not be empty; name a process, "region/NAME" or "*"`,
		`fault "a": peer "region/": name a process, "region/NAME" or "*"`,
		`fault "b": expires_ms: must be set; only a start-up table has rules that last`,
		`fault "c": delay_ms: -1ns is outside 0s to 1m0s`,
		`fault "d": loss: NaN is outside 0 to 1`,
		`fault "e": has no effect; set drop, delay_ms, jitter_ms or loss`,
		`fault "f": plane: 9 is unknown; use API, votes, Raft, gossip or none for all`,
		`fault "g": jitter_ms: 1h0m0s is outside 0s to 1m0s`,
		`expires_ms: 48h0m0s is outside 1 ms to 24h0m0s`,
		`fault "h": has no effect; set stall, delay_ms, error or full`,
		`fault "i": error and full: an operation fails in one way; set one of them`,
		`fault "j": has no effect; set step_ms, rate or wall_step_ms`,
		`fault "k": step_ms: 48h0m0s is outside -24h0m0s to 24h0m0s`,
		`wall_step_ms: -48h0m0s is outside -24h0m0s to 24h0m0s`,
		`rate: -2 is outside -1 (stopped) to 10`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("missing %q in\n%v", want, err)
		}
	}
	if n := tbl.Version(); n != 1 || len(tbl.Rules().Links) != 0 {
		t.Errorf("a refused set changed the table (version %d)", n)
	}
}

func TestANilTableHasNoFaults(t *testing.T) {
	var tbl *Table
	if !tbl.Link(PlaneAPI, "x", "y").Clean() || tbl.Before("log/append") != nil || tbl.Version() != 0 || tbl.Changed() != nil || tbl.WallStep() != 0 {
		t.Error("a nil table has faults")
	}
	if err := tbl.Set(Rules{}); !errors.Is(err, ErrOff) {
		t.Error(err)
	}
	tbl.Clear()
	tbl.Close()
}

func TestDiskFaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tbl := open(t, Rules{})
		set(t, tbl, Rules{Disks: []DiskRule{{ID: "e", Store: "log", Error: true, Expires: time.Hour}}})
		if err := tbl.Before("log/append"); !errors.Is(err, syscall.EIO) {
			t.Error(err)
		}
		for _, other := range []string{"logs/append", "register/put"} {
			if err := tbl.Before(other); err != nil {
				t.Error(err)
			}
		}
		set(t, tbl, Rules{Disks: []DiskRule{{ID: "e", Full: true, Delay: 300 * time.Millisecond, Expires: time.Hour}}})
		start := time.Now()
		if err := tbl.Before("register/put"); !errors.Is(err, syscall.ENOSPC) || time.Since(start) != 300*time.Millisecond {
			t.Error(err, time.Since(start))
		}
		// A stalled operation goes on when the rule ends, and then obeys the rest.
		set(t, tbl, Rules{Disks: []DiskRule{{ID: "s", Stall: true, Expires: 5 * time.Second}}})
		start = time.Now()
		if err := tbl.Before("register/put"); !errors.Is(err, syscall.ENOSPC) || time.Since(start) != 5300*time.Millisecond {
			t.Error(err, time.Since(start))
		}
	})
}

func TestCloseReleasesAStalledDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tbl := open(t, Rules{})
		set(t, tbl, Rules{Disks: []DiskRule{{ID: "s", Stall: true, Expires: time.Hour}}})
		done := make(chan error)
		go func() { done <- tbl.Before("log/append") }()
		synctest.Wait()
		start := time.Now()
		tbl.Close()
		if err := <-done; err != nil || time.Since(start) != 0 {
			t.Error(err)
		}
		if err := tbl.Set(Rules{Disks: []DiskRule{{ID: "s", Stall: true, Expires: time.Hour}}}); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}

func TestTheTableIsSafeConcurrently(t *testing.T) {
	tbl := open(t, Rules{})
	var wg sync.WaitGroup
	for i := range 4 {
		id := string(rune('a' + i))
		wg.Go(func() {
			for range 200 {
				if err := tbl.Set(Rules{Links: []LinkRule{drop(id, "w1", time.Microsecond)}}); err != nil {
					t.Error(err)
				}
				tbl.Link(PlaneAPI, "w1", "")
				tbl.Rules()
				tbl.Clear(id)
			}
		})
	}
	wg.Wait()
}

// serve runs the service for a caller who is an admin or not.
func serve(t *testing.T, tbl *Table, admin *bool) pb.FaultServiceClient {
	t.Helper()
	ln := bufconn.Listen(1 << 16)
	srv := grpc.NewServer()
	Register(srv, ServiceConfig{Table: tbl, Logger: slog.New(slog.DiscardHandler), Authorize: func(context.Context) error {
		if !*admin {
			return status.Error(codes.PermissionDenied, "admin only")
		}
		return nil
	}})
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ln) }()
	cc, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return ln.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cc.Close()
		srv.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return pb.NewFaultServiceClient(cc)
}

func TestServiceSetsListsAndClears(t *testing.T) {
	tbl := open(t, Rules{Links: []LinkRule{drop("wan", "w9", 0)}})
	admin := true
	client := serve(t, tbl, &admin)
	ctx := context.Background()
	_, err := client.SetFaults(ctx, &pb.SetFaultsRequest{
		Faults:      []*pb.Fault{{Id: "cut", Peer: "region/us", Plane: pb.Plane_PLANE_VOTES, Drop: true, DelayMs: 1, JitterMs: 2, Loss: 0.5, ExpiresMs: 60_000}},
		DiskFaults:  []*pb.DiskFault{{Id: "disk", Store: "log", Stall: true, DelayMs: 3, Full: true, ExpiresMs: 60_000}},
		ClockFaults: []*pb.ClockFault{{Id: "clock", StepMs: -4, Rate: 0.5, WallStepMs: 3_600_000, ExpiresMs: 60_000}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := tbl.Link(PlaneVotes, "us-1", "us"); got != (Link{Drop: true, Delay: time.Millisecond, Jitter: 2 * time.Millisecond, Loss: 0.5}) {
		t.Errorf("%+v", got)
	}
	list, err := client.ListFaults(ctx, &pb.ListFaultsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if len(list.GetFaults()) != 2 || len(list.GetDiskFaults()) != 1 || len(list.GetClockFaults()) != 1 {
		t.Fatal(list)
	}
	if f := list.GetFaults()[0]; f.GetId() != "wan" || f.GetExpiresMs() != 0 {
		t.Error(f)
	}
	if f := list.GetFaults()[1]; f.GetPlane() != pb.Plane_PLANE_VOTES || f.GetExpiresMs() < 1 || f.GetExpiresMs() > 60_000 {
		t.Error(f)
	}
	if f := list.GetDiskFaults()[0]; f.GetStore() != "log" || !f.GetStall() || f.GetDelayMs() != 3 || !f.GetFull() || f.GetError() {
		t.Error(f)
	}
	if f := list.GetClockFaults()[0]; f.GetStepMs() != -4 || f.GetRate() != 0.5 || f.GetWallStepMs() != 3_600_000 || tbl.WallStep() != time.Hour {
		t.Error(f)
	}
	if _, err := client.ClearFaults(ctx, &pb.ClearFaultsRequest{}); err != nil {
		t.Fatal(err)
	}
	if got := tbl.Rules(); len(got.Links) != 1 || len(got.Disks) != 0 || len(got.Clocks) != 0 {
		t.Errorf("%+v", got)
	}
}

func TestServiceRefuses(t *testing.T) {
	tbl := open(t, Rules{Links: []LinkRule{drop("wan", "w9", 0)}})
	admin := true
	client := serve(t, tbl, &admin)
	ctx := context.Background()
	for name, c := range map[string]struct {
		fault *pb.Fault
		code  codes.Code
		text  string
	}{
		"no expiry":   {&pb.Fault{Id: "a", Peer: "x", Drop: true}, codes.InvalidArgument, "expires_ms: must be set"},
		"negative":    {&pb.Fault{Id: "a", Peer: "x", Drop: true, ExpiresMs: math.MinInt64}, codes.InvalidArgument, "is outside 1 ms to"},
		"overflow":    {&pb.Fault{Id: "a", Peer: "x", Drop: true, ExpiresMs: math.MaxInt64}, codes.InvalidArgument, "is outside 1 ms to"},
		"plane":       {&pb.Fault{Id: "a", Peer: "x", Plane: 99, Drop: true, ExpiresMs: 1}, codes.InvalidArgument, "plane:"},
		"startup's":   {&pb.Fault{Id: "wan", Peer: "x", Drop: true, ExpiresMs: 1}, codes.FailedPrecondition, "start-up table"},
		"long name":   {&pb.Fault{Id: "a", Peer: strings.Repeat("x", 1000), Drop: true, ExpiresMs: 1}, codes.InvalidArgument, "at most 128"},
		"nil in list": {nil, codes.InvalidArgument, "fault id: must not be empty"},
	} {
		_, err := client.SetFaults(ctx, &pb.SetFaultsRequest{Faults: []*pb.Fault{c.fault}})
		if status.Code(err) != c.code || !strings.Contains(status.Convert(err).Message(), c.text) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if len(tbl.Rules().Links) != 1 {
		t.Errorf("a refused request changed the table: %+v", tbl.Rules())
	}
	admin = false
	if _, err := client.SetFaults(ctx, &pb.SetFaultsRequest{}); status.Code(err) != codes.PermissionDenied {
		t.Error(err)
	}
	if _, err := client.ClearFaults(ctx, &pb.ClearFaultsRequest{}); status.Code(err) != codes.PermissionDenied {
		t.Error(err)
	}
	if _, err := client.ListFaults(ctx, &pb.ListFaultsRequest{}); status.Code(err) != codes.PermissionDenied {
		t.Error(err)
	}
}

func TestServiceNeedsAnAuthorizer(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("registered a service that obeys anyone")
		}
	}()
	Register(grpc.NewServer(), ServiceConfig{Table: open(t, Rules{})})
}

func TestStartupTableAsAFile(t *testing.T) {
	want := Rules{
		Links:  []LinkRule{{ID: "wan", Peer: "region/us", Plane: PlaneRaft, Link: Link{Delay: 40 * time.Millisecond, Jitter: time.Millisecond}}},
		Disks:  []DiskRule{{ID: "slow", Store: "log", Delay: time.Millisecond}},
		Clocks: []ClockRule{{ID: "fast", Rate: 0.005}},
	}
	data, err := FormatStartup(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseStartup(data)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, not %+v", got, want)
	}
	open(t, got)
	if _, err := ParseStartup([]byte(`{"fault": []}`)); err == nil || !strings.Contains(err.Error(), "start-up fault table: ") {
		t.Error(err)
	}
}
