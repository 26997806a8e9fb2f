# Make is the contract: `make verify test` is what CI runs (.ci/run).
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
MAKEFLAGS += --no-print-directory

# The one place for build flags: hashicorpmetrics makes raft, its stores and memberlist
# write to one metrics library (docs/decisions/0001); grpcnotrace leaves out gRPC's trace
# pages, which keep the linker from dropping unused code (3 MB a binary); nethttpomithttp2 leaves out net/http's own
# HTTP/2, which plain-text pages never speak (docs/decisions/0090); the version is stamped by hand,
# so that a build does not depend on git being there and trusting the directory.
export GOFLAGS := $(strip $(filter-out -tags=% -buildvcs=%,$(shell go env GOFLAGS)) -tags=hashicorpmetrics,grpcnotrace,nethttpomithttp2 -buildvcs=false)

VERSION ?= $(shell git -c 'safe.directory=*' describe --tags --always --dirty 2>/dev/null || echo devel)
LDFLAGS := -s -w -X github.com/headlease/headlease/internal/version.release=$(VERSION)

LINT := go tool -modfile=tools/lint/go.mod golangci-lint

# Packages whose tests start processes and measure time: one after the other.
PROCESSES := ./cmd/... ./drill/... ./examples/... ./internal/devcluster/... ./internal/e2e/...
# Histories take processor time of their own, and say how much of it.
HISTORIES := ./region/histories
# So do whole clusters in virtual time.
SIMULATION := ./internal/simulation
OTHERS = $(filter-out $(shell go list $(PROCESSES) $(HISTORIES) $(SIMULATION)),$(shell go list ./...))

.PHONY: bench-peers build test unit netns simulation sim soak-sim mutants-sim histories soak-histories mutants processes race verify fmt vet lint proto tidy hygiene generate fuzz-short explore spec spec-full bench demo drills drills-all drills-netns drill-operator drill-force-quorum planted scale scale-numbers soak failovers drills-table scenarios-table mutants-rules clean help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

build: ## bin/headlease and bin/headlease-witness, static
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/...

test: unit netns histories simulation processes drills orders-short fuzz-short ## all tests, the drills, a short run of the orders, and of each fuzz target

unit: need-cc need-redis need-postgres need-references # tests inside one process, with the race detector
	go test -race -timeout 15m $(OTHERS)

# They make network namespaces and packet filters, which takes a user and a kernel that may.
netns: need-ip need-nft need-nsenter # the sites that drills-netns plays on
	@if why=$$(unshare --net nft list tables 2>&1); then go test -count=1 ./internal/netns -netns; \
	else echo "NOT RUN: the tests of ./internal/netns: no network namespaces with packet filters here (as root there may be): $$why" >&2; fi

processes: # tests that start processes, one package after the other
	go test -p 1 -timeout 20m $(PROCESSES)

histories: ## a region under faults in virtual time, judged by a model; a few broken rules must be caught
	go test -count=1 -timeout 15m $(HISTORIES)

soak-histories: ## histories, RUNS (1000) of each kind, from SEED (1) on; failing ones are saved
	go test -count=1 -timeout 0 -v $(HISTORIES) -run TestHistories -runs $(or $(RUNS),1000) -seed $(or $(SEED),1)

mutants-rules: ## broken rules of design.md that ordinary tests catch
	go test -count=1 -timeout 0 -v ./internal/mutant -mutants all

mutants: ## every broken rule is caught by the histories
	go test -count=1 -timeout 0 -v $(HISTORIES) -run TestMutants -mutants all

simulation: ## whole clusters in virtual time, scenarios, and a few broken rules that must be caught
	go test -count=1 -timeout 15m $(SIMULATION)

sim: ## simulated clusters, HOURS (1) of them in worlds of an hour, from SEED (1) on
	go test -count=1 -timeout 0 -v $(SIMULATION) -run TestWorlds -seed $(or $(SEED),1) -hours $(or $(HOURS),1)

soak-sim: mutants-sim ## 1000 hours of simulated clusters and every mutant
	$(MAKE) sim HOURS=$(or $(HOURS),1000)

mutants-sim: ## every broken rule of the global layer is caught by the simulation
	go test -count=1 -timeout 0 -v $(SIMULATION) -run TestMutants -mutants all

race: need-cc need-redis need-postgres need-references ## all tests with the race detector, also of processes
	go test -race -timeout 15m $(OTHERS)
	go test -race -timeout 30m $(HISTORIES) -runs 1 -mutants none
	go test -race -timeout 30m $(SIMULATION) -hours 0.2 -mutants none
	go test -race -p 1 -timeout 40m $(PROCESSES)

verify: fmt vet lint proto tidy hygiene ## everything that can be checked without running it

fmt:
	@out=$$(find . -name '*.go' -not -path './.*' -print0 | xargs -0 gofmt -l); \
	if [ -n "$$out" ]; then echo "$$out"; echo "not formatted; run gofmt -w on them" >&2; exit 1; fi

vet:
	go vet ./...
	go -C bench vet ./...

lint:
	$(LINT) run --allow-serial-runners ./...
	cd bench && go tool -modfile=../tools/lint/go.mod golangci-lint run --allow-serial-runners ./...

proto:
	scripts/proto.sh check

tidy: # go.mod of the project and of the tools say what is used, no more and no less
	go mod tidy -diff
	go -C bench mod tidy -diff
	go -C bench/etcd mod tidy -diff
	go -C tools mod tidy -diff
	go -C tools/lint mod tidy -diff

hygiene: need-git
	scripts/hygiene.sh

generate: ## write the code that proto/ generates
	scripts/proto.sh write

fuzz-short: ## every fuzz target, FUZZ (5000x) inputs or so long (30s)
	scripts/fuzz.sh $(or $(FUZZ),5000x)

explore: ## the explorers of the pure cores, EXPLORE (3m) each
	go test -count=1 -timeout 60m -v ./global/explore/... -explore.time $(or $(EXPLORE),3m)
	go test -count=1 -timeout 60m -v ./region/lessor/explore/... -explore.time $(or $(EXPLORE),3m)

spec: need-cc need-spin ## the Promela models: small complete searches, and every broken rule is caught
	spec/check.sh

spec-full: need-cc need-spin ## the larger searches, hours: each in MEM (12000) megabytes and Q (60) minutes
	MEM=$(or $(MEM),12000) Q=$(or $(Q),60) spec/full.sh

bench: need-redis need-postgres ## every benchmark
	go test -run '^$$' -bench . -benchmem ./...

# A module of its own, so that etcd's and the other peers' clients are not in the
# product's go.mod.
bin/etcd: bench/etcd/go.mod bench/etcd/main.go
	go -C bench/etcd build -trimpath -o ../../bin/etcd .

bench-peers: build bin/etcd need-redis ## beside etcd, Redis and the floor: W="-workloads W1,W2" chooses
	go -C bench build -trimpath -o ../bin/peerbench .
	cd bench && ../bin/peerbench $(or $(W),-workloads W0,W1,W2,W3)

demo: build ## lose a region: another is promoted, and the stale write is refused
	bin/headlease drill run region-loss

# The short set takes about three minutes; a machine that stalls shows nothing, and says so.
NETNS_DRILLS := cable-cut one-way-cut flapping-link
SHORT_DRILLS := region-loss cable-cut region-isolated gossip-loss one-way-cut witness-majority-loss

drills: build ## the short set of drills (SHORT_DRILLS), one after the other
	@for d in $(SHORT_DRILLS); do bin/headlease drill run $$d --tolerate-stalls || exit 1; done

drills-all: build ## every drill RUNS (3) times, a line each in RESULTS (drills.tsv); goes on where it was broken off
	scripts/drills-all.sh $(or $(RESULTS),drills.tsv) $(or $(RUNS),3)

drills-netns: build need-ip need-nft need-nsenter ## cuts by packet filters between network namespaces (NETNS_DRILLS); root; a line each in RESULTS (drills-netns.tsv)
	go test -count=1 ./internal/netns -netns # fails where the target netns says that it cannot run
	scripts/drills-netns.sh $(or $(RESULTS),drills-netns.tsv) $(NETNS_DRILLS)

drill-force-quorum: ## a majority of the voters destroyed, and the runbook of docs/operations.md, on real processes
	go test -count=1 -v -timeout 20m -run TestF16ForceQuorum ./internal/e2e

drill-operator: build ## drills of a cluster that was started as an operator would, with drill agents
	scripts/drill-operator.sh

.PHONY: demo-orders orders-short chaos-orders FORCE
bin/orders: FORCE
	@mkdir -p bin
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/orders ./examples/orders
FORCE:

# Without Redis and PostgreSQL: bin/orders run --embedded
demo-orders: build bin/orders need-redis need-postgres ## orders of accounts in order, while workers are killed, frozen and redeployed; real Redis and PostgreSQL
	bin/orders run

# Half a minute, on a busy machine up to twice that; it waits for what it needs and does not go by the clock.
orders-short: build bin/orders need-redis need-postgres ## the same in half a minute
	bin/orders run --messages 5000 --accounts 200 --over 8s

chaos-orders: build bin/orders need-redis need-postgres ## the same with 200,000 orders of 2,000 accounts (ORDERS, SEED), and the same seed without the guard
	bin/orders run --messages $(or $(ORDERS),200000) --accounts 2000 --over 240s --rounds 6 --late 50 --seed $(or $(SEED),1) --timeout 40m
	bin/orders run --messages $(or $(ORDERS),200000) --accounts 2000 --over 240s --rounds 6 --late 50 --seed $(or $(SEED),1) --timeout 40m --without-guard

planted: ## broken rules, each built into the binary, are reported by a shipped drill under two seeds
	go test -count=1 -timeout 60m -v -run 'TestPlanted$$' ./drill -planted $(or $(PLANTED),all)

scale: ## 20,000 sessions in processes of their own outlive a killed leader, a rolling restart (PAUSE 4s after each server), a redeployment, which wakes each waiter once
	go test -count=1 -v -timeout 20m -run TestManySessions ./internal/e2e -scale.sessions $(or $(SESSIONS),20000) -scale.pause $(or $(PAUSE),4s)

scale-numbers: ## what 50 regions, 10,000 partitions and 1,000,000 sessions send and cost, from real messages and the shipped code
	go test -count=1 -v ./internal/simulation -run TestScale -scale

soak: build ## region losses over and over, RUNS (10) times; prints the failover time of each
	@for i in $$(seq $(or $(RUNS),10)); do bin/headlease drill run region-loss --json || exit 1; done

failovers: build ## region losses, RUNS (20) at D = 4 s and as many at 2 s, and the table of RESULTS (failovers.tsv)
	@for d in 4s 2s; do for i in $$(seq $(or $(RUNS),20)); do \
		bin/headlease drill run region-loss --d $$d --tolerate-stalls --results $(or $(RESULTS),failovers.tsv) >/dev/null || exit 1; done; done
	scripts/drills-table.sh $(or $(RESULTS),failovers.tsv)

drills-table: ## what is in the files of results (RESULTS) of drills-all, drills-netns and failovers, as one table
	@scripts/drills-table.sh $(or $(RESULTS),$(wildcard drills.tsv drills-netns.tsv failovers.tsv))

scenarios-table: ## the simulation's scenarios: promotions, lapses, time without an owner, leases lost
	@go test -count=1 -v ./internal/simulation -run TestScenarios | sed -n 's/^.*TABLE //p'

clean: ## remove what was built
	rm -rf bin

.PHONY: need-cc need-git need-redis need-postgres need-references need-spin need-ip need-nft need-nsenter
need-cc: # the race detector and spin's verifiers are compiled by a C compiler
	@scripts/need.sh gcc gcc libc6-dev
need-git:
	@scripts/need.sh git git
need-redis: # the Redis guard's tests run a real server
	@scripts/need.sh redis-server redis-server
need-postgres: # so do the PostgreSQL guard's; Debian keeps the server itself out of PATH
	@command -v postgres >/dev/null || scripts/need.sh pg_ctlcluster postgresql
need-references: # the references of shard in Python and TypeScript are tested too
	@scripts/need.sh python3 python3
	@scripts/need.sh node nodejs
	@scripts/need.sh esbuild esbuild
need-ip:
	@scripts/need.sh ip iproute2
need-nft:
	@scripts/need.sh nft nftables
need-nsenter: # unshare is in the same package
	@scripts/need.sh nsenter util-linux
need-spin:
	@scripts/need.sh spin spin
