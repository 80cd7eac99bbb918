"""Pinned versions are in the ranges that the packages which need them declare."""

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
# SGLang's extra declares 0.1.2, but its code imports checkpoint_engine.device_utils, which only
# later versions have. sglang_bridge/weights/ipc speaks the protocol of the pinned one.
OUTSIDE = {"checkpoint-engine"}

RESOLVER_SECONDS = 400
# Of a machine with its own packages
LOCAL_PACKAGES = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT")


def pins(name: str) -> dict[str, str]:
    """Pinned versions of a file, by canonical name."""
    lines = (REQUIREMENTS / name).read_text().splitlines()
    matches = [re.fullmatch(r"([\w.-]+)==(\S+)", line) for line in lines]
    return {canonicalize_name(match[1]): match[2] for match in matches if match is not None}


def test_versions_of_the_cuda_image_are_those_that_sglang_declares() -> None:
    """Its compiled kernels are built against one torch."""
    versions = pins("gpu-constraints.txt")
    requirements = [Requirement(text) for text in importlib.metadata.requires("sglang") or ()]
    ranges = {
        canonicalize_name(requirement.name): requirement.specifier
        for requirement in requirements
        if canonicalize_name(requirement.name) in versions
    }
    assert "torch" in ranges
    outside = {
        name: str(specifier)
        for name, specifier in ranges.items()
        if versions[name] not in specifier and name not in OUTSIDE
    }
    assert outside == {}


def resolve(*command: str) -> None:
    """Run a command of pip's resolver without local wheels and with an empty pip configuration.

    Skips the test where the network is slow or absent.
    """
    options = {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "10"}
    kept = {name: value for name, value in os.environ.items() if name not in LOCAL_PACKAGES}
    process = subprocess.run(
        ["timeout", str(RESOLVER_SECONDS), *command],
        env=kept | options,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode == 124:
        pytest.skip(f"the network is slow: pip has not resolved the pins in {RESOLVER_SECONDS} s")
    if "Retrying" in process.stderr:
        pytest.skip(f"the network is absent or fails: {process.stderr.splitlines()[0][:200]}")
    assert process.returncode == 0, process.stderr


@pytest.mark.slow
@pytest.mark.timeout(RESOLVER_SECONDS + 60)
def test_pip_resolves_all_pins_from_the_ordinary_index(tmp_path: Path) -> None:
    """Resolving takes about two minutes of processor time, and more on a slow network."""
    venv.create(tmp_path / "venv", with_pip=True)
    resolve(str(REQUIREMENTS / "install.sh"), str(tmp_path / "venv"), "--dry-run")


@pytest.mark.slow
@pytest.mark.timeout(RESOLVER_SECONDS + 60)
def test_pip_resolves_the_versions_of_the_cuda_image(tmp_path: Path) -> None:
    """As the Dockerfile installs them, without the extension that compiles against torch."""
    script = ["merge_constraints.py", "constraints.txt", "gpu-constraints.txt"]
    merged = tmp_path / "merged.txt"
    with merged.open("w") as file:
        subprocess.run([sys.executable, *script], cwd=REQUIREMENTS, stdout=file, check=True)
    packages = (REQUIREMENTS / "gpu.txt").read_text()
    assert "[pytorch,core-cu13]" in packages
    wheels = tmp_path / "gpu.txt"
    wheels.write_text(packages.replace("[pytorch,core-cu13]", "[core-cu13]"))
    venv.create(tmp_path / "venv", with_pip=True)
    pip = [str(tmp_path / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--dry-run"]
    files = [wheels, REQUIREMENTS / "runtime.txt", REQUIREMENTS / "dev.txt"]
    requirements = [argument for file in files for argument in ("--requirement", str(file))]
    resolve(*pip, "--constraint", str(merged), *requirements)
