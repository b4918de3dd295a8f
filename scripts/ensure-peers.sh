#!/usr/bin/env bash
# Install what `make bench PEERS=1` measures beside Lakehead: RocksDB and Redis' client into .venv, Redis where that needs
# no question asked. What is missing is not measured.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes --no-deps -r requirements/peers.lock
command -v redis-server >/dev/null && exit 0
scripts/apt-install.sh peers redis-server && exit 0
echo "peers: redis-server is not on PATH, so that Redis is not measured (Debian, Ubuntu: apt-get install redis-server)" >&2
