#!/usr/bin/env bash
# drills-all.sh FILE RUNS: every shipped drill that often, a line each in FILE. What FILE has already is not run again, so
# it may be broken off and go on later. Fails if a drill found a violation; what showed nothing is listed.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${1:-drills.tsv} runs=${2:-3}
touch "$results"
bad=0
while read -r name _; do
	have=$(awk -F'\t' -v n="$name" '$2 == n' "$results" | wc -l)
	for ((i = have; i < runs; i++)); do
		echo "== $name, run $((i + 1)) of $runs"
		code=0
		bin/headlease drill run "$name" --results "$results" >/dev/null || code=$?
		# A violation ends nothing: the rest is worth knowing. What could not be played has no line.
		[ "$code" -le 2 ] || exit "$code"
		tail -n 1 "$results" | cut -f 2-5
	done
done < <(bin/headlease drill list)
awk -F'\t' '{ n[$2 "\t" $4]++ } END { for (k in n) print n[k] "\t" k }' "$results" | sort -k 2
awk -F'\t' '$4 == "FAILED" { bad = 1 } END { exit bad }' "$results" || bad=1
exit $bad
