#!/usr/bin/env bash
# Find Chromium for the test of the shop's page, the part of it that has no window where there is a choice: on PATH, else
# install it where that needs no question asked.
set -euo pipefail

found() { command -v chromium-headless-shell || command -v chromium || command -v google-chrome; } >/dev/null

found && exit 0
"$(dirname "$0")/apt-install.sh" browser chromium-headless-shell chromium && found && exit 0

cat >&2 <<'TEXT'
browser: the test of the shop's live page opens it in a Chromium without a window, and none was found. Install one:
  Debian           sudo apt-get install chromium-headless-shell
  Fedora           sudo dnf install chromium
or put the folder that holds chromium or google-chrome on PATH.
TEXT
exit 1
