#!/usr/bin/env bash
# Tests one wheel as a user would install it: in bare environments, with the oldest and newest supported Python and JAX,
# without the source tree, and without a compiler on PATH.
#
# Usage: scripts/test_wheel.sh WHEEL [ARGUMENT OF PYTEST ...]; without arguments of pytest: the core tests and the demo
set -euo pipefail
wheel=$(realpath "$1")
shift
cd "$(dirname "$0")/.."
unset PYTHONPATH

root=$PWD/build/matrix
work=$root/checkout
# The tests of the foundations, and those that check the wheel's kernels against the contract of each op.
core=(tests/core/test_{collection,combine,evict,grow,laws,lookup,machine,plan,table,tickets,update}.py)
core+=(tests/kernels/test_kernels.py tests/project/test_command_line.py)
arguments=("$@")
[[ $# -gt 0 ]] || arguments=("${core[@]}")

case $wheel in
  *-py3-none-*linux_*.whl) ;;
  *) echo "jaxsok: the wheel is to be tagged py3-none-*linux_*, got $wheel" >&2 && exit 1 ;;
esac

# The tests run in a copy of the checkout with the wheel's package, so that no test imports the sources instead.
mkdir -p "$root"
rm -rf "$work"
mkdir "$work"
tar -c --exclude='./.git' --exclude='./.venv*' --exclude=./build --exclude=./dist --exclude=./jaxsok . | tar -x -C "$work"
"$(scripts/find_python.sh)" -m zipfile -e "$wheel" "$work"

# environment NAME PYTHON REQUIREMENT...: makes or updates an environment with the wheel in it.
environment() {
  local name=$1 python=$2
  shift 2
  [[ -x $root/$name/bin/python ]] || "$python" -m venv "$root/$name"
  "$root/$name/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "$@" "$wheel[test]"
  # The version may be the same with other contents.
  "$root/$name/bin/python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps "$wheel"
  scripts/deviceless.sh "$root/$name/bin/python"
}

# run NAME COMMAND...: runs a command with only the environment's programs on PATH.
run() {
  local name=$1
  shift
  env PATH="$root/$name/bin" JAX_PLATFORMS=cpu PYTHONPATH="$root/$name/share/deviceless" "$@"
}

# test_in NAME
test_in() {
  local name=$1 python=$root/$1/bin/python
  cd "$work"
  echo "== wheel: $("$python" -P -c 'import sys, jax, jaxlib, jaxsok
print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, {jaxsok.__path__[0]}")')"
  run "$name" "$python" -m pytest -n 2 "${arguments[@]}"
  if [[ ${arguments[*]} == "${core[*]}" ]]; then
    cd "$root"
    run "$name" "$python" -m jaxsok demo --no-progress
  fi
}

environment oldest "$(scripts/find_python.sh 3.11)" "jax==0.10.2" "jaxlib==0.10.2"
environment newest "$(scripts/find_python.sh 3.13 || scripts/find_python.sh 3.12)" "jax<0.13"

status=0
for name in oldest newest; do
  (test_in "$name") || status=1
done
exit $status
