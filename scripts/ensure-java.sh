#!/usr/bin/env bash
# Find a Java 17+ runtime for Spark: JAVA_HOME, else PATH, else install one where that needs no question asked.
set -euo pipefail

major() { "$1" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1; }
enough() { local found; found=$(major "$1" || true); [ -n "$found" ] && [ "$found" -ge 17 ]; }

if [ -n "${JAVA_HOME:-}" ]; then
    enough "$JAVA_HOME/bin/java" && exit 0
    echo "java: JAVA_HOME=$JAVA_HOME holds no Java 17 or later, and Spark would use it: correct it or unset it" >&2
    exit 1
fi
enough java && exit 0
# Newer Debian releases carry a later Java only.
packages=(openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless)
"$(dirname "$0")/apt-install.sh" java "${packages[@]}" && enough java && exit 0

cat >&2 <<'TEXT'
java: Spark needs a Java 17 (or later) runtime, and none was found. Install one:
  Debian, Ubuntu   sudo apt-get install openjdk-17-jre-headless
  Fedora           sudo dnf install java-21-openjdk-headless
  macOS            brew install openjdk@17, then export JAVA_HOME="$(brew --prefix openjdk@17)"
or set JAVA_HOME to one that is elsewhere.
TEXT
exit 1
