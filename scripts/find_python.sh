#!/usr/bin/env bash
# Prints the path of a working Python of the requested version. Without a version it prints python3 if it is new enough,
# otherwise the newest Python that jaxsok is tested with. If there is none, it fails with a message.
#
# It searches PATH and pyenv's versions, and runs each: a pyenv shim may point to nothing.
#
# Usage: scripts/find_python.sh [3.12]
set -euo pipefail

# try COMMAND VERSION...: prints its path if it runs and has one of the versions.
try() {
  local found
  found=$("$1" -c 'import sys; print(sys.executable, "%d.%d" % sys.version_info[:2])' 2>/dev/null) || return 1
  [[ " ${*:2} " == *" ${found##* } "* ]] && echo "${found% *}"
}

versions=("$@")
if [[ $# == 0 ]]; then
  versions=(3.12 3.11 3.13 3.14)
  try python3 "${versions[@]}" && exit
fi
for version in "${versions[@]}"; do
  for candidate in "python$version" "$HOME/.pyenv/versions/$version"*/bin/python"$version" python3 python; do
    try "$candidate" "$version" && exit
  done
done
echo "jaxsok: no Python ${versions[*]} found on PATH or in ~/.pyenv/versions. Install one, or name one:" \
  "make PYTHON=/path/to/python" >&2
exit 1
