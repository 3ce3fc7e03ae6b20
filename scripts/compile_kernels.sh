#!/usr/bin/env bash
# Compiles every kernel for the RTX 3090 and for Hopper, on a machine without a GPU: scripts/compile_kernels.py says how.
# JAX's CUDA compiler and NVIDIA's assembler go to .venv-aot, beside .venv, where no test finds a CUDA plugin without a
# GPU. They are 250 MB to download and 720 MB on disk; cuDNN and cuBLAS are not needed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

jax="$(.venv/bin/python -c 'import jax; print(jax.__version__)')"
packages=("jax-cuda13-plugin==$jax" "jax-cuda13-pjrt==$jax" nvidia-{cuda-nvcc,nvvm,cuda-crt,cuda-runtime}==13.*)
if [[ "$(cat .venv-aot/installed 2>/dev/null || true)" != "${packages[*]}" ]]; then
  echo "Installing the CUDA compilers for jax $jax" >&2
  rm -rf .venv-aot
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv-aot "${packages[@]}"
  echo "${packages[*]}" >.venv-aot/installed
fi

export JAX_PLATFORMS=cpu PYTHONPATH=".:.venv-aot${PYTHONPATH:+:$PYTHONPATH}"
exec .venv/bin/python scripts/compile_kernels.py "$@"
