#!/usr/bin/env bash
# Find nginx for the test of the proxy in docs/guides/security.md: on PATH, else in /usr/sbin, else install it where that
# needs no question asked.
set -euo pipefail

found() { PATH="$PATH:/usr/sbin" command -v nginx >/dev/null; }

found && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "proxy: installing nginx"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nginx && found && exit 0
fi

cat >&2 <<'TEXT'
proxy: the test of the proxy starts an nginx of its own, and it was not found. Install it:
  Debian, Ubuntu   sudo apt-get install nginx
  Fedora           sudo dnf install nginx
  macOS            brew install nginx
or put the folder that holds it on PATH.
TEXT
exit 1
