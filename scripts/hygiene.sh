#!/usr/bin/env bash
# hygiene.sh: no tracked file names a path of somebody's machine or a registry's host, and scripts can be run.
set -euo pipefail
cd "$(dirname "$0")/.."
git=(git -c 'safe.directory=*')
bad=0
# The patterns are written so that they do not match themselves.
paths='(^|[^A-Za-z0-9._/-])/(work|home|roo[t]|Users|github/workspace|builds)/[A-Za-z0-9._-]'
hosts='proxy[.]golang[.]org|sum[.]golang[.]org|goproxy|registry[.](npmjs|yarnpkg)|pypi[.]org|(deb|security)[.]debian[.]org|artifactory|[a-z]+[.]jfrog[.]io'
if "${git[@]}" grep -nIE "$paths" -- . ':!scripts/hygiene.sh'; then
	echo "a tracked file names a path of somebody's machine; use a relative one, or a temporary directory" >&2
	bad=1
fi
if "${git[@]}" grep -nIE "$hosts" -- . ':!scripts/hygiene.sh'; then
	echo "a tracked file names a registry's host; leave that to the environment" >&2
	bad=1
fi
while read -r mode _ _ file; do
	case $file in
	*.sh | .ci/run)
		if [ "$mode" != 100755 ]; then
			echo "$file is not executable; chmod +x it" >&2
			bad=1
		fi
		;;
	esac
done < <("${git[@]}" ls-files -s)
exit $bad
