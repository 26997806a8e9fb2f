#!/usr/bin/env bash
# drills-table.sh FILE...: a table of the results of drills, for people: of each drill, D and carrier of its faults (the name of
# the file) how often it was played and held, the most promotions, the longest time without an owner, the most leases lost, and
# median and worst failover of those that measure one.
set -euo pipefail
for file in "$@"; do
	awk -F'\t' -v of="$(basename "$file" .tsv)" '{ print of "\t" $0 }' "$file"
done | awk -F'\t' '
	match($6, /^D [0-9]+ ms, [0-9]+ promotions, [0-9]+ ms unowned, [0-9]+ leases lost/) {
		split(substr($6, 1, RLENGTH), w, /[ ,]+/)
		k = $3 "\t" w[2] / 1000 " s\t" $1
		n[k]++; if ($5 == "ok") ok[k]++
		if (w[4] > p[k]) p[k] = w[4]
		if (w[6] > u[k]) u[k] = w[6]
		if (w[9] > l[k]) l[k] = w[9]
		if (match($6, /failover [0-9]+ ms/)) f[k] = f[k] " " substr($6, RSTART + 9, RLENGTH - 12)
		next
	}
	{ other++ }
	END {
		for (k in n) {
			m = split(f[k], t, " ")
			for (i = 2; i <= m; i++) for (j = i; j > 1 && t[j - 1] + 0 > t[j] + 0; j--) { x = t[j]; t[j] = t[j - 1]; t[j - 1] = x }
			text = m ? t[int((m + 1) / 2)] " / " t[m] " ms" : ""
			split(k, c, "\t")
			printf "| %s | %s | %s | %d of %d | %d | %d ms | %d | %s |\n", c[1], c[2], c[3], ok[k], n[k], p[k], u[k], l[k], text
		}
		if (other) printf "%d lines have no such figures\n", other > "/dev/stderr"
	}' | sort | {
	echo "| drill | D | results | held | promotions | unowned | leases lost | failover, median / worst |"
	echo "| --- | --- | --- | --- | --- | --- | --- | --- |"
	cat
}
