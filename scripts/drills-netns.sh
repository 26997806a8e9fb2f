#!/usr/bin/env bash
# drills-netns.sh FILE DRILL...: drills whose cables are cut by packet filters between network namespaces, a line each in
# FILE. Root. Whatever becomes of it, nothing is left: the namespaces are nameless and end with their processes.
set -euo pipefail
cd "$(dirname "$0")/.."
results=$1
shift
if [ "$(id -u)" != 0 ]; then
	echo "network namespaces take root; run it with sudo" >&2
	exit 1
fi
for drill in "$@"; do
	unshare --net -- bin/headlease drill run "$drill" --netns --tolerate-stalls --results "$results"
done
