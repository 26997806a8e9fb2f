#!/usr/bin/env bash
# fixture.sh VERSION COMMIT: let that commit write region/replica/testdata/fixtures/VERSION anew.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# != 2 ]; then
	echo "usage: fixture.sh VERSION COMMIT" >&2
	exit 2
fi
version=$1 commit=$2
dir=$PWD/region/replica/testdata/fixtures/$version
[ -f "$dir/write_test.go" ] || { echo "$dir/write_test.go: write it first; it must fit that version" >&2; exit 1; }
tmp=$(mktemp -d)
trap 'git worktree remove --force "$tmp/tree"; rm -rf "$tmp"' EXIT
git worktree add --quiet --detach "$tmp/tree" "$commit"
cp region/replica/dump_test.go "$tmp/tree/region/replica/"
cp "$dir/write_test.go" "$tmp/tree/region/replica/fixture_write_test.go"
(cd "$tmp/tree" && FIXTURE=$tmp go test -count=1 -run '^TestWriteFixture$' ./region/replica)
mkdir "$tmp/out" && mv "$tmp/data" "$tmp/out/eu-1"
tar -C "$tmp/out" --sort=name --owner=0 --group=0 --numeric-owner -czf "$dir/data.tar.gz" eu-1
cp "$tmp/want.json" "$dir/want.json"
git rev-parse "$commit" >"$dir/commit"
