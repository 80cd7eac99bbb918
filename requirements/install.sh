#!/usr/bin/env bash
# Install the pinned packages into the virtual environment VENV, in the two steps that SGLang needs.
#
# usage: requirements/install.sh VENV
set -euo pipefail

here=$(dirname "$0")
pip=("$1/bin/python" -m pip --disable-pip-version-check)
install=("${pip[@]}" install --quiet --no-warn-conflicts --constraint "$here/constraints.txt" --constraint "$here/no-cuda.txt")

echo "Installing pinned packages into $1 (about 3 GB, a few minutes) ..."
if ! "${install[@]}" -r "$here/runtime.txt" -r "$here/dev.txt"; then
    echo "Installation failed. If pip names cuda-toolkit or an nvidia-*-cu* package above, the index has only the" >&2
    echo "CUDA build of torch. Add PyTorch's CPU wheels: --extra-index-url in pip.conf, or PIP_EXTRA_INDEX_URL." >&2
    exit 1
fi
"${install[@]}" --no-deps -r "$here/nodeps.txt"
# transformers imports torchvision if it is installed, and a CUDA build cannot be imported with a CPU torch.
"$1/bin/python" -c 'import torchvision' 2>/dev/null || "${pip[@]}" uninstall -qq --yes torchvision

cuda=$("${pip[@]}" list --format=freeze | grep -iE '^(cuda-toolkit|nvidia-(cu|nccl|nvjitlink|nvshmem|nvtx))' || true)
if [ -n "$cuda" ]; then
    printf 'CUDA packages were installed on a CPU machine. Remove %s, and run make install again:\n%s\n' "$1" "$cuda" >&2
    exit 1
fi
