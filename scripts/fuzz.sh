#!/usr/bin/env bash
# fuzz.sh AMOUNT: run every fuzz target of the module that often ("5000x") or so long ("30s"). A count ends by itself;
# a time can end go's fuzzer in the middle of an input, which it then reports as a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
amount=${1:-5000x}
found=0
while read -r file; do
	dir=$(dirname "$file")
	for target in $(grep -oE '^func Fuzz[A-Za-z0-9_]+' "$file" | awk '{print $2}'); do
		found=$((found + 1))
		echo "== $dir $target"
		go test -run '^$' -fuzz "^$target\$" -fuzztime "$amount" "$dir"
	done
done < <(grep -rlE '^func Fuzz' --include='*_test.go' . | sort)
echo "$found fuzz targets, $amount each"
[ "$found" -gt 0 ]
