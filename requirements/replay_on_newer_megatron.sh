#!/usr/bin/env bash
# Run the tests of router replay, and whole training steps in every grid, on a newer Megatron-Core, in a virtual
# environment of its own.
# usage: requirements/replay_on_newer_megatron.sh [VERSION [VENV]]      PYTHON=... chooses the interpreter
#
# CUDA=1 accepts a CUDA build of torch (gigabytes; it runs without a GPU) where the index has no other for that Python.
set -euo pipefail

version=${1:-0.19.2} venv=${2:-.venv-megatron-$version}
here=$(cd "$(dirname "$0")" && pwd)

usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }
for python in ${PYTHON:-python3.12 python3.13 python3}; do
    usable "$python" && break
    python=
done
if [ -z "$python" ]; then
    echo "Megatron-Core $version needs Python 3.12 or newer, and ${PYTHON:-python3.12, python3.13 and python3} here is none: install one, or name it with PYTHON=/path/to/python3.12" >&2
    exit 2
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
install=("${pip[@]}" install --quiet --no-warn-conflicts --constraint "$here/constraints.txt")
if [ "${CUDA:-0}" = 1 ]; then  # with the triton and the libraries that it names itself
    "${pip[@]}" install --quiet "$(grep -i '^torch==' "$here/constraints.txt")"
elif ! "${install[@]}" --constraint "$here/no-cuda.txt" torch; then
    echo "The index offers no CPU build of torch for $("$python" --version): add one that does, or accept the CUDA build with CUDA=1" >&2
    exit 1
fi
"${install[@]}" aiohttp annotated-types hydra-core llvmlite msgspec numba numpy omegaconf psutil pybase64 pyzmq safetensors \
    tensorboard tokenizers transformers hypothesis pytest pytest-timeout
"${pip[@]}" install --quiet --no-deps "megatron-core==$version"

cd "$here/.."
"$venv/bin/python" -c 'import megatron.core, platform, torch
print("Megatron-Core", megatron.core.__version__, "torch", torch.__version__, "Python", platform.python_version())' 2>/dev/null
export CUDA_VISIBLE_DEVICES= PYTHONPATH=$PWD:$PWD/kernels:$PWD/tests OMP_NUM_THREADS=1
exec "$venv/bin/python" -m pytest -q tests/mcore/test_replay.py tests/mcore/test_router_target.py \
    tests/mcore/test_replay_recompute.py tests/mcore/test_replay_sources.py tests/mcore/test_layer_spec.py \
    tests/mcore/test_same_sums.py tests/contracts/test_routes.py \
    tests/mcore/test_parallel.py tests/distributed/test_whole_steps.py
