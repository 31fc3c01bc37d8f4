#!/usr/bin/env bash
# Makes sure that a Docker engine answers, and that a static busybox is there for
# the agent image. Does nothing where nothing is missing; on Debian and Ubuntu, run
# as root, it installs the distribution's docker.io and busybox-static and starts
# the engine; elsewhere it says what to do and exits 1. DOCKER_HOST is respected.
#
# With --runsc it makes sure of gVisor's runsc as well, for the tests. It does not
# tell the engine of it: docs/containers.md says how.
set -eu

default_host=unix:///var/run/docker.sock
host=${DOCKER_HOST:-$default_host}
log=

say() { printf 'engine: %s\n' "$*"; }
fail() { printf 'engine: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# Prints the engine's version; fails if it does not answer. Debian's docker.io does
# not always bring the docker command, but perl-base is always there.
engine_version() {
	local socket=${host#unix://} json=
	if have docker; then
		timeout 10 docker -H "$host" version --format '{{.Server.Version}}' 2>/dev/null
		return
	fi
	case $host in
	tcp://*)
		local scheme=http dir=${DOCKER_CERT_PATH:-} tls=()
		if [ -n "$dir" ]; then
			scheme=https
			tls=(--cacert "$dir/ca.pem" --cert "$dir/cert.pem" --key "$dir/key.pem")
		fi
		json=$(curl -fsS -m 10 ${tls[@]+"${tls[@]}"} "$scheme://${host#tcp://}/version" 2>/dev/null) || return 1
		;;
	*)
		[ -S "$socket" ] || return 1
		if have curl; then
			json=$(curl -fsS -m 10 --unix-socket "$socket" http://docker/version 2>/dev/null) || return 1
		else
			json=$(perl -MSocket -e '
				alarm 10;
				socket(S, PF_UNIX, SOCK_STREAM, 0) && connect(S, sockaddr_un($ARGV[0])) or exit 1;
				syswrite S, "GET /version HTTP/1.0\r\n\r\n"; print while <S>;' "$socket" 2>/dev/null) || return 1
		fi
		;;
	esac
	json=$(printf '%s' "$json" | tr ',' '\n' | sed -n 's/.*"Version":"\([^"]*\)".*/\1/p' | head -n 1)
	[ -n "$json" ] && printf '%s\n' "$json"
}

is_root() { [ "$(id -u)" -eq 0 ]; }

# Whether packages can be installed here: Debian, Ubuntu or a child of theirs.
is_debian() {
	have apt-get && [ -r /etc/os-release ] && (. /etc/os-release && case " ${ID:-} ${ID_LIKE:-} " in
		*" debian "* | *" ubuntu "*) ;;
		*) false ;;
	esac)
}

# Installs packages; refreshes the lists only if they do not do as they are.
add_packages() {
	export DEBIAN_FRONTEND=noninteractive
	say "installing $*"
	apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 </dev/null && return
	say "refreshing the package lists"
	apt-get update -qq </dev/null || return
	apt-get install -y -qq --no-install-recommends "$@" >/dev/null </dev/null
}

static_busybox() {
	local file
	for file in /bin/busybox /usr/bin/busybox /sbin/busybox /usr/local/bin/busybox; do
		# A dynamic program names its loader (…/ld-linux…, …/ld-musl…) near its start.
		if [ -x "$file" ] && ! head -c 4096 "$file" | grep -qa '/ld-'; then
			return 0
		fi
	done
	return 1
}

ensure_busybox() {
	static_busybox && return
	if is_root && is_debian && add_packages busybox-static && static_busybox; then
		return
	fi
	say "no static busybox here: the agent image will have the runner's own shell only (to change that: install busybox-static)"
}

ensure_runsc() {
	if have runsc; then
		return
	elif ! is_root; then
		say "no runsc here, and no root to install it: gVisor is not tested"
	elif ! is_debian; then
		fail "no runsc: install gVisor (https://gvisor.dev/docs/user_guide/install/), or run the tests without root"
	else
		add_packages runsc && have runsc || fail "installing runsc did not work; the lines above say why"
	fi
}

# Removes the pid files of a dockerd and a containerd that were killed. A zombie,
# or a stranger who was given the number since, would keep a new one from
# starting.
forget_the_dead() {
	local file pid name
	for file in /var/run/docker.pid /var/run/docker/containerd/containerd.pid; do
		[ -r "$file" ] || continue
		pid=$(cat "$file") name=
		case $file in *containerd.pid) name=containerd ;; *) name=dockerd ;; esac
		if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" != "$name" ] || grep -q '^State:[[:space:]]*Z' "/proc/$pid/status" 2>/dev/null; then
			rm -f "$file"
		fi
	done
}

# Starts dockerd without systemd: away from this terminal and with none of our
# files open, so that a pipe that this script was run in can end.
launch() {
	log=/var/log/dockerd.log
	: 2>/dev/null >>"$log" || log=$(mktemp "${TMPDIR:-/tmp}/dockerd.XXXXXX")
	say "starting dockerd, log in $log"
	forget_the_dead
	(
		for fd in /proc/self/fd/*; do
			fd=${fd##*/}
			[ "$fd" -le 2 ] || eval "exec $fd>&-" 2>/dev/null || true
		done
		exec setsid nohup dockerd >>"$log" 2>&1 </dev/null
	) &
	launched=$!
}

start_engine() {
	launched=
	if [ -d /run/systemd/system ]; then
		say "starting the service docker"
		systemctl start docker || {
			journalctl -u docker -n 20 --no-pager >&2 || true
			fail "the service docker did not start"
		}
	else
		launch
	fi
	local end=$((SECONDS + 60))
	while [ "$SECONDS" -lt "$end" ]; do
		if version=$(engine_version); then
			return
		fi
		[ -z "$launched" ] || kill -0 "$launched" 2>/dev/null || break
		sleep 0.2
	done
	if [ -n "$log" ]; then
		tail -n 20 "$log" >&2
	fi
	fail "the engine did not come up; see the lines above"
}

have docker || have curl || { have perl && [ "${host#unix://}" != "$host" ]; } ||
	fail "to ask the engine at $host, install the docker command or curl"

version=
if ! version=$(engine_version); then
	if [ "$host" != "$default_host" ]; then
		fail "no answer from DOCKER_HOST=$host: start that engine, or unset DOCKER_HOST to use this machine's"
	fi
	if [ -S /var/run/docker.sock ] && [ ! -w /var/run/docker.sock ]; then
		fail "this user may not use Docker: run 'sudo usermod -aG docker $(id -un)' and log in anew"
	fi
	if ! is_root; then
		fail "no Docker engine answers: run 'sudo $0', or install and start Docker yourself"
	fi
	if ! have dockerd; then
		is_debian || fail "no Docker engine: install your distribution's package (docker, moby-engine or docker.io), start it, and run this again"
		add_packages docker.io $(static_busybox || echo busybox-static) || fail "installing docker.io did not work; the lines above say why"
	fi
	# Installing may have started it.
	version=$(engine_version) || start_engine
fi
say "Docker $version answers at $host"
ensure_busybox
case ${1:-} in
'') ;;
--runsc) ensure_runsc ;;
*) fail "unknown argument $1: there is only --runsc" ;;
esac
