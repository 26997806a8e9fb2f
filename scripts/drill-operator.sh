#!/usr/bin/env bash
# drill-operator.sh: a cluster as an operator starts it (one cluster.yaml, certificates from `headlease certs`, a process
# each, a drill agent for the host), and drills of it.
set -euo pipefail
cd "$(dirname "$0")/.."
headlease=$PWD/bin/headlease
dir=$(mktemp -d)
pids=()
cleanup() {
	for pid in "${pids[@]}" $(cat "$dir"/pids/* 2>/dev/null); do kill "$pid" 2>/dev/null || true; done
	sleep 1
	for pid in $(cat "$dir"/pids/* 2>/dev/null); do kill -9 "$pid" 2>/dev/null || true; done
	rm -rf "$dir"
}
trap cleanup EXIT
mkdir "$dir/pids" "$dir/data" "$dir/logs"
base=$((20000 + RANDOM % 8000))
port() { echo "127.0.0.1:$((base++))"; }
{
	echo "cluster: ops"
	echo "d: 2s"
	echo "timing: calm"
	echo "regions:"
	for r in eu us; do
		echo "  - name: $r"
		echo "    servers:"
		for n in 1 2 3; do
			echo "      - {name: $r-$n, api: $(port), votes: $(port), raft: $(port), gossip: $(port), metrics: $(port)}"
			base=$((base + 5))
		done
	done
	echo "witnesses:"
	for w in w1 w2 w3; do
		echo "  - {name: $w, votes: $(port), gossip: $(port), metrics: $(port)}"
		base=$((base + 5))
	done
	echo "partitions:"
	echo "  - {name: eu, shards: 0-127, prefer: [eu, us]}"
	echo "  - {name: us, shards: 128-255, prefer: [us, eu]}"
} >"$dir/cluster.yaml"
# $(port) runs in a subshell, so the number is counted on here.
awk -v base="$base" '{ while (match($0, /127\.0\.0\.1:[0-9]+/)) { $0 = substr($0, 1, RSTART - 1) "HOST:" base++ substr($0, RSTART + RLENGTH) } gsub(/HOST:/, "127.0.0.1:"); print }' \
	"$dir/cluster.yaml" >"$dir/cluster.new"
mv "$dir/cluster.new" "$dir/cluster.yaml"
"$headlease" config check "$dir/cluster.yaml"
"$headlease" certs -f "$dir/cluster.yaml" --out "$dir/certs" --client worker
names=(eu-1 eu-2 eu-3 us-1 us-2 us-3 w1 w2 w3)
echo "processes:" >"$dir/agent.yaml"
for name in "${names[@]}"; do
	role=region
	[[ $name == w* ]] && role=witness
	cat >"$dir/start-$name.sh" <<-START
		#!/bin/sh
		setsid "$headlease" $role -f "$dir/cluster.yaml" --certs "$dir/certs" --name $name --data-dir "$dir/data/$name" --drills \\
			>>"$dir/logs/$name.log" 2>&1 </dev/null &
		echo \$! >"$dir/pids/$name"
	START
	chmod +x "$dir/start-$name.sh"
	"$dir/start-$name.sh"
	cat >>"$dir/agent.yaml" <<-AGENT
		  $name:
		    pid: cat $dir/pids/$name
		    start: $dir/start-$name.sh
	AGENT
done
export HEADLEASE_CERTS=$dir/certs
"$headlease" init -f "$dir/cluster.yaml"
agent=127.0.0.1:$((base + 200))
"$headlease" drill agent -f "$dir/cluster.yaml" --name eu-1 --listen "$agent" --commands "$dir/agent.yaml" >"$dir/logs/agent.log" 2>&1 &
pids+=($!)
run() {
	"$headlease" drill run "$1" -f "$dir/cluster.yaml" --certs "$dir/certs" --as worker --i-am-allowed-to-break ops "${@:2}"
}
if run region-loss >"$dir/refused" 2>&1; then
	echo "a drill that kills was not refused without an agent" >&2
	exit 1
fi
grep 'step 2 (kill owner of partition 1) needs processes that can be signalled' "$dir/refused"
run cable-cut --tolerate-stalls
run region-loss --agent "eu-1=$agent" --tolerate-stalls
