"""Variable-length attention with the signature of each torch version.

The attention functions themselves are written out here.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.mcore.layers.varlen_attention import VarlenAttention
from megatron_rl.models.families import read_shape
from megatron_rl.planning import memory
from tests.support.configurations import configuration_of

LENGTHS = [7, 40, 9, 1]
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def each_alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    scale: float | None,
    gqa: bool,
) -> torch.Tensor:
    assert gqa or query.shape[1] == key.shape[1]
    rows = []
    for start, stop in itertools.pairwise(bounds.tolist()):
        q, k, v = (t[start:stop].transpose(0, 1)[None] for t in (query, key, value))
        rows.append(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)[0]
        )
    return torch.cat([row.transpose(0, 1) for row in rows])


def torch_2_10(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
) -> torch.Tensor:
    assert is_causal and (max_q, max_k) == (40, 40) and torch.equal(cu_seq_q, cu_seq_k)
    return each_alone(query, key, value, cu_seq_q, None, False)


def torch_2_11(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    assert window_size == (-1, 0)
    return each_alone(query, key, value, cu_seq_q, scale, False)


def torch_2_12(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    assert window_size == (-1, 0)
    return each_alone(query, key, value, cu_seq_q, scale, enable_gqa)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("function", [torch_2_10, torch_2_11, torch_2_12])
def test_every_signature_attends_within_each_sequence(
    function: Any, groups: int, scale: float | None
) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(LENGTHS), heads, 8) for heads in (4, groups, groups))
    expected_output = each_alone(query, key, value, BOUNDS, scale, True)
    output = VarlenAttention(function)(
        query, key, value, cu_seqlens=BOUNDS, max_seqlen=40, scale=scale
    )
    torch.testing.assert_close(output, expected_output, rtol=1e-5, atol=1e-6)


class _SavesWhatItTakes(torch.autograd.Function):
    """Saves queries, keys, values and outputs, as torch's variable-length attention does."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> torch.Tensor:
        output = torch.zeros_like(query)
        ctx.save_for_backward(query, key, value, output)
        return output


def without_groups(
    query: Any, key: Any, value: Any, *_: Any, scale: Any = None, window_size: Any = None
) -> Any:
    return _SavesWhatItTakes.apply(query, key, value)


def with_groups(
    query: Any,
    key: Any,
    value: Any,
    *_: Any,
    scale: Any = None,
    window_size: Any = None,
    enable_gqa: bool = False,
) -> Any:
    return _SavesWhatItTakes.apply(query, key, value)


def bytes_saved(function: Any, rows: int, heads: int, groups: int, dim: int) -> int:
    """Bytes that autograd saves of attention in bfloat16."""
    query, key, value = (
        torch.zeros(rows, count, dim, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, groups, groups)
    )
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = VarlenAttention(function)(
            query, key, value, cu_seqlens=BOUNDS, max_seqlen=40, scale=None
        )
    assert output.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("takes_groups", [True, False])
def test_the_memory_plan_counts_what_attention_saves(
    monkeypatch: pytest.MonkeyPatch, takes_groups: bool, heads: int, groups: int
) -> None:
    """Without grouped queries in torch, keys and values are saved once for each query.

    Other activations do not depend on the heads, so that plans for other heads differ by attention.
    """
    rows = 24
    dim = 16
    c = configuration_of(["experiment=smoke", "model.spec=local"])
    c = replace(
        c,
        model=replace(c.model, dtype="bfloat16"),
        data=replace(c.data, max_prompt_tokens=8),
        train=replace(c.train, tokens_per_micro_batch=rows),
    )
    num_layers = read_shape(c.model.path).num_layers

    def planned_bytes(heads: int, groups: int, spec: Literal["local", "te"] = "local") -> int:
        shape = replace(
            read_shape(c.model.path),
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=dim,
            qk_norm=False,
        )
        settings = replace(c, model=replace(c.model, spec=spec))
        return memory.rank_memory(settings, shape, world_size=1, stage=0).activations

    function = with_groups if takes_groups else without_groups
    difference = bytes_saved(function, rows, heads, groups, dim)
    difference -= bytes_saved(function, rows, 1, 1, dim)
    monkeypatch.setattr(memory, "torch_takes_groups", lambda: takes_groups)
    assert planned_bytes(heads, groups) - planned_bytes(1, 1) == num_layers * difference
    bytes_with_te = planned_bytes(heads, groups, "te")
    monkeypatch.setattr(memory, "torch_takes_groups", lambda: True)
    assert bytes_with_te == planned_bytes(heads, groups)


def test_the_memory_plan_knows_the_installed_torch() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    parameters = inspect.signature(varlen.varlen_attn).parameters
    assert memory.torch_takes_groups() == ("enable_gqa" in parameters)


@pytest.mark.parametrize(
    ("version", "takes_groups"),
    [("2.9.1", False), ("2.11.0+cu130", False), ("2.12.0", True), ("3.0.0a0+git1", True)],
)
def test_the_memory_plan_reads_the_version_of_torch(
    monkeypatch: pytest.MonkeyPatch, version: str, takes_groups: bool
) -> None:
    monkeypatch.setattr(memory.importlib.metadata, "version", lambda name: version)
    assert memory.torch_takes_groups.__wrapped__() is takes_groups


def test_installed_torch_has_it_for_cuda_only() -> None:
    attention = VarlenAttention()
    x = torch.zeros(3, 4, 8, dtype=torch.bfloat16)
    assert attention.is_available
    assert not attention.supports(x, x, x), "on a CPU"


class OnCuda(torch.Tensor):
    """A tensor on the CPU that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("dtype", "dims", "is_supported"),
    [
        (torch.bfloat16, (64, 64, 64), True),
        (torch.float16, (256, 256, 256), True),
        (torch.float32, (64, 64, 64), False),
        (torch.bfloat16, (192, 192, 128), False),  # multi-head latent attention
        (torch.bfloat16, (12, 12, 12), False),
        (torch.bfloat16, (264, 264, 264), False),
    ],
)
def test_unsupported_dtypes_and_head_sizes_are_rejected(
    dtype: torch.dtype, dims: tuple[int, ...], is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    inputs = [torch.zeros(3, 4, dim, dtype=dtype).as_subclass(OnCuda) for dim in dims]
    assert VarlenAttention(torch_2_12).supports(*inputs) is is_supported


@pytest.mark.parametrize(("capability", "is_supported"), [((7, 5), False), ((8, 0), True)])
def test_gpus_before_ampere_have_no_flash_attention(
    capability: tuple[int, int], is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    x = torch.zeros(3, 4, 64, dtype=torch.bfloat16).as_subclass(OnCuda)
    assert VarlenAttention(torch_2_12).supports(x, x, x) is is_supported
