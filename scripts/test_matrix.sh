#!/usr/bin/env bash
# Tests one wheel with the oldest and with the newest supported JAX, each in its own environment.
#
# The wheel is built once, against the headers of the oldest jaxlib, and installed as a user would install it: this
# is the test that one build serves all supported versions, and that the wheel holds all that it should.
#
# Usage: make test-matrix, or scripts/test_matrix.sh [ARGUMENT OF PYTEST ...]
set -euo pipefail
cd "$(dirname "$0")/.."

oldest_python=$(scripts/find_python.sh 3.11)
newest_python=$(scripts/find_python.sh 3.12)
root=$PWD/build/matrix
work=$root/checkout
unset PYTHONPATH

mkdir -p "$root"
rm -rf "$root/dist" "$work"
[[ -x $root/build/bin/python ]] || "$oldest_python" -m venv "$root/build"
"$root/build/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$root/dist" .
wheel=$(echo "$root"/dist/jaxsok-*.whl)
case $wheel in
  *-py3-none-linux_*.whl) ;;
  *) echo "jaxsok: the wheel is to be tagged py3-none-linux_*, got $wheel" >&2 && exit 1 ;;
esac

# The tests run in a copy of the checkout whose package is the wheel's, so that none finds the sources in its place.
mkdir "$work"
tar -c --exclude='./.git' --exclude='./.venv*' --exclude=./build --exclude=./dist --exclude=./jaxsok . | tar -x -C "$work"
"$oldest_python" -m zipfile -e "$wheel" "$work"

# environment NAME PYTHON REQUIREMENT...: makes an environment, or brings it up to date, with the wheel in it.
environment() {
  local name=$1 python=$2
  shift 2
  [[ -x $root/$name/bin/python ]] || "$python" -m venv "$root/$name"
  "$root/$name/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "$@" "$wheel[test]"
  # The same version, perhaps other contents.
  "$root/$name/bin/python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps "$wheel"
  scripts/deviceless.sh "$root/$name/bin/python"
}

# run_tests NAME [ARGUMENT OF PYTEST ...]
run_tests() {
  local name=$1
  shift
  cd "$work"
  echo "== test-matrix: $("$root/$name/bin/python" -P -c 'import sys, jax, jaxlib, jaxsok
print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, {jaxsok.__path__[0]}")')"
  JAX_PLATFORMS=cpu PYTHONPATH=$root/$name/share/deviceless "$root/$name/bin/python" -m pytest -n 2 "$@"
}

environment oldest "$oldest_python" "jax==0.10.2" "jaxlib==0.10.2"
environment newest "$newest_python" "jax<0.13"

status=0
for name in oldest newest; do
  (run_tests "$name" "$@") || status=1
done
exit $status
