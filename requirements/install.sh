#!/usr/bin/env bash
# Install the pinned packages into the virtual environment VENV, in the two steps that SGLang needs.
#
# usage: requirements/install.sh VENV [--dry-run]
#
# It takes the CPU build of torch where pip finds one, and otherwise the CUDA build, which runs without a GPU too.
# --dry-run resolves the versions of both steps and installs nothing.
set -euo pipefail

here=$(dirname "$0")
venv=$1
dry=(${2:+"$2"})
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
constraints=$here/constraints.txt
options=(--quiet --no-warn-conflicts)

# An environment of an earlier version stays until it is removed.
if ! "$venv/bin/python" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))'; then
    echo "$venv has $("$venv/bin/python" -V). Megatron-Core needs 3.12 or 3.13: remove $venv and start again" >&2
    exit 1
fi

# no-cuda.txt refuses what only a CUDA build requires, so that pip reads metadata and downloads nothing.
if "${pip[@]}" install --quiet --dry-run --constraint "$constraints" --constraint "$here/no-cuda.txt" torch \
    >"$scratch/torch.log" 2>&1; then
    options+=(--constraint "$here/no-cuda.txt")
    echo "Installing pinned packages into $venv (about 3 GB, a few minutes) ..."
else
    # Each CUDA build of torch declares its own version of triton.
    grep -v '^triton==' "$constraints" >"$scratch/constraints.txt"
    constraints=$scratch/constraints.txt
    echo "pip finds no CPU build of torch, so the CUDA build is taken. It runs without a GPU too."
    echo "Installing pinned packages into $venv (about 6 GB, several minutes) ..."
    echo "To save 3 GB, add PyTorch's index of CPU builds to pip's extra-index-url and start again."
fi
install=("${pip[@]}" install "${options[@]}" "${dry[@]}" --constraint "$constraints")
if ! "${install[@]}" -r "$here/runtime.txt" -r "$here/dev.txt"; then
    sed 's/^/pip on torch alone: /' "$scratch/torch.log" | tail -5 >&2
    echo "Installation failed: see pip's message above" >&2
    exit 1
fi
"${install[@]}" --no-deps -r "$here/nodeps.txt"
if [ ${#dry[@]} -gt 0 ]; then exit 0; fi
# transformers imports torchvision if it is installed, and one for another torch cannot be imported.
"$venv/bin/python" -c 'import torchvision' 2>/dev/null || "${pip[@]}" uninstall -qq --yes torchvision
