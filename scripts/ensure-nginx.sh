#!/usr/bin/env bash
# Find nginx for the test of the proxy in docs/guides/security.md: on PATH, else in /usr/sbin, else install it where that
# needs no question asked.
set -euo pipefail

found() { PATH="$PATH:/usr/sbin" command -v nginx >/dev/null; }

found && exit 0
"$(dirname "$0")/apt-install.sh" proxy nginx && found && exit 0

cat >&2 <<'TEXT'
proxy: the test of the proxy starts an nginx of its own, and it was not found. Install it:
  Debian, Ubuntu   sudo apt-get install nginx
  Fedora           sudo dnf install nginx
  macOS            brew install nginx
or put the folder that holds it on PATH.
TEXT
exit 1
