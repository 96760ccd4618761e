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
root=build/matrix

# The package must come from the wheel, not from the checkout.
unset PYTHONPATH
rm -rf "$root/dist"

# environment NAME PYTHON REQUIREMENT...: makes or updates one environment.
environment() {
  local name=$1 python=$2
  shift 2
  [[ -x $root/$name/bin/python ]] || "$python" -m venv "$root/$name"
  "$root/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

run() {
  local name=$1
  shift
  echo "== test-matrix: $("$root/$name/bin/python" -P -c 'import sys, jax, jaxlib, jaxsok
print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, {jaxsok.__path__[0]}")')"
  JAX_PLATFORMS=cpu PYTHONPATH=$PWD/$root/$name/share/deviceless "$root/$name/bin/pytest" -n 2 "$@"
}

"$oldest_python" -m venv "$root/build"
"$root/build/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$root/dist" .
wheel=$(echo "$root"/dist/jaxsok-*.whl)
case $wheel in
  *-py3-none-linux_*.whl) echo "== test-matrix: $wheel" ;;
  *) echo "jaxsok: the wheel is to be tagged py3-none-linux_*, got $wheel" >&2 && exit 1 ;;
esac

environment oldest "$oldest_python" "jax==0.10.2" "jaxlib==0.10.2" "$wheel[test]"
environment newest "$newest_python" --upgrade "jax<0.13" "$wheel[test]"
for name in oldest newest; do
  environment "$name" - --force-reinstall --no-deps "$wheel" # the same version, perhaps other content
  scripts/deviceless.sh "$root/$name/bin/python"
done

status=0
for name in oldest newest; do
  run "$name" "$@" || status=1
done
exit $status
