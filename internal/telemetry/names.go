package telemetry

// Metric names. Units are the base units of Prometheus: seconds, bytes; a
// counter ends in _total.
const (
	// Every process.

	BuildInfo = "headlease_build_info"

	// A region server: its replica.

	RaftLeader            = "headlease_raft_leader"
	RaftTerm              = "headlease_raft_term"
	RaftCommitIndex       = "headlease_raft_commit_index"
	RaftAppliedIndex      = "headlease_raft_applied_index"
	RaftLastIndex         = "headlease_raft_last_index"
	RaftContactSeconds    = "headlease_raft_last_contact_seconds"
	RaftVoters            = "headlease_raft_voters"
	RaftInitialised       = "headlease_raft_initialised"
	ProposalsQueued       = "headlease_proposals_queued"
	ProposalsInFlight     = "headlease_proposals_in_flight"
	Proposals             = "headlease_proposals_total"
	LeadershipChecks      = "headlease_leadership_checks_total"
	LeadershipCheckTime   = "headlease_leadership_check_seconds"
	PulseAge              = "headlease_pulse_age_seconds"
	StoreWriteTime        = "headlease_store_write_seconds"
	StoreWriteFailures    = "headlease_store_write_failures_total"
	SnapshotTime          = "headlease_snapshot_seconds"
	SnapshotFailures      = "headlease_snapshot_failures_total"
	Sessions              = "headlease_sessions"
	Leases                = "headlease_leases"
	Waiters               = "headlease_waiters"
	Resources             = "headlease_resources"
	SessionsOpened        = "headlease_sessions_opened_total"
	SessionsClosed        = "headlease_sessions_closed_total"
	Grants                = "headlease_grants_total"
	LeasesEnded           = "headlease_leases_ended_total"
	Revocations           = "headlease_revocations_total"
	WaitersEnqueued       = "headlease_waiters_enqueued_total"
	WaitersEnded          = "headlease_waiters_ended_total"
	KeepalivesAcked       = "headlease_keepalives_acked_total"
	StreamsOpen           = "headlease_streams_open"
	StreamsSlowClosed     = "headlease_streams_slow_closed_total"
	ForwardedCalls        = "headlease_forwarded_calls_total"
	ClientStreams         = "headlease_client_streams"
	ClientStreamsAttached = "headlease_client_streams_attached_total"
	ClientStreamsEnded    = "headlease_client_streams_ended_total"
	ClientStreamsSlow     = "headlease_client_streams_slow_total"
	MuxBroken             = "headlease_mux_broken_total"
	Watchers              = "headlease_watchers"
	WatchQueuedBytes      = "headlease_watch_queued_bytes"
	WatchEvents           = "headlease_watch_events_total"
	WatchSnapshots        = "headlease_watch_snapshots_total"
	WatchResyncs          = "headlease_watch_resyncs_total"
	WatchSlow             = "headlease_watch_slow_total"
	WatchRefused          = "headlease_watch_refused_total"
	CacheUp               = "headlease_cache_up"
	CacheQueued           = "headlease_cache_queued"
	CacheWrites           = "headlease_cache_writes_total"
	CacheWritesRefused    = "headlease_cache_writes_refused_total"
	CacheWritesFailed     = "headlease_cache_writes_failed_total"
	CacheMissing          = "headlease_cache_missing_total"
	CacheFailures         = "headlease_cache_failures_total"
	CacheDropped          = "headlease_cache_dropped_total"
	CacheRebuilds         = "headlease_cache_rebuilds_total"
	CallsInside           = "headlease_calls_inside"
	CallsRefused          = "headlease_calls_refused_total"
	HeadLeaseHeld         = "headlease_head_lease_held"
	HeadLeaseSecondsLeft  = "headlease_head_lease_left_seconds"
	PartitionEpoch        = "headlease_partition_epoch"
	Terms                 = "headlease_terms_total"
	Campaigns             = "headlease_campaigns_total"
	Promotions            = "headlease_promotions_total"
	Resumptions           = "headlease_resumptions_total"
	Drops                 = "headlease_drops_total"
	Lapses                = "headlease_lapses_total"
	Renewals              = "headlease_head_lease_renewals_total"
	VotesAskedTime        = "headlease_votes_asked_seconds"
	VotesNotCounted       = "headlease_votes_not_counted_total"
	VotesAskedFailures    = "headlease_votes_asked_failures_total"

	// A voter, region or witness.

	VotesAnswered = "headlease_votes_answered_total"
	Era           = "headlease_era"
	EraStopped    = "headlease_era_stopped"

	// A witness.

	WitnessConfigured = "headlease_witness_configured"
	WitnessRegisters  = "headlease_witness_registers"
	WitnessWrites     = "headlease_witness_writes_total"

	// The failure detector.

	DetectorPhi       = "headlease_detector_phi"
	DetectorVerdict   = "headlease_detector_verdict"
	DetectorSilence   = "headlease_detector_silence_seconds"
	DetectorMembers   = "headlease_detector_members"
	DetectorRoundTrip = "headlease_detector_round_trip_seconds"
	HeartbeatsHeard   = "headlease_heartbeats_heard_total"
	HeartbeatsSent    = "headlease_heartbeats_sent_total"
	GossipIgnored     = "headlease_gossip_ignored_total"

	// Of a worker; docs/worker.md lists them.
	WorkerShards        = "headlease_worker_shards"
	WorkerShardsStalled = "headlease_worker_shards_stalled"
	WorkerOldestBatch   = "headlease_worker_oldest_batch_seconds"
	WorkerMessages      = "headlease_worker_messages_total"
	WorkerParked        = "headlease_worker_parked_total"
	WorkerFailures      = "headlease_worker_failures_total"
	WorkerStale         = "headlease_worker_stale_total"
)

// Label names.
const (
	LabelMethod    = "method"
	LabelPartition = "partition"
	LabelPeer      = "peer"
	LabelPlane     = "plane"
	LabelReason    = "reason"
	LabelRegion    = "region"
	LabelResult    = "result"
	LabelRule      = "rule"
	LabelVerdict   = "verdict"
	LabelVersion   = "version"
	LabelVoter     = "voter"
	LabelLane      = "lane"
	LabelOp        = "op"
	LabelVia       = "via"
	LabelBy        = "by"
)

// Seconds are the buckets of latencies inside a region, on disk and between
// regions: 0.1 ms to 5 s.
func Seconds() []float64 {
	return []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}
}
