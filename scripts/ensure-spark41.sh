#!/usr/bin/env bash
# Install the oldest PySpark that is supported beside the one of .venv, for `make spark41`: what it needs, .venv has.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=requirements/spark41.lock
folder=.venv/spark41
cmp --silent "$lock" "$folder/lock" && exit 0
rm -rf "$folder"
.venv/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes --no-deps --no-build-isolation \
    --target "$folder" -r "$lock"
cp "$lock" "$folder/lock" # last, so that an interrupted run is repeated
