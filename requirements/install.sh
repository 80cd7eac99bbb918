#!/usr/bin/env bash
# Fill the virtual environment VENV with the pinned packages, in the two steps that SGLang needs.
# usage: requirements/install.sh VENV
set -euo pipefail

here=$(dirname "$0")
pip=("$1/bin/python" -m pip --disable-pip-version-check)
install=("${pip[@]}" install --quiet --no-warn-conflicts --constraint "$here/constraints.txt" --constraint "$here/no-cuda.txt")

echo "Installing pinned packages into $1 (about 3 GB, a few minutes) ..."
if ! "${install[@]}" -r "$here/runtime.txt" -r "$here/dev.txt"; then
    echo "Installation failed. If pip names cuda-toolkit or an nvidia-*-cu* package above, the index it uses offers only" >&2
    echo "the CUDA build of torch: point pip at PyTorch's CPU wheels (--extra-index-url in pip.conf or PIP_EXTRA_INDEX_URL)." >&2
    exit 1
fi
"${install[@]}" --no-deps -r "$here/nodeps.txt"
# transformers imports a torchvision that it finds, and one built for CUDA cannot be imported beside a CPU torch.
"$1/bin/python" -c 'import torchvision' 2>/dev/null || "${pip[@]}" uninstall -qq --yes torchvision

cuda=$("${pip[@]}" list --format=freeze | grep -iE '^(cuda-toolkit|nvidia-(cu|nccl|nvjitlink|nvshmem|nvtx))' || true)
if [ -n "$cuda" ]; then
    printf 'CUDA packages were installed on a CPU machine; remove %s and run make install again:\n%s\n' "$1" "$cuda" >&2
    exit 1
fi
