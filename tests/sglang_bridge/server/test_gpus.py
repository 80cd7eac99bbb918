"""CUDA support of the installed torch, read from its files."""

from pathlib import Path

import pytest

from sglang_bridge.server.gpus import torch_uses_cuda

CUDA_TORCH = (
    "from typing import Optional\n\n__version__ = '2.14.1'\n"
    "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
)
CPU_TORCH = (
    "from typing import Optional\n\n__version__ = '2.14.1+cpu'\ncuda: Optional[str] = None\n"
)


def install_torch(directory: Path, version: str, text: str | None) -> list[str]:
    """Make a folder of packages with torch in this version.

    text: the content of torch/version.py. None means no such file.
    """
    metadata = directory / f"torch-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    if text is not None:
        (directory / "torch").mkdir()
        (directory / "torch" / "version.py").write_text(text)
    return [str(directory)]


@pytest.mark.parametrize(
    ("version", "text", "usable"),
    [
        ("2.14.1", CUDA_TORCH, True),
        ("2.14.1", CPU_TORCH, False),
        ("2.14.1", "cuda = None\n", False),
        ("2.14.1", "cuda = '13.0'\n", True),
        ("2.9.0a0+ecf3bae40a.nv25.01", CUDA_TORCH, True),  # a vendor's own build
        ("2.14.1+cpu", None, False),
        ("2.14.1+cu130", None, True),
        ("2.14.1+rocm6.3", None, False),
        ("2.14.1", None, False),
    ],
)
def test_cuda_support_is_read_from_torch_files(
    tmp_path: Path, version: str, text: str | None, usable: bool
) -> None:
    assert torch_uses_cuda(install_torch(tmp_path, version, text)) is usable


def test_without_torch_there_is_no_cuda_support(tmp_path: Path) -> None:
    assert torch_uses_cuda([str(tmp_path)]) is False


def test_cuda_support_matches_the_installed_torch() -> None:
    import torch

    assert torch_uses_cuda() is (torch.version.cuda is not None)
