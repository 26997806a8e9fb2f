#!/usr/bin/env bash
# fuzz.sh SECONDS: run every fuzz target of the module for so long each.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-5}
found=0
while read -r file; do
	dir=$(dirname "$file")
	for target in $(grep -oE '^func Fuzz[A-Za-z0-9_]+' "$file" | awk '{print $2}'); do
		found=$((found + 1))
		echo "== $dir $target"
		go test -run '^$' -fuzz "^$target\$" -fuzztime "${seconds}s" "$dir"
	done
done < <(grep -rlE '^func Fuzz' --include='*_test.go' . | sort)
echo "$found fuzz targets, ${seconds}s each"
[ "$found" -gt 0 ]
