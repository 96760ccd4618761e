#!/usr/bin/env bash
# Installs the packages that compile a program for an absent GPU: the CUDA plugin of this environment's jaxlib, and the
# compiler of XLA's own kernels. It omits the CUDA libraries, which are needed only to run.
#
# They are installed into share/deviceless, not among the environment's packages: with a plugin that cannot run, JAX
# would warn at every start. A test that compiles for a GPU starts a process with that folder on PYTHONPATH and
# JAX_PLATFORMS=cpu. If the folder is absent, the test is skipped.
#
# Usage: scripts/deviceless.sh PYTHON
set -euo pipefail

python=$1
version=$("$python" -c 'import jaxlib; print(jaxlib.__version__)')
folder=$("$python" -c 'import sys; print(sys.prefix)')/share/deviceless

[[ -d $folder/jax_cuda13_pjrt-$version.dist-info && -d $folder/jax_cuda13_plugin-$version.dist-info ]] && exit
rm -rf "$folder"
if ! "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$folder" \
  "jax-cuda13-pjrt==$version" "jax-cuda13-plugin==$version" "nvidia-cuda-nvcc>=13,<14" "nvidia-nvvm>=13,<14"; then
  rm -rf "$folder"
  echo "jaxsok: the CUDA plugin of jaxlib $version could not be installed: tests that compile for a GPU are skipped."
fi
