#!/usr/bin/env bash
# proto.sh check|write: the wire contract is well formed and the generated code is what it generates.
set -euo pipefail
cd "$(dirname "$0")/.."
buf=(go tool -modfile=tools/go.mod buf)
case ${1:-} in
write)
	"${buf[@]}" format -w
	"${buf[@]}" lint
	"${buf[@]}" generate
	;;
check)
	"${buf[@]}" format --diff --exit-code
	"${buf[@]}" lint
	fresh=$(mktemp -d)
	trap 'rm -rf "$fresh"' EXIT
	"${buf[@]}" generate -o "$fresh"
	if ! diff -r --exclude='*.proto' "$fresh/proto" proto; then
		echo "the generated code is not what proto/ generates; run 'make generate'" >&2
		exit 1
	fi
	;;
*)
	echo "usage: proto.sh check|write" >&2
	exit 2
	;;
esac
