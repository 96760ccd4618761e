#!/usr/bin/env bash
# Runs all tests on one wheel with the oldest and with the newest supported JAX, each in its own environment.
#
# The wheel is built once, against the headers of the oldest jaxlib: this tests that one build serves all supported
# versions, and that the wheel is complete.
#
# Usage: make test-matrix, or scripts/test_matrix.sh [ARGUMENT OF PYTEST ...]
set -euo pipefail
cd "$(dirname "$0")/.."

build=$PWD/build/matrix
mkdir -p "$build"
rm -rf "$build/dist"
[[ -x $build/build/bin/python ]] || "$(scripts/find_python.sh 3.11)" -m venv "$build/build"
"$build/build/bin/python" -m pip wheel --disable-pip-version-check --no-deps --wheel-dir "$build/dist" .
[[ $# -gt 0 ]] || set -- tests
scripts/test_wheel.sh "$build"/dist/jaxsok-*.whl "$@"
