#!/usr/bin/env bash
# Install the first of some packages that apt has, where that needs no question asked: as root, or with a sudo that wants no
# password. Whoever calls it has found that something is missing, and says what to do where this fails.
# Usage: scripts/apt-install.sh WHO PACKAGE...      WHO begins the lines that tell of it.
set -euo pipefail
who=$1
shift

command -v apt-get >/dev/null || exit 1
as_root=(env)
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || exit 1
    as_root=(sudo -n env)
fi
apt() { "${as_root[@]}" DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 "$@"; }

apt update || echo "$who: apt-get update failed, going on with the lists that are here" >&2
for package in "$@"; do
    echo "$who: installing $package"
    apt install -y --no-install-recommends "$package" && exit 0
done
exit 1
