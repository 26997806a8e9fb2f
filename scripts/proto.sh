#!/usr/bin/env bash
# proto.sh check|write|release: the wire contract is well formed, breaks no released version, and the generated
# code is what it generates. At a release, release makes the present contract the one that may not be broken.
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
	"${buf[@]}" breaking --against proto/released.binpb
	fresh=$(mktemp -d)
	trap 'rm -rf "$fresh"' EXIT
	"${buf[@]}" generate -o "$fresh"
	if ! diff -r --exclude='*.proto' --exclude=released.binpb "$fresh/proto" proto; then
		echo "the generated code is not what proto/ generates; run 'make generate'" >&2
		exit 1
	fi
	;;
release)
	"${buf[@]}" breaking --against proto/released.binpb
	"${buf[@]}" build -o proto/released.binpb
	;;
*)
	echo "usage: proto.sh check|write|release" >&2
	exit 2
	;;
esac
