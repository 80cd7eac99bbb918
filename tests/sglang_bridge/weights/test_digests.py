"""Streamed checksums equal SGLang's checksums of whole parameters."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_bridge.weights.digests import CpuDigest, GpuDigest

TILE_WORDS = 8192


def digest_of(kind: type[CpuDigest] | type[GpuDigest], tensor: torch.Tensor, parts: int = 1) -> str:
    digest = kind()
    for part in tensor.contiguous().view(-1).view(torch.uint8).tensor_split(parts):
        digest.update(part)
    return digest.hexdigest()


def test_cpu_digest_is_the_beginning_of_sha256() -> None:
    tensor = torch.randn(33)
    assert digest_of(CpuDigest, tensor) == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
    assert digest_of(CpuDigest, tensor, 7) == digest_of(CpuDigest, tensor)


@pytest.mark.parametrize(
    ("tensor", "expected_digest"),
    [
        (torch.arange(1, 6, dtype=torch.bfloat16), "ce4efcfa7a945cf1"),
        (torch.arange(2 * TILE_WORDS + 3, dtype=torch.float32), "b91ba29dc7780883"),
        (torch.zeros(0), "0000000000000000"),
    ],
    ids=["ten bytes", "two tiles and a part", "nothing"],
)
def test_gpu_digest_has_the_values_that_the_sglang_kernel_gave(
    tensor: torch.Tensor, expected_digest: str
) -> None:
    """The kernel itself takes seconds to load: a nightly test compares with it."""
    assert digest_of(GpuDigest, tensor) == expected_digest


@pytest.mark.nightly
def test_gpu_digest_equals_the_sglang_kernel(tmp_path: Path) -> None:
    """Whole tiles, a part of one, odd numbers of bytes, and more than one tile."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, generator=generator),
        torch.randn(5, generator=generator).bfloat16(),  # ten bytes: the last word is padded
        torch.randn(TILE_WORDS, generator=generator),
        torch.randn(2 * TILE_WORDS + 3, generator=generator),
        torch.randn(3, TILE_WORDS + 1, generator=generator).bfloat16(),
        torch.zeros(0),
    ]
    torch.save(tensors, tmp_path / "tensors.pt")
    script = Path(__file__).with_name("sglang_gpu_hash.py")
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "tensors.pt")],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [digest_of(GpuDigest, tensor) for tensor in tensors] == json.loads(result.stdout)


@pytest.mark.parametrize("kind", [CpuDigest, GpuDigest])
def test_digest_does_not_depend_on_part_sizes(kind: type[CpuDigest] | type[GpuDigest]) -> None:
    tensor = torch.randn(2 * TILE_WORDS + 77).bfloat16()
    assert {digest_of(kind, tensor, parts) for parts in (1, 2, 3, 5, 1000)} == {
        digest_of(kind, tensor)
    }


@pytest.mark.parametrize("kind", [CpuDigest, GpuDigest])
def test_digest_depends_on_every_bit_and_the_order(kind: type[CpuDigest] | type[GpuDigest]) -> None:
    tensor = torch.randn(TILE_WORDS + 5)
    before = digest_of(kind, tensor)
    other = tensor.clone()
    other.view(torch.int32)[TILE_WORDS] ^= 1 << 17
    assert digest_of(kind, other) != before
    assert digest_of(kind, tensor.roll(1)) != before
    assert digest_of(kind, tensor[:-1]) != before
