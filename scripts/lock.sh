#!/usr/bin/env bash
# Resolves requirements/*.in to *.lock, for every Python that the project supports at once, with the uv given as $1.
# Further arguments go to uv: `make lock LOCK_FLAGS=--upgrade` takes newer versions, else those in the locks are kept.
set -euo pipefail

uv=$1
shift
cd "$(dirname "$0")/../requirements"

# No configuration of this machine (indexes, find-links) may reach the locks, and no index address is written to them.
compile() {
    "$uv" pip compile --quiet --no-config --universal --generate-hashes --no-emit-index-url \
        --custom-compile-command 'make lock' "$@"
}

echo 'resolving tools, controller, dev, engine-cpu, l2-test …'
# The tools run on target hosts, whose Python may be as old as 3.9; the rest on the controller.
compile --python-version 3.9 --output-file tools.lock "$@" tools.in
compile --python-version 3.11 --output-file controller.lock "$@" controller.in
# The tests run with what the controller has and with what the hosts get.
compile --python-version 3.11 --output-file dev.lock --constraints controller.lock --constraints tools.lock "$@" dev.in
compile --python-version 3.11 --output-file engine-cpu.lock --overrides engine-cpu.overrides "$@" engine-cpu.in
compile --python-version 3.11 --output-file l2-test.lock --constraints dev.lock --overrides l2-test.overrides \
    "$@" l2-test.in
