"""Build what a GPU machine without network needs: `gpu-carry/`, at most 64 MiB.

    project.tar.xz   this repository, as committed
    base.tar.xz      packages of the trainer and its tests
    te.tar.xz        Transformer Engine with the code of one GPU architecture
    engine.tar.xz    SGLang for CPUs
    manifest.json    versions that the archives need, and their checksums

The other machine has torch, triton and transformers in the versions of gpu-carry-constraints.txt.
An environment with the same versions compiles Transformer Engine's extension, and then runs
`tests/lab/gpu_check` over the archives, without a GPU.

Usage: make gpu-carry, or python requirements/gpu_carry.py gpu-carry --environment .venv-gpu
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from merge_constraints import merge
from prune_fatbins import prune_library

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MAX_BYTES = 64 << 20
ENVIRONMENT_BYTES = 16 << 30  # while the environment and the archives are made
CONSTRAINTS = ("constraints.txt", "gpu-constraints.txt", "gpu-carry-constraints.txt")
# Published as source alone; its wheel holds only Python
SOURCE_ONLY = "antlr4-python3-runtime"
# pip matches the tag of a wheel exactly.
GLIBC_MINORS = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
# Parts of SGLang that a text engine does not load
SGLANG_EXTRAS = (
    "sglang/multimodal_gen",
    "sglang/test",
    "sglang/benchmark",
    "jedi/third_party",
)
# Installed in the environment that checks the archives: what the other machine has
MACHINE_PACKAGES = (
    "torch",
    "torchvision",
    "triton",
    "transformers",
    "numpy",
    "numba",
    "onnx",
    "onnxscript",
    "pillow",
    "regex",
    "requests",
    "scipy",
    "sentencepiece",
    "tiktoken",
)
# Of the C++ compiler, for Transformer Engine's extension
TE_INCLUDE = (
    ".",
    "common_headers",
    "common_headers/common",
    "common_headers/common/include",
    "csrc",
    "csrc/extensions",
)
TE_OPTIONS = (
    "-O1",
    "-w",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-std=c++17",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
    "-DTORCH_EXTENSION_NAME=transformer_engine_torch",
)
DRIVER = "libcuda.so.1"
TE_LIBRARIES = ("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python")
HEADER_PACKAGES = (
    "pybind11",
    "nvidia-cuda-cccl",
    "nvidia-cuda-crt",
    "nvidia-cuda-profiler-api",
    "setuptools",
    "wheel",
)


@dataclass(frozen=True)
class Target:
    """The machine that the archives are for.

    python: such as "3.12". architecture: compute capability without the dot, such as 90. The
    others are versions.
    """

    python: str
    torch: str
    triton: str
    transformer_engine: str
    architecture: int
    cuda: str = "13"


@dataclass(frozen=True)
class Archive:
    """One archive of site-packages: file name, checksum, and size on disk once unpacked."""

    file: str
    sha256: str
    unpacked_bytes: int


class Builder:
    """Build the archives of one target in a scratch folder."""

    def __init__(
        self, target: Target, pins: Sequence[str], environment: Path, scratch: Path
    ) -> None:
        self._target = target
        self._python = environment / "bin" / "python"
        self._scratch = scratch
        self._constraints = scratch / "constraints.txt"
        self._constraints.write_text("\n".join(pins) + "\n")

    def create_environment(self) -> None:
        """Install torch and the other packages of the machine, unless they are there."""
        if not self._python.exists():
            interpreter = find_python(self._target.python)
            run([interpreter, "-m", "venv", str(self._python.parents[1])])
        print(f"environment {self._python.parents[1]}: about 6 GB", flush=True)
        self._pip("install", *self._constrained(), *MACHINE_PACKAGES, *HEADER_PACKAGES)
        self._replace_driver()

    def _replace_driver(self) -> None:
        """Let Transformer Engine be loaded without a driver, none of whose functions is called."""
        packages = Path(self._ask("import sysconfig as s; print(s.get_path('purelib'))").strip())
        library = packages / DRIVER
        options = ["-shared", f"-Wl,-soname,{DRIVER}", "-x", "c++", "/dev/null", "-o", str(library)]
        run([os.environ.get("CXX", "c++"), *options])
        load = f"import ctypes; ctypes.CDLL({str(library)!r}, ctypes.RTLD_GLOBAL)\n"
        (packages / "no_driver.pth").write_text(load)

    def base(self) -> Path:
        """Return the site-packages of the trainer's requirements."""
        wheels = self._scratch / "base-wheels"
        names = read_names(HERE / "gpu-carry-base.txt")
        self._download(wheels, [name for name in names if name != SOURCE_ONLY])
        self._pip("wheel", "--no-deps", *self._constrained(), SOURCE_ONLY, "-w", str(wheels))
        return self._install(wheels, "base")

    def engine(self) -> Path:
        """Return the site-packages of SGLang for CPUs."""
        wheels = self._scratch / "engine-wheels"
        self._download(wheels, read_names(HERE / "gpu-carry-engine.txt"))
        site = self._install(wheels, "engine")
        for name in SGLANG_EXTRAS:
            shutil.rmtree(site / name, ignore_errors=True)
        # In Rust: servers that a run does not start, images, and a cache built for another torch
        for library in (site / "sglang").rglob("*.so"):
            library.unlink()
        return site

    def transformer_engine(self) -> Path:
        """Return the site-packages of Transformer Engine for one architecture."""
        version = self._target.transformer_engine
        wheels = self._scratch / "te-wheels"
        packages = [f"{name}=={version}" for name in ("transformer_engine", self._te_library())]
        self._download(wheels, packages)
        site = self._install(wheels, "te")
        shutil.rmtree(site / "transformer_engine" / "jax", ignore_errors=True)
        library = site / "transformer_engine" / "wheel_lib" / "libtransformer_engine.so"
        data = bytearray(library.read_bytes())
        counts = prune_library(data, self._target.architecture)
        if counts.incomplete:
            raise SystemExit(
                f"{counts.incomplete} kernels of {library.name} have no code for "
                f"sm_{self._target.architecture}. Choose another --architecture"
            )
        library.write_bytes(data)
        self._compile_extension(self._extension_source(version), site)
        return site

    def _te_library(self) -> str:
        return f"transformer_engine_cu{self._target.cuda}"

    def _extension_source(self, version: str) -> Path:
        """Download the source of transformer_engine_torch, as one translation unit.

        Torch's headers are then parsed once.
        """
        options = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
        source = f"transformer_engine_torch=={version}"
        self._pip("download", *options, "--dest", str(self._scratch), source)
        (archive,) = self._scratch.glob("transformer_engine_torch-*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(self._scratch, filter="data")
        folder = self._scratch / archive.name.removesuffix(".tar.gz")
        sources = sorted(folder.glob("csrc/**/*.cpp"))
        lines = [f'#include "{path.relative_to(folder)}"\n' for path in sources]
        (folder / "extension.cc").write_text("".join(lines))
        return folder

    def _compile_extension(self, folder: Path, site: Path) -> None:
        """Compile transformer_engine_torch into a folder of packages."""
        packages, headers, suffix = self._ask(
            "import sysconfig as s; print(s.get_path('purelib'), s.get_path('include'), "
            "s.get_config_var('EXT_SUFFIX'))"
        ).split()
        torch = f"{packages}/torch"
        nvidia = f"{packages}/nvidia"
        cuda = f"{nvidia}/cu{self._target.cuda}"
        include = [
            *TE_INCLUDE,
            f"{torch}/include",
            f"{torch}/include/torch/csrc/api/include",
            f"{packages}/pybind11/include",
            headers,
            f"{nvidia}/cudnn/include",
            f"{nvidia}/nccl/include",
            f"{cuda}/include",
            f"{cuda}/include/cccl",
        ]
        command = [os.environ.get("CXX", "c++"), *TE_OPTIONS, *(f"-I{name}" for name in include)]
        command += ["extension.cc", f"-L{torch}/lib", *TE_LIBRARIES]
        run([*command, "-o", str(site / f"transformer_engine_torch{suffix}")], folder)

    def _download(self, folder: Path, packages: Iterable[str]) -> None:
        platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
        platforms += ["manylinux2014_x86_64", "manylinux1_x86_64"]
        options = [word for name in platforms for word in ("--platform", name)]
        options += ["--implementation", "cp", "--python-version", self._target.python]
        options += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
        self._pip("download", *options, *self._constrained(), *packages)

    def _install(self, wheels: Path, name: str) -> Path:
        site = self._scratch / name
        files = [str(path) for path in sorted(wheels.glob("*.whl"))]
        options = ["--no-index", "--no-deps", "--no-compile", "--target", str(site)]
        self._pip("install", *options, *files)
        shutil.rmtree(site / "bin", ignore_errors=True)
        return site

    def _constrained(self) -> list[str]:
        return ["--constraint", str(self._constraints)]

    def _pip(self, *arguments: str) -> None:
        pip = [str(self._python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        run([*pip, *arguments])

    def _ask(self, program: str) -> str:
        command = [str(self._python), "-c", program]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Build all archives, check them, and print their sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-gpu")
    parser.add_argument("--python", default="3.12", help="Python of the GPU machine")
    parser.add_argument(
        "--architecture", type=int, default=90, help="compute capability without the dot"
    )
    options = parser.parse_args()
    start = time.monotonic()
    folder = options.folder.resolve()
    environment = options.environment.resolve()
    require_tools(folder.parent)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build(folder, environment, options.python, options.architecture)
    print_sizes(folder)
    check(folder, environment)
    print(f"{folder}: built and checked in {time.monotonic() - start:.0f} s")
    print(
        "Copy it to the GPU machine. There:\n"
        "    mkdir trainer && tar -C trainer -xJf gpu-carry/project.tar.xz && cd trainer\n"
        "    python3 tests/lab/gpu_check --carry ../gpu-carry --part 1 --out results"
    )


def build(folder: Path, environment: Path, python: str, architecture: int) -> None:
    """Write the archives and their manifest."""
    pins = merge([(HERE / name).read_text() for name in CONSTRAINTS])
    versions = dict(pin.lower().split("==") for pin in pins if "==" in pin)
    target = Target(
        python=python,
        torch=versions["torch"],
        triton=versions["triton"],
        transformer_engine=versions["transformer-engine"],
        architecture=architecture,
    )
    with tempfile.TemporaryDirectory(prefix="gpu-carry-", dir=folder.parent) as scratch:
        builder = Builder(target, pins, environment, Path(scratch))
        builder.create_environment()
        archives = {
            "base": pack(builder.base(), folder / "base.tar.xz"),
            "te": pack(builder.transformer_engine(), folder / "te.tar.xz"),
            "engine": pack(builder.engine(), folder / "engine.tar.xz"),
        }
    pack_project(folder / "project.tar.xz")
    manifest = asdict(target) | {
        "archives": {name: asdict(archive) for name, archive in archives.items()}
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def require_tools(folder: Path) -> None:
    """End the program if a compiler, xz or disk space is missing."""
    for tool in (os.environ.get("CXX", "c++"), "xz", "tar", "git"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} was not found. Install it (Debian: g++, xz-utils, tar, git)")
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < ENVIRONMENT_BYTES:
        raise SystemExit(
            f"{folder} has {free / 1e9:.0f} GB free, and the environment and the archives need "
            f"{ENVIRONMENT_BYTES / 1e9:.0f} GB while they are made. Free some space"
        )


def find_python(version: str) -> str:
    """Return the interpreter of a version, or end the program."""
    name = f"python{version}"
    candidates = [os.environ.get("CARRY_PYTHON", ""), name]
    candidates += map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}"))
    for candidate in filter(None, candidates):
        command = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True)
        except OSError:
            continue
        if answer.stdout.strip() == version:
            return candidate
    raise SystemExit(
        f"{name} was not found. Install Python {version} with its headers, or name it with "
        f"CARRY_PYTHON=/path/to/{name}"
    )


def read_names(file: Path) -> list[str]:
    """Return the lines of a list of packages, without comments."""
    lines = map(str.strip, file.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def pack(site: Path, file: Path) -> Archive:
    """Pack a folder of packages reproducibly."""
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    tar = ["tar", "--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0"]
    run([*tar, "-I", "xz -7 -T0", "-C", str(site), "-cf", str(file), "."])
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    shutil.rmtree(site)
    return Archive(file.name, digest, size)


def pack_project(file: Path) -> None:
    """Pack the commit that is checked out."""
    tar = file.with_suffix("")
    run(["git", "archive", "--output", str(tar), "HEAD"], ROOT)
    run(["xz", "-6", "--force", str(tar)])


def print_sizes(folder: Path) -> None:
    """Print the size of each file. End the program if they are too large together."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    for name, size in sizes.items():
        print(f"{size / 2**20:8.1f} MiB  {name}")
    total = sum(sizes.values())
    print(f"{total / 2**20:8.1f} MiB  together, at most {MAX_BYTES >> 20}")
    if total > MAX_BYTES:
        raise SystemExit(
            f"{folder} is {(total - MAX_BYTES) / 2**20:.1f} MiB too large. Something large was "
            "added to requirements/gpu-carry-*.txt"
        )


def check(folder: Path, environment: Path) -> None:
    """Run stages over the archives in an environment of the same versions, without a GPU.

    Transformer Engine is imported, and SGLang generates for a trainer.
    """
    python = str(environment / "bin" / "python")
    with tempfile.TemporaryDirectory(prefix="gpu-carry-check-") as scratch:
        out = Path(scratch) / "out"
        arguments = ["--small", "--carry", str(folder), "--out", str(out)]
        stages = ["machine", "engine_on_cpu"]
        run([python, "tests/lab/gpu_check", *arguments, "--only", *stages], ROOT)
        record = json.loads((out / "check.json").read_text())
    imports = record["stages"][0]["values"]["imports"]
    missing = {"sglang", "transformer_engine.pytorch"} - set(imports)
    if missing:
        raise SystemExit(f"{', '.join(sorted(missing))} cannot be imported from the archives")


def run(command: Sequence[str], folder: Path | None = None) -> None:
    """Run a command, or end the program with its error."""
    result = subprocess.run(command, cwd=folder)
    if result.returncode:
        words = " ".join(command)
        raise SystemExit(f"code {result.returncode} from: {words[:300]}")


if __name__ == "__main__":
    main()
