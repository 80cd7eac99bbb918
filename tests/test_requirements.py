"""Pinned versions are in the ranges that the packages which need them declare."""

import importlib.metadata
import os
import re
import subprocess
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
# SGLang's extra declares 0.1.2, but its code imports checkpoint_engine.device_utils, which only
# later versions have. sglang_bridge/weights/ipc speaks the protocol of the pinned one.
OUTSIDE = {("sglang", "checkpoint-engine")}

RESOLVER_SECONDS = 400
# Of a machine with its own packages
LOCAL_PACKAGES = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT")


def pins(name: str) -> dict[str, str]:
    """Pinned versions of a file, by canonical name."""
    lines = (REQUIREMENTS / name).read_text().splitlines()
    matches = [re.fullmatch(r"([\w.-]+)==(\S+)", line) for line in lines]
    return {canonicalize_name(match[1]): match[2] for match in matches if match is not None}


@pytest.mark.parametrize("package", ["megatron-core", "sglang"])
def test_versions_of_the_gpu_image_are_in_declared_ranges(package: str) -> None:
    """Transformer Engine is one of them: Megatron's layers call its internals.

    A newer Transformer Engine may have moved them.
    """
    versions = pins("gpu-constraints.txt")
    requirements = [Requirement(text) for text in importlib.metadata.requires(package) or ()]
    ranges = {
        canonicalize_name(requirement.name): requirement.specifier
        for requirement in requirements
        if canonicalize_name(requirement.name) in versions
    }
    assert ranges, f"no version in gpu-constraints.txt is there because of {package}"
    outside = {
        name: str(specifier)
        for name, specifier in ranges.items()
        if versions[name] not in specifier and (package, name) not in OUTSIDE
    }
    assert outside == {}


def test_triton_of_the_gpu_image_is_what_its_torch_declares() -> None:
    """Torch 2.14.1 for CUDA declares triton~=3.8.0, which pip enforces in the image."""
    versions = pins("gpu-constraints.txt")
    assert versions["torch"] == "2.14.1"
    assert versions["triton"].startswith("3.8.")


@pytest.mark.slow
@pytest.mark.timeout(RESOLVER_SECONDS + 60)
def test_pip_resolves_all_pins_from_the_ordinary_index(tmp_path: Path) -> None:
    """On a machine without local wheels and with an empty pip configuration.

    pip reads metadata alone. It takes about two minutes of processor time, and more on a slow
    network or a busy machine.
    """
    venv.create(tmp_path / "venv", with_pip=True)
    options = {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "10"}
    kept = {name: value for name, value in os.environ.items() if name not in LOCAL_PACKAGES}
    script = [str(REQUIREMENTS / "install.sh"), str(tmp_path / "venv"), "--dry-run"]
    process = subprocess.run(
        ["timeout", str(RESOLVER_SECONDS), *script],
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
