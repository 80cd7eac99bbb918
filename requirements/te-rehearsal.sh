#!/usr/bin/env bash
# Install Transformer Engine beside torch's CUDA build into the virtual environment VENV. No GPU is needed.
#
# usage: requirements/te-rehearsal.sh VENV
#
# PYTHON=... chooses the interpreter. CUDA_HOME names a CUDA 13 toolkit: its headers compile the torch extension of
# Transformer Engine. The download has 3 GB and the environment 7 GB.
set -euo pipefail

venv=$(realpath -m "$1") here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3.12}
free_kib=$(df --output=avail -k "$(dirname "$venv")" | tail -1)
if [ "$free_kib" -lt 15000000 ]; then
    echo "$venv needs 15 GB while it is made, and the disk has $((free_kib / 1000000)) GB. Free some space" >&2
    exit 1
fi
cuda=${CUDA_HOME:-/usr/local/cuda}
if [ ! -f "$cuda/include/cuda_profiler_api.h" ]; then
    echo "No CUDA toolkit at $cuda. Install the one of CUDA 13, and set CUDA_HOME" >&2
    exit 1
fi
command -v c++ >/dev/null || { echo "No C++ compiler. Install one (Debian: apt install g++)" >&2; exit 1; }

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
files=(constraints.txt gpu-constraints.txt te-rehearsal-constraints.txt)
"$venv/bin/python" "$here/merge_constraints.py" "${files[@]/#/$here/}" >"$scratch/merged.txt"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
install=("${pip[@]}" install --no-warn-conflicts --constraint "$scratch/merged.txt")
"${install[@]}" torch setuptools wheel -r "$here/te-rehearsal.txt"
version=$(sed -n 's/^transformer-engine==//p' "$scratch/merged.txt")
"${install[@]}" --no-deps megatron-core "transformer_engine==$version" "transformer_engine_cu13==$version"

# The extension comes as source. One translation unit parses torch's headers once, which takes five minutes of CPU and
# 4 GB of memory. Nothing here runs its functions, so the compiler need not optimize them.
"${pip[@]}" download --no-deps --no-build-isolation --no-binary :all: --dest "$scratch" "transformer_engine_torch==$version"
tar -xzf "$scratch"/transformer_engine_torch-*.tar.gz -C "$scratch"
read -r packages headers suffix < <("$venv/bin/python" -c 'import sysconfig
print(sysconfig.get_path("purelib"), sysconfig.get_path("include"), sysconfig.get_config_var("EXT_SUFFIX"))')
cd "$scratch/transformer_engine_torch-$version"
find csrc -name '*.cpp' | LC_ALL=C sort | sed 's/.*/#include "&"/' >extension.cc
nvidia=$packages/nvidia
export CPATH=$nvidia/cudnn/include:$nvidia/nccl/include:$nvidia/cu13/include
c++ -O0 -w -fPIC -shared -fvisibility=hidden -std=c++20 -DTORCH_API_INCLUDE_EXTENSION_H \
    -DTORCH_EXTENSION_NAME=transformer_engine_torch -I. "-I$cuda/include" -Icommon_headers -Icommon_headers/common \
    -Icommon_headers/common/include -Icsrc -Icsrc/extensions "-I$packages/torch/include" \
    "-I$packages/torch/include/torch/csrc/api/include" "-I$headers" extension.cc "-L$packages/torch/lib" \
    -lc10 -ltorch -ltorch_cpu -ltorch_python -o "$packages/transformer_engine_torch$suffix"

# Transformer Engine's library needs the driver's when it is loaded, and nothing here calls the driver. An empty one does.
c++ -shared -Wl,-soname,libcuda.so.1 -x c++ /dev/null -o "$packages/libcuda.so.1"
echo "import ctypes; ctypes.CDLL('$packages/libcuda.so.1', ctypes.RTLD_GLOBAL)" >"$packages/no_driver.pth"
"$venv/bin/python" -W ignore -c 'import torch, transformer_engine.pytorch' >/dev/null
