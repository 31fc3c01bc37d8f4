#!/bin/bash
# Makes a root file system for agents, for machines that reach no registry:
#   container/make-rootfs.sh DIR [PROGRAM…]
#   berth image build --from-rootfs DIR --tag my-agent:1
# It holds a small Debian with git, ripgrep, curl and jq, and the PROGRAMs in /usr/local/bin. It needs root and debootstrap, about a minute
# and 350 MB. SUITE chooses the Debian (default: stable), MIRROR where it comes from (default: debootstrap's own).
set -euo pipefail

if [ $# -lt 1 ]; then
	sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
	exit 2
fi
dir=$1
shift
if [ "$(id -u)" != 0 ]; then
	echo "make-rootfs: run it as root: files of a root file system belong to root" >&2
	exit 1
fi
if ! command -v debootstrap >/dev/null; then
	echo "make-rootfs: debootstrap is missing: apt-get install debootstrap" >&2
	exit 1
fi
for program in "$@"; do
	if [ ! -x "$program" ]; then
		echo "make-rootfs: $program is no program" >&2
		exit 1
	fi
done
if [ -e "$dir" ] && [ -n "$(ls -A "$dir")" ]; then
	echo "make-rootfs: $dir is not empty: remove it, or name another folder" >&2
	exit 1
fi

echo "make-rootfs: Debian ${SUITE:-stable}; this takes about a minute" >&2
debootstrap --variant=minbase --include=ca-certificates,curl,git,jq,ripgrep,procps "${SUITE:-stable}" "$dir" ${MIRROR:+"$MIRROR"} >&2

# What a container never uses.
rm -rf "$dir"/var/cache/apt/* "$dir"/var/lib/apt/lists/* "$dir"/var/log/* "$dir"/usr/share/{doc,man,info,lintian}/* "$dir"/usr/share/locale/*
# debootstrap copies them from this machine.
: >"$dir"/etc/resolv.conf
: >"$dir"/etc/hostname
for program in "$@"; do
	install -m 755 "$program" "$dir/usr/local/bin/"
done
du -sh "$dir" | sed 's/^/make-rootfs: /' >&2
