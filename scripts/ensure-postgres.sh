#!/usr/bin/env bash
# Find PostgreSQL's server for the tests of catalogs: on PATH, else where Debian puts it, else install it where that
# needs no question asked.
set -euo pipefail

found() { command -v initdb >/dev/null || compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null; }

found && exit 0
"$(dirname "$0")/apt-install.sh" postgres postgresql && found && exit 0

cat >&2 <<'TEXT'
postgres: the tests of lake catalogs start a PostgreSQL server of their own, and its programs were not found. Install it:
  Debian, Ubuntu   sudo apt-get install postgresql
  Fedora           sudo dnf install postgresql-server
  macOS            brew install postgresql
or put the folder that holds initdb on PATH.
TEXT
exit 1
