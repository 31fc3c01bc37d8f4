#!/bin/sh
# Brings the agent programs for the tests with the build tag engines into a folder
# outside the tree, 2 GB, once: npm compares each package with the hash in
# npm/package-lock.json. Whoever runs it accepts the programs' licences.
#
#   fetch.sh DIR && BERTH_ENGINES=DIR go test -tags engines ./agent-runner/internal/engine/enginetest
set -eu

if [ $# -ne 1 ]; then
	echo "usage: fetch.sh DIR" >&2
	exit 2
fi
if [ "$(uname -sm)" != "Linux x86_64" ]; then
	echo "fetch.sh: the pinned packages are for Linux on x86-64; this is $(uname -sm)" >&2
	exit 1
fi
here=$(cd "$(dirname "$0")" && pwd)/npm
mkdir -p "$1"
dir=$(cd "$1" && pwd)
want=$(sha256sum <"$here/package-lock.json")
if [ -f "$dir/fetched" ] && [ "$(cat "$dir/fetched")" = "$want" ]; then
	exit 0
fi
rm -f "$dir/fetched"
cp "$here/package.json" "$here/package-lock.json" "$dir/"
# No scripts: what the tests start needs none, and nobody has read them. The only
# programs that run are the ones under test.
(cd "$dir" && npm ci --ignore-scripts --no-fund --no-audit --loglevel=error)
echo "$want" >"$dir/fetched"
