package simulation

import (
	"flag"
	"fmt"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor"
	"github.com/headlease/headlease/region/state"
)

var flagScale = flag.Bool("scale", false, "measure what messages cost, with 50 regions, 10,000 partitions and 1,000,000 sessions")

// size is a cluster in numbers.
type size struct {
	regions, servers, witnesses, partitions, sessions int
	// prefer is how many regions a partition lists; perStream, how many
	// sessions share a connection; each holds one lease.
	prefer, perStream int
	d, ttl            time.Duration
}

var big = size{
	regions: 50, servers: 3, witnesses: 5, partitions: 10_000, sessions: 1_000_000,
	prefer: 3, perStream: 10, d: 4 * time.Second, ttl: 10 * time.Second,
}

func (z size) voters() int         { return z.regions + z.witnesses }
func (z size) owned() int          { return z.partitions / z.regions }
func (z size) asked() int          { return z.partitions * (z.prefer - 1) / z.regions }
func (z size) name(i int) string   { return fmt.Sprintf("eu-equities-%05d", i) }
func (z size) region(i int) string { return fmt.Sprintf("eu-region-%02d", i%z.regions) }

func (z size) incarnation(i int) register.Incarnation {
	return register.Incarnation(0x9e3779b97f4a7c15 * uint64(i+1))
}

const scaleCluster = "0190f5fe-7c00-7a00-8000-0123456789ab"

// configuration is a real one.
func (z size) configuration() *pb.ClusterConfiguration {
	c := &pb.ClusterConfiguration{
		ClusterId: scaleCluster, ClusterName: "production", Version: 7,
		Shards: 1 << 14, DNs: int64(z.d),
	}
	for i := range z.voters() {
		id := config.RegionVoter(z.region(i))
		if i >= z.regions {
			id = config.WitnessVoter(fmt.Sprintf("w%d", i-z.regions))
		}
		c.Voters = append(c.Voters, &pb.Voter{Id: id, Incarnation: uint64(z.incarnation(i))})
	}
	for i := range z.partitions {
		p := &pb.PartitionSpec{Name: z.name(i), Shards: []*pb.ShardRange{{First: uint32(i), Last: uint32(i)}}}
		for k := range z.prefer {
			p.Prefer = append(p.Prefer, z.region(i+k))
		}
		c.Partitions = append(c.Partitions, p)
	}
	last := c.Partitions[z.partitions-1]
	last.Shards[0].Last = c.Shards - 1
	return c
}

func (z size) header() *pb.VoteHeader {
	return &pb.VoteHeader{
		ClusterId: scaleCluster, ConfigVersion: 7, Candidate: z.region(3),
		CandidateIncarnation: uint64(z.incarnation(3)), Round: 1 << 20, SeenLife: uint64(z.incarnation(4)),
	}
}

func (z size) state() *pb.VoterState {
	return &pb.VoterState{
		Voter: &pb.Voter{Id: config.RegionVoter(z.region(4)), Incarnation: uint64(z.incarnation(4))}, Round: 1 << 20,
		Life: uint64(z.incarnation(5)), PreviousLife: uint64(z.incarnation(6)), Writes: 1 << 30, Continues: true,
	}
}

func (z size) record(owner int) register.Record {
	b := register.Ballot{Round: 1234, Region: z.region(owner), Incarnation: z.incarnation(owner)}
	return register.Record{Promised: b, Accepted: b, Value: register.Value{
		Owner: register.Region{Name: z.region(owner), Incarnation: z.incarnation(owner)}, Epoch: 17, D: z.d,
	}}
}

// renewal is a renewal of all that a region owns, and its answer.
func (z size) renewal() (*pb.AcceptRequest, *pb.AcceptResponse) {
	req, res := &pb.AcceptRequest{Header: z.header()}, &pb.AcceptResponse{State: z.state()}
	rec := z.record(3)
	for i := range z.owned() {
		name := z.name(i*z.regions + 3)
		req.Items = append(req.Items, &pb.AcceptItem{Partition: name, Ballot: rec.Accepted.Proto(), Value: rec.Value.Proto()})
		res.Answers = append(res.Answers, register.AcceptAnswerOf(name, register.Register{Record: rec}, 0, register.RuleNone))
	}
	return req, res
}

// question is a dry Prepare for what a region may own and does not, and its
// answer.
func (z size) question() (*pb.PrepareRequest, *pb.PrepareResponse) {
	req, res := &pb.PrepareRequest{Header: z.header(), Dry: true}, &pb.PrepareResponse{State: z.state()}
	reg := register.Register{Record: z.record(2), Since: instant.Instant(time.Hour)}
	now := instant.Instant(time.Hour + 300*time.Millisecond)
	for i := range z.asked() {
		name := z.name(i)
		req.Partitions = append(req.Partitions, name)
		res.Answers = append(res.Answers, register.PrepareAnswerOf(name, reg, now, register.RuleV2Running, register.VerdictHealthy))
	}
	return req, res
}

// flow is one kind of message at one kind of node.
type flow struct {
	node, what string
	// perSecond messages out and in, and their bytes.
	out, in           float64
	outBytes, inBytes int
	// cost is the processor time of one, there and back, where it is measured.
	cost time.Duration
}

// header sizes: what is around a message on the wire, beside TLS records.
const (
	grpcFrames = 9 + 5 + 40 // HTTP/2 frame, gRPC prefix, compressed headers about
	datagram   = 28 + 29    // IP and UDP; memberlist's encryption
)

func (z size) flows() []flow {
	accept, accepted := z.renewal()
	ask, asked := z.question()
	beat := &pb.Heartbeat{Region: z.region(1), Server: z.region(1) + "-1", Term: 40, Seq: 1 << 24, Pulse: 1 << 30, ClusterId: scaleCluster}
	session := "0190f5fe-7c00-7a00-8000-0123456789ab"
	keepalive := &pb.AttachRequest{Kind: &pb.AttachRequest_Keepalive{Keepalive: &pb.Keepalive{
		SessionId: session, Secret: make([]byte, 32), Sequence: 1 << 16, TokensHash: 1 << 60, LowestOpenRequest: 1000,
	}}}
	end := &pb.PartitionEnd{Partition: z.name(1), Epoch: 17, Until: 1 << 60}
	ack := &pb.AttachResponse{Term: 40, Kind: &pb.AttachResponse_Ack{Ack: &pb.Ack{
		SessionId: session, Sequence: 1 << 16, ReceivedAt: 1 << 60, SessionUntil: 1 << 60, Partitions: []*pb.PartitionEnd{end},
	}}}
	push := &pb.AttachResponse{Term: 40, Kind: &pb.AttachResponse_Push{Push: &pb.PartitionPush{}}}
	for range min(z.perStream, z.owned()) {
		push.GetPush().Partitions = append(push.GetPush().Partitions, end)
	}
	framed := func(m proto.Message) int { return proto.Size(m) + grpcFrames }
	sent := proto.Size(beat) + 1 + datagram

	perRegion := float64(z.sessions) / float64(z.regions)
	rounds := 1 / (z.d / 5).Seconds()
	// Who may own and does not asks again when the lease would be over, which
	// is D after a renewal, and by its place in the list.
	asks := 1 / (z.d + z.d/4).Seconds()
	others, regions, voters := float64(z.voters()-1), float64(z.regions), float64(z.voters())
	peers := float64(z.regions*z.servers + z.witnesses - 1)
	keepalives := perRegion / (z.ttl / 3).Seconds()
	streams := perRegion / float64(z.perStream)
	return []flow{
		{"region leader", "renewals sent to the other voters", rounds * others, rounds * others, framed(accept), framed(accepted), 0},
		{"region leader", "renewals of other regions judged", rounds * (regions - 1), rounds * (regions - 1), framed(accepted), framed(accept), 0},
		{"region leader", "dry Prepares sent", asks * others, asks * others, framed(ask), framed(asked), 0},
		{"region leader", "dry Prepares of other regions judged", asks * (regions - 1), asks * (regions - 1), framed(asked), framed(ask), 0},
		{"region leader", "heartbeats to every server and witness", 4 * peers, 4 * (regions - 1), sent, sent, 0},
		{"region leader", "keepalives and their acks", keepalives, keepalives, framed(ack), framed(keepalive), 0},
		{"region leader", "pushes of partitions' ends", rounds * streams, 0, framed(push), 0, 0},
		{"witness", "renewals judged", rounds * regions, rounds * regions, framed(accepted), framed(accept), 0},
		{"witness", "dry Prepares judged", asks * regions, asks * regions, framed(asked), framed(ask), 0},
		{"witness", "heartbeats heard", 0, 4 * regions, 0, sent, 0},
		{"region follower", "heartbeats heard", 0, 4 * (regions - 1), 0, sent, 0},
		{"all", "votes in the whole cluster", rounds * regions * voters, rounds * regions * voters, framed(accepted), framed(accept), 0},
	}
}

// TestScale prints what a big cluster would send, from the sizes of real
// messages, and with -scale what the work costs here and what breaks first.
func TestScale(t *testing.T) {
	z := big
	conf := z.configuration()
	if err := config.Check(conf); err != nil {
		t.Fatal(err)
	}
	flows := z.flows()
	var b strings.Builder
	fmt.Fprintf(&b, "%d regions of %d servers, %d witnesses, %d partitions with %d preferences, %d sessions (%d to a connection, a lease each), D %v, TTL %v\n",
		z.regions, z.servers, z.witnesses, z.partitions, z.prefer, z.sessions, z.perStream, z.d, z.ttl)
	fmt.Fprintf(&b, "the configuration has %d bytes; at most %d are taken\n", proto.Size(conf), 4<<20)
	tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "node\twhat\tout/s\tbytes\tin/s\tbytes\tKB/s out\tKB/s in")
	total := map[string][2]float64{}
	for _, f := range flows {
		if f.out < 0 || f.in < 0 || f.out > 0 && f.outBytes == 0 || f.in > 0 && f.inBytes == 0 {
			t.Errorf("%s, %s: rates or sizes are missing", f.node, f.what)
		}
		out, in := f.out*float64(f.outBytes)/1000, f.in*float64(f.inBytes)/1000
		total[f.node] = [2]float64{total[f.node][0] + out, total[f.node][1] + in}
		fmt.Fprintf(tw, "%s\t%s\t%.0f\t%d\t%.0f\t%d\t%.0f\t%.0f\n", f.node, f.what, f.out, f.outBytes, f.in, f.inBytes, out, in)
	}
	for _, node := range []string{"region leader", "witness"} {
		fmt.Fprintf(tw, "%s\tin all\t\t\t\t\t%.0f\t%.0f\n", node, total[node][0], total[node][1])
	}
	_ = tw.Flush()
	if *flagScale {
		b.WriteString(z.costs(t))
	}
	t.Log("\n" + b.String())
}

// costs measures the work that grows with the cluster, in the shipped code and
// on this machine.
func (z size) costs(t *testing.T) string {
	accept, accepted := z.renewal()
	ask, asked := z.question()
	var b strings.Builder
	tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "\nnode\twork\ttimes/s\teach\tof a core")
	share := map[string]float64{}
	row := func(node, what string, perSecond float64, f func()) {
		each := measure(f)
		share[node] += perSecond * each.Seconds()
		fmt.Fprintf(tw, "%s\t%s\t%.0f\t%v\t%.1f %%\n", node, what, perSecond, each.Round(100*time.Nanosecond), 100*perSecond*each.Seconds())
	}
	rounds, asks := 1/(z.d/5).Seconds(), 1/(z.d+z.d/4).Seconds()
	regions, others := float64(z.regions), float64(z.voters()-1)

	regs := map[string]register.Register{}
	for i := range z.partitions {
		regs[z.name(i)] = register.Register{Record: z.record(i % z.regions)}
	}
	acceptWire, _ := proto.Marshal(accept)
	askWire, _ := proto.Marshal(ask)
	acceptedWire, _ := proto.Marshal(accepted)
	askedWire, _ := proto.Marshal(asked)
	judgeRenewal := func() {
		var req pb.AcceptRequest
		_ = proto.Unmarshal(acceptWire, &req)
		res := &pb.AcceptResponse{State: z.state()}
		for _, it := range req.GetItems() {
			r := regs[it.GetPartition()]
			bal, v := register.BallotOf(it.GetBallot()), register.ValueOf(it.GetValue())
			if next, ok := r.Renewed(1, bal, v); ok {
				regs[it.GetPartition()] = next
			}
			res.Answers = append(res.Answers, register.AcceptAnswerOf(it.GetPartition(), r, 1, register.RuleNone))
		}
		_, _ = proto.Marshal(res)
	}
	judgeQuestion := func() {
		var req pb.PrepareRequest
		_ = proto.Unmarshal(askWire, &req)
		res := &pb.PrepareResponse{State: z.state()}
		for _, name := range req.GetPartitions() {
			r := regs[name]
			d := r.Prepare(1, register.PrepareInput{Candidate: register.Region{Name: "other"}, Dry: true, Verdict: register.VerdictHealthy})
			res.Answers = append(res.Answers, register.PrepareAnswerOf(name, r, 1, d.Rule, register.VerdictHealthy))
		}
		_, _ = proto.Marshal(res)
	}
	row("witness", fmt.Sprintf("judge a renewal of %d partitions", z.owned()), rounds*regions, judgeRenewal)
	row("witness", fmt.Sprintf("judge a dry Prepare of %d partitions", z.asked()), asks*regions, judgeQuestion)
	row("region leader", "the same renewals, as a voter", rounds*(regions-1), judgeRenewal)
	row("region leader", "the same dry Prepares, as a voter", asks*(regions-1), judgeQuestion)

	l, now := z.leader(t)
	row("region leader", "make a renewal round, encode it for each voter", rounds, func() {
		now = now.Add(z.d / 5)
		for _, e := range l.Tick(now) {
			if a, ok := e.(campaign.SendAccept); ok {
				req := &pb.AcceptRequest{Header: z.header()}
				for _, it := range a.Items {
					req.Items = append(req.Items, &pb.AcceptItem{Partition: it.Partition, Ballot: it.Ballot.Proto(), Value: it.Value.Proto()})
				}
				_, _ = proto.Marshal(req)
			}
		}
	})
	answers := make([]campaign.AcceptAnswer, z.owned())
	for i := range answers {
		answers[i] = campaign.AcceptAnswer{Partition: z.name(i*z.regions + 3)}
	}
	row("region leader", "take an answer to a renewal", rounds*others, func() {
		var res pb.AcceptResponse
		_ = proto.Unmarshal(acceptedWire, &res)
		l.AcceptAnswered(now, config.RegionVoter(z.region(4)), z.incarnation(4), 1<<20, answers)
		l.Next()
	})
	asking := make([]campaign.PrepareAnswer, 0, z.asked())
	for _, a := range asked.GetAnswers() {
		asking = append(asking, campaign.PrepareAnswer{Partition: a.GetPartition(), Rule: register.RuleV2Running, Record: z.record(2), Remaining: z.d})
	}
	row("region leader", "take an answer to a dry Prepare", asks*others, func() {
		var res pb.PrepareResponse
		_ = proto.Unmarshal(askedWire, &res)
		l.PrepareAnswered(now, config.RegionVoter(z.region(4)), z.incarnation(4), 1<<20, asking)
		l.Next()
	})
	perRegion := z.sessions / z.regions
	keepalive, push := z.keepalives(t, perRegion)
	row("region leader", "take a keepalive off the wire, and put its ack on it", float64(perRegion)/(z.ttl/3).Seconds(), keepalive)
	row("region leader", fmt.Sprintf("push %d streams their partitions' ends", perRegion/z.perStream), rounds, push)
	_ = tw.Flush()
	fmt.Fprintf(&b, "of these alone: a witness %.0f %% of a core, a region's leader %.0f %%; not measured: gRPC, TLS, system calls, Raft\n",
		100*share["witness"], 100*share["region leader"])
	return b.String()
}

// leader is the proposer of a region that owns its share.
func (z size) leader(t *testing.T) (*campaign.Leader, instant.Instant) {
	c := campaign.Config{
		Self: register.Region{Name: z.region(3), Incarnation: z.incarnation(3)}, OwnVoter: config.RegionVoter(z.region(3)),
		D: z.d, Rho: rho, Rand: never{},
	}
	conf := z.configuration()
	for _, v := range conf.GetVoters() {
		c.Voters = append(c.Voters, campaign.Voter{ID: v.GetId(), Incarnation: register.Incarnation(v.GetIncarnation()), Witness: config.IsWitness(v.GetId())})
	}
	var own []campaign.Own
	for i, p := range conf.GetPartitions() {
		c.Partitions = append(c.Partitions, campaign.Partition{Name: p.GetName(), Prefer: p.GetPrefer()})
		o := campaign.Own{Record: z.record(i % z.regions)}
		if i%z.regions == 3 {
			o.Live, o.Floor = fence.Epoch(17), 17
		}
		own = append(own, o)
	}
	now := instant.Instant(1 << 50)
	l, err := campaign.New(c, own, now)
	if err != nil {
		t.Fatal(err)
	}
	l.Tick(now)
	return l, now
}

// keepalives are a leader's work for so many sessions with a lease each, in one
// partition, by the shipped tables: one keepalive and its ack, with what each
// is on the wire; and one round of pushes.
func (z size) keepalives(t *testing.T, sessions int) (keepalive, push func()) {
	const term, partition = 1, "eu-equities-00001"
	m, index := state.New(), uint64(0)
	must := func(c *pb.Command) *pb.CommandResult {
		index++
		res, _ := m.Apply(index, term, c)
		if res.GetError() != nil {
			t.Fatal(res.GetError())
		}
		return res
	}
	self := register.Region{Name: "r", Incarnation: 1}
	must(&pb.Command{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{Region: self.Name, Incarnation: 1}}})
	must(&pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: &pb.ClusterConfiguration{
		ClusterId: "c", Version: 1, Shards: 1, DNs: int64(z.d), Voters: []*pb.Voter{{Id: "region/r", Incarnation: 1}, {Id: "witness/w", Incarnation: 2}},
		Partitions: []*pb.PartitionSpec{{Name: partition, Shards: []*pb.ShardRange{{}}, Prefer: []string{"r"}}},
	}}}})
	ballot := must(&pb.Command{Kind: &pb.Command_ReserveBallot{ReserveBallot: &pb.ReserveBallotCommand{}}}).GetReserved().GetBallot()
	value := register.Value{Owner: self, Epoch: 1, D: z.d}
	must(&pb.Command{Term: term, Kind: &pb.Command_Accepted{Accepted: &pb.AcceptedCommand{Items: []*pb.AcceptedItem{{
		Partition: partition, Guard: &pb.RegisterGuard{}, Ballot: ballot, Value: value.Proto(),
	}}}}})
	must(&pb.Command{Term: term, Kind: &pb.Command_Adopt{Adopt: &pb.AdoptCommand{Partition: partition, Epoch: 1, Ballot: ballot}}})
	ids := make([]string, sessions)
	for i := range ids {
		ids[i] = fmt.Sprintf("0190f5fe-7c00-7a00-8000-%012d", i)
		must(&pb.Command{Kind: &pb.Command_OpenSession{OpenSession: &pb.OpenSessionCommand{SessionId: ids[i], SecretHash: make([]byte, 32), TtlMs: z.ttl.Milliseconds()}}})
		must(&pb.Command{Kind: &pb.Command_Acquire{Acquire: &pb.AcquireCommand{
			SessionId: ids[i], RequestId: 1, Resource: fmt.Sprintf("lock/%d", i), Partition: partition, Epoch: 1,
		}}})
	}
	now := instant.Instant(1 << 50)
	l := lessor.New(lessor.Config{}, m.View(), term, now)
	l.PulseFresh(now, true)
	l.HeadLease(now, partition, 1, now.Add(1000*time.Hour))
	sequence := uint64(0)
	one := func(i int) {
		sequence++
		wire, err := proto.Marshal(&pb.AttachRequest{Kind: &pb.AttachRequest_Keepalive{Keepalive: &pb.Keepalive{
			SessionId: ids[i], Secret: make([]byte, 32), Sequence: sequence, TokensHash: 1 << 60,
		}}})
		if err != nil {
			t.Fatal(err)
		}
		var in pb.AttachRequest
		if err := proto.Unmarshal(wire, &in); err != nil {
			t.Fatal(err)
		}
		l.Keepalive(now, lessor.StreamID(i/z.perStream+1), in.GetKeepalive())
	}
	send := func() {
		for _, s := range l.Take().Sends {
			if _, err := proto.Marshal(s.Message); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i := range sessions {
		if i%z.perStream == 0 {
			l.StreamOpened(now, lessor.StreamID(i/z.perStream+1))
		}
		one(i)
	}
	l.CheckPassed(now, l.CheckBegun(now))
	send()
	next := 0
	keepalive = func() { // its check is shared by all that come within 5 ms
		if one(next % sessions); next%30 == 29 {
			l.CheckPassed(now, l.CheckBegun(now))
			send()
		}
		next++
	}
	push = func() {
		now = now.Add(z.d / 5)
		for i := range sessions {
			if i%z.perStream == 0 { // as in time: no session is let run out
				l.Push(now, lessor.StreamID(i/z.perStream+1))
			}
		}
		send()
	}
	return keepalive, push
}

type never struct{}

func (never) Int64N(int64) int64 { return 0 }

// measure is the processor time of one call, over a fifth of a second of them.
func measure(f func()) time.Duration {
	f()
	began, n := cpu(), 0
	for cpu()-began < 200*time.Millisecond {
		f()
		n++
	}
	return (cpu() - began) / time.Duration(n)
}
