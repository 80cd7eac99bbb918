"""Compiles and loads the library that lets torch use CUDA tensors without data or a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.contracts.exit_codes import ExitCode, Failure

_SOURCE = Path(__file__).with_name("cuda_guard.cpp")
# In the order of their dependencies. A CPU build has no `libtorch_cuda.so`. A CUDA build registers
# its own device there, which the library that is loaded next replaces.
_TORCH_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch_cuda.so")


class RehearsalUnavailable(Failure):
    """This machine or this configuration cannot be rehearsed."""

    exit_code = ExitCode.REFUSED


def load_cuda_guard() -> None:
    """Load the library into this process, before torch is imported.

    It is compiled once for each version of torch, in about two seconds. Raises
    `RehearsalUnavailable` without a C++ compiler, or if torch was imported already.
    """
    load_library(_SOURCE)


def load_library(source: Path) -> ctypes.CDLL:
    """Compile a library of torch's headers if needed, and load it as `load_cuda_guard` does."""
    if "torch" in sys.modules:
        raise RehearsalUnavailable("torch was imported before the rehearsal began")
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise RehearsalUnavailable("torch is not installed. Run make install")
    torch_directory = Path(spec.origin).parent
    library = _library_path(source)
    if not library.exists():
        _compile(source, torch_directory, library)
    for name in _TORCH_LIBRARIES:
        file = torch_directory / "lib" / name
        if file.exists():
            ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library))


def _library_path(source: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    key = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    version = importlib.metadata.version("torch")
    return cache / "megatron_rl" / f"{source.stem}-{version}-{key}.so"


def _compile(source: Path, torch_directory: Path, library: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RehearsalUnavailable(
            f"the rehearsal compiles {source} once, and no C++ compiler was "
            "found. Install one (Debian: apt install g++), or set CXX=/path/to/compiler"
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    partial = library.with_name(f"{library.name}.{os.getpid()}")
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", str(source)]
    include = torch_directory / "include"
    command += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    command += [f"-L{torch_directory / 'lib'}"]
    command += ["-lc10", "-ltorch_cpu", "-o", str(partial)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if result.returncode:
        raise RehearsalUnavailable(
            f"{compiler} cannot compile {source.name}: {result.stderr.strip()[-600:]}"
        )
    os.replace(partial, library)  # another process may compile it at the same time
