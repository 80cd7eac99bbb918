#!/usr/bin/env bash
# Run the tests of router replay and whole training steps with a newer Megatron-Core, in a separate virtual environment.
#
# usage: requirements/replay_on_newer_megatron.sh [VERSION [VENV]]
#
# PYTHON=... chooses the interpreter. CUDA=1 accepts a CUDA build of torch, which takes gigabytes and runs without a GPU,
# if the index has no CPU build for that Python.
set -euo pipefail

version=${1:-0.19.2} venv=${2:-.venv-megatron-$version}
here=$(cd "$(dirname "$0")" && pwd)

usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }
for python in ${PYTHON:-python3.12 python3.13 python3}; do
    usable "$python" && break
    python=
done
if [ -z "$python" ]; then
    echo "Megatron-Core $version needs Python 3.12 or newer, which ${PYTHON:-python3.12, python3.13 and python3} is not." >&2
    echo "Install it, or name it: PYTHON=/path/to/python3.12" >&2
    exit 2
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
install=("${pip[@]}" install --quiet --no-warn-conflicts --constraint "$here/constraints.txt")
if [ "${CUDA:-0}" = 1 ]; then # with the versions of triton and CUDA that torch declares
    "${pip[@]}" install --quiet "$(grep -i '^torch==' "$here/constraints.txt")"
elif ! "${install[@]}" --constraint "$here/no-cuda.txt" torch; then
    echo "The index has no CPU build of torch for $("$python" --version). Add an index that has one, or set CUDA=1" >&2
    exit 1
fi
"${install[@]}" aiohttp annotated-types hydra-core llvmlite msgspec numba numpy omegaconf psutil pybase64 pyzmq safetensors \
    tensorboard tokenizers transformers hypothesis pytest pytest-timeout
"${pip[@]}" install --quiet --no-deps "megatron-core==$version"

cd "$here/.."
"$venv/bin/python" -c 'import megatron.core, platform, torch
print("Megatron-Core", megatron.core.__version__, "torch", torch.__version__, "Python", platform.python_version())' 2>/dev/null
export CUDA_VISIBLE_DEVICES= PYTHONPATH=$PWD:$PWD/kernels OMP_NUM_THREADS=1
exec "$venv/bin/python" -m pytest -q tests/mcore/test_replay.py tests/mcore/test_router_target.py \
    tests/mcore/test_replay_recompute.py tests/mcore/test_replay_sources.py tests/mcore/test_layer_spec.py \
    tests/mcore/test_same_sums.py tests/contracts/test_routes.py \
    tests/mcore/test_parallel.py tests/distributed/test_whole_steps.py
