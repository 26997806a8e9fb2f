package api

import (
	"time"

	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	shortCall = 5 * time.Second
	voteCall  = 5 * time.Second

	smallRequest = 4 << 10
	// attachRequest is a batch, each part of which the Edge bounds.
	attachRequest = 64 << 10
	// a value of 64 KiB and what is around it.
	valueRequest = 80 << 10
	// labels of a session.
	openRequest = 64 << 10
	// a vote on some thousand partitions.
	voteRequest = 1 << 20
)

// Policy of all methods that a region server serves, on any plane.
func Policy() policy.Table {
	var (
		clients = []policy.Role{policy.Client, policy.Admin}
		servers = []policy.Role{policy.Region, policy.Witness, policy.Admin}
		regions = []policy.Role{policy.Region}
		admins  = []policy.Role{policy.Admin}
		all     = policy.Everyone()
	)
	return policy.Table{
		pb.SessionService_OpenSession_FullMethodName:  {Deadline: shortCall, MaxRequestBytes: openRequest, Roles: clients},
		pb.SessionService_Attach_FullMethodName:       {Deadline: policy.NoDeadline, MaxRequestBytes: attachRequest, Roles: clients},
		pb.SessionService_CloseSession_FullMethodName: {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: clients},

		pb.LeaseService_Acquire_FullMethodName:       {Deadline: shortCall, MaxRequestBytes: valueRequest, Roles: clients},
		pb.LeaseService_SetValue_FullMethodName:      {Deadline: shortCall, MaxRequestBytes: valueRequest, Roles: clients},
		pb.LeaseService_CancelAcquire_FullMethodName: {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: clients},
		pb.LeaseService_Release_FullMethodName:       {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: clients},
		pb.LeaseService_GetLease_FullMethodName:      {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: clients},
		pb.LeaseService_ListLeases_FullMethodName:    {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: clients},

		pb.WatchService_Watch_FullMethodName: {Deadline: policy.NoDeadline, MaxRequestBytes: smallRequest, Roles: clients},

		pb.ClusterService_DescribeServer_FullMethodName: {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: all},
		pb.ClusterService_InitRegion_FullMethodName:     {Deadline: 30 * time.Second, MaxRequestBytes: openRequest, Roles: admins},
		pb.ClusterService_Status_FullMethodName:         {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: all},
		pb.ClusterService_ListPartitions_FullMethodName: {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: all},

		pb.PartitionService_TransferPartition_FullMethodName: {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: admins},
		pb.PartitionService_AbortTransfer_FullMethodName:     {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: admins},

		pb.VoteService_Prepare_FullMethodName:       {Deadline: voteCall, MaxRequestBytes: voteRequest, Roles: regions},
		pb.VoteService_Accept_FullMethodName:        {Deadline: voteCall, MaxRequestBytes: voteRequest, Roles: regions},
		pb.VoteService_DescribeVoter_FullMethodName: {Deadline: voteCall, MaxRequestBytes: smallRequest, Roles: servers},
		pb.VoteService_Configure_FullMethodName:     {Deadline: 10 * time.Second, MaxRequestBytes: voteRequest, Roles: []policy.Role{policy.Region, policy.Admin}},

		pb.ConfigService_PrepareConfig_FullMethodName: {Deadline: voteCall, MaxRequestBytes: smallRequest, Roles: admins},
		pb.ConfigService_AcceptConfig_FullMethodName:  {Deadline: voteCall, MaxRequestBytes: voteRequest, Roles: admins},
		pb.ConfigService_PrepareAgain_FullMethodName:  {Deadline: voteCall, MaxRequestBytes: voteRequest, Roles: admins},
		pb.ConfigService_AcceptAgain_FullMethodName:   {Deadline: voteCall, MaxRequestBytes: voteRequest, Roles: admins},

		pb.PeerService_CurrentTerm_FullMethodName: {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: regions},
		pb.MuxService_Carry_FullMethodName:        {Deadline: policy.NoDeadline, MaxRequestBytes: voteRequest, Roles: regions},

		pb.MemberService_Join_FullMethodName:          {Deadline: 10 * time.Second, MaxRequestBytes: smallRequest, Roles: regions},
		pb.MemberService_ListMembers_FullMethodName:   {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: admins},
		pb.MemberService_PromoteMember_FullMethodName: {Deadline: 15 * time.Second, MaxRequestBytes: smallRequest, Roles: admins},
		pb.MemberService_RemoveMember_FullMethodName:  {Deadline: 15 * time.Second, MaxRequestBytes: smallRequest, Roles: admins},
		pb.MemberService_HandOver_FullMethodName:      {Deadline: 15 * time.Second, MaxRequestBytes: smallRequest, Roles: admins},

		pb.AuditService_ExportAudit_FullMethodName: {Deadline: 5 * time.Minute, MaxRequestBytes: smallRequest, Roles: admins},

		pb.BackupService_SaveBackup_FullMethodName: {Deadline: 30 * time.Minute, MaxRequestBytes: smallRequest, Roles: admins},

		pb.CallService_Calls_FullMethodName: {Deadline: policy.NoDeadline, MaxRequestBytes: voteRequest, Roles: []policy.Role{policy.Client, policy.Admin, policy.Region}},

		"/grpc.health.v1.Health/Check": {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: all},
		"/grpc.health.v1.Health/List":  {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: all},
		"/grpc.health.v1.Health/Watch": {Deadline: policy.NoDeadline, MaxRequestBytes: smallRequest, Roles: all},

		"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": {Deadline: policy.NoDeadline, MaxRequestBytes: smallRequest, Roles: clients},

		pb.FaultService_SetFaults_FullMethodName:   {Deadline: shortCall, MaxRequestBytes: openRequest, Roles: admins},
		pb.FaultService_ClearFaults_FullMethodName: {Deadline: shortCall, MaxRequestBytes: openRequest, Roles: admins},
		pb.FaultService_ListFaults_FullMethodName:  {Deadline: shortCall, MaxRequestBytes: smallRequest, Roles: admins},
	}
}

// Local are the methods that every server answers itself.
func Local() map[string]bool {
	return map[string]bool{
		pb.ClusterService_DescribeServer_FullMethodName:             true,
		pb.ClusterService_InitRegion_FullMethodName:                 true,
		pb.PeerService_CurrentTerm_FullMethodName:                   true,
		pb.SessionService_Attach_FullMethodName:                     true, // its Edge finds the leader
		pb.MuxService_Carry_FullMethodName:                          true,
		pb.CallService_Calls_FullMethodName:                         true, // each call is forwarded by itself
		pb.WatchService_Watch_FullMethodName:                        true,
		pb.AuditService_ExportAudit_FullMethodName:                  true,
		"/grpc.health.v1.Health/Check":                              true,
		"/grpc.health.v1.Health/List":                               true,
		"/grpc.health.v1.Health/Watch":                              true,
		"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": true,
		pb.FaultService_SetFaults_FullMethodName:                    true,
		pb.FaultService_ClearFaults_FullMethodName:                  true,
		pb.FaultService_ListFaults_FullMethodName:                   true,
	}
}
