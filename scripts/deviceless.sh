#!/usr/bin/env bash
# Installs what compiles a program for a GPU that is not there: the CUDA plugin of this environment's jaxlib, and the
# compiler of XLA's own kernels; not the CUDA libraries, which only running needs.
#
# It is put beside the environment's packages, into share/deviceless, not among them: a plugin that cannot run would
# have JAX complain at every start. A test that compiles for a GPU starts a process with that folder on PYTHONPATH and
# JAX_PLATFORMS=cpu, and is skipped where there is none.
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
