#!/usr/bin/env bash
# Download the wheels that a GPU machine without network needs in addition to torch, triton and transformers.
#
# usage: requirements/gpu-bundle.sh VENV FOLDER [PYTHON_VERSION of that machine, default 3.12]
set -euo pipefail

here=$(dirname "$0")
folder=$2 version=${3:-3.12}
max_kib=51200
pip=("$1/bin/python" -m pip --disable-pip-version-check --quiet)
source_only=antlr4-python3-runtime # published without a wheel; its wheel holds only Python
platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)

rm -rf "$folder"
mkdir -p "$folder"
grep -vE "^(#|$source_only)" "$here/gpu-bundle.txt" >"$folder/names.txt"
"${pip[@]}" download --no-deps --only-binary :all: --python-version "$version" "${platforms[@]}" \
    --constraint "$here/constraints.txt" -r "$folder/names.txt" --dest "$folder"
rm "$folder/names.txt"
"${pip[@]}" wheel --no-deps --constraint "$here/constraints.txt" "$source_only" --wheel-dir "$folder"

size_kib=$(du -sk "$folder" | cut -f1)
if [ "$size_kib" -gt "$max_kib" ]; then
    echo "$folder has $size_kib KiB, more than $max_kib. Something large was added to gpu-bundle.txt" >&2
    exit 1
fi
echo "$folder: $(find "$folder" -name '*.whl' | wc -l) wheels for Python $version, $((size_kib / 1024)) MiB. Copy this folder and the repository, then:"
echo "    pip install --no-index --no-deps --target gpu-packages $(basename "$folder")/*.whl"
echo "    PYTHONPATH=gpu-packages python launch/gpu_check.py"
