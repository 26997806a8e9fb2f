#!/usr/bin/env bash
# need.sh COMMAND PACKAGE...: make sure a command is there. Says what it installs; installs with apt-get where it may, and
# fails, naming the packages, where it may not. Nothing that needs the command is ever skipped.
set -euo pipefail
command=$1
shift
if command -v "$command" >/dev/null; then
	exit 0
fi
apt=(apt-get)
if [ "$(id -u)" != 0 ]; then
	apt=(sudo -n apt-get)
fi
echo "$command is missing: installing $*" >&2
if ! command -v "${apt[0]}" >/dev/null || ! { "${apt[@]}" update -qq && "${apt[@]}" install -y -qq --no-install-recommends "$@"; } >&2; then
	echo "$command is missing and could not be installed; install $*" >&2
	exit 1
fi
command -v "$command" >/dev/null
