#!/usr/bin/env bash
# Create .venv and install what requirements/dev.lock names, every file checked against its hash.
# Usage: scripts/setup.sh PYTHON STAMP      STAMP is written last, so an interrupted run is repeated.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
stamp=$2

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }

if [ ! -x .venv/bin/python ] || ! supported .venv/bin/python; then
    if ! supported "$python"; then
        echo "setup: $python is $("$python" --version 2>&1 || true); Lakehead needs Python 3.11, 3.12 or 3.13." >&2
        echo "setup: install one and name it: make setup PYTHON=python3.12" >&2
        exit 1
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        if ! scripts/apt-install.sh setup "python$version-venv"; then
            echo "setup: $python has no venv module. On Debian or Ubuntu: sudo apt-get install python$version-venv" >&2
            exit 1
        fi
    fi
    echo "setup: creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi

# The build tools first, from the same lock: packages that come as source are then built with checked tools only.
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet)
echo "setup: installing from requirements/dev.lock (some minutes the first time)"
build_tools=$(mktemp)
trap 'rm -f "$build_tools"' EXIT
awk '/^[a-z]/ {keep = /^(packaging|setuptools|wheel)==/} keep' requirements/dev.lock >"$build_tools"
"${pip[@]}" install --require-hashes --no-deps -r "$build_tools"
"${pip[@]}" install --require-hashes --no-deps --no-build-isolation -r requirements/dev.lock
"${pip[@]}" install --no-deps --no-build-isolation --editable .

rm -f .venv/.lakehead-*
touch "$stamp"
echo "setup: ready"
