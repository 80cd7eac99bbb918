"""The rehearsal of Transformer Engine notices what it exists to notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.schema import ModelSettings
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape


@pytest.fixture(scope="module")
def tiny(rehearsal: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE."""
    from tests.lab.te_rehearsal.families import write_tiny_model

    path = tmp_path_factory.mktemp("tiny")
    write_tiny_model("qwen3_moe", path)
    return path


def settings_of(path: Path, **options: Any) -> ModelSettings:
    return ModelSettings(path=str(path), dtype="bfloat16", **options)


def forward(model: Any) -> torch.Tensor:
    from tests.support.packed_sequences import pack

    batch = pack([0])
    logits: torch.Tensor = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=batch.packed_seq_params(),
    )
    return logits


def test_the_gpu_branch_of_the_preparation_runs(rehearsal: Any) -> None:
    import megatron.core.optimizer as optimizer
    from transformer_engine.pytorch.optimizers import FusedAdam

    assert torch.cuda.is_available()
    assert optimizer.Adam is FusedAdam


def test_null_spec_is_transformer_engine(rehearsal: Any, tiny: Path, machine: Any) -> None:
    from megatron_rl.mcore.layer_spec import resolve_spec

    assert resolve_spec(settings_of(tiny)) == "te"
    assert resolve_spec(replace(settings_of(tiny), dtype="float32")) == "local"
    (model,) = machine.build(read_shape(tiny), settings_of(tiny), "te")
    kinds = {type(module).__name__ for module in model.modules()}
    assert {
        "TELayerNormColumnParallelLinear",
        "TERowParallelLinear",
        "TEDotProductAttention",
        "TEGroupedMLP",
    } <= kinds
    assert not {"RmsNorm", "PackedAttention", "SequentialMLP"} & kinds


def test_a_wrong_keyword_for_transformer_engine_is_caught(
    rehearsal: Any, tiny: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_rl.mcore import model as model_module

    original = model_module.decoder_spec

    def with_fault(*args: Any) -> Any:
        spec = original(*args)
        modules = spec.layer_specs[0].submodules.self_attention.submodules
        modules.linear_qkv = ModuleSpec(modules.linear_qkv, params={"layernorm_eps": 1e-6})
        return spec

    monkeypatch.setattr(model_module, "decoder_spec", with_fault)
    with pytest.raises(TypeError, match="layernorm_eps"):
        machine.build(read_shape(tiny), settings_of(tiny), "te")


def test_a_wrong_argument_for_compiled_code_is_caught(
    rehearsal: Any, tiny: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformer_engine.pytorch.module._common as common

    from tests.lab.te_rehearsal.compiled.signatures import SignatureMismatch

    (model,) = machine.build(read_shape(tiny), settings_of(tiny), "te")
    assert forward(model).isfinite().all()
    monkeypatch.setitem(common.TE_DType, torch.bfloat16, torch.bfloat16)
    with pytest.raises(SignatureMismatch, match="rmsnorm_fwd: 'otype' is dtype"):
        forward(model)


def test_a_function_without_stand_in_is_named(rehearsal: Any) -> None:
    import sys

    from tests.lab.te_rehearsal.compiled.call_log import NotRehearsed

    with pytest.raises(NotRehearsed, match="silu"):
        sys.modules["transformer_engine_torch"].silu(torch.ones(1), None)


def test_the_table_of_calls_names_the_version(rehearsal: Any) -> None:
    import transformer_engine

    from tests.lab.te_rehearsal.report import call_table

    assert f"Transformer Engine {transformer_engine.__version__}," in call_table(rehearsal.calls)[0]


@pytest.mark.parametrize("key", ["num_attention_heads", "moe_ffn_hidden_size", "qk_norm"])
def test_models_that_differ_are_reported(
    rehearsal: Any, tiny: Path, machine: Any, key: str
) -> None:
    from tests.lab.te_rehearsal.models import differences

    shape = read_shape(tiny)
    other = replace(shape, **{key: False if key == "qk_norm" else 2 * getattr(shape, key)})

    def build(spec: Any) -> Any:
        return machine.build(other if spec == "te" else shape, settings_of(tiny), spec)

    if key == "qk_norm":  # its norms have no place in a model without them
        faults = differences(build, shape)
        assert any("q_norm" in fault and "only in local" in fault for fault in faults)
    else:
        assert differences(build, shape)


def test_an_export_map_that_swaps_tensors_is_reported(
    rehearsal: Any, tiny: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_rl.mcore.weights import export
    from megatron_rl.models.names import Fusion
    from tests.lab.te_rehearsal.models import export_differences

    shape = read_shape(tiny)
    models = machine.build(shape, settings_of(tiny), "te")
    assert export_differences(models, shape, tiny) == []
    split = export.split

    def swap(fusion: Fusion, weight: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
        tensors = split(fusion, weight, shape)
        return tensors[::-1] if fusion is Fusion.GATED else tensors

    monkeypatch.setattr(export, "split", swap)
    kinds = {name.split(".")[-2] for name in export_differences(models, shape, tiny)}
    assert kinds == {"gate_proj", "up_proj"}


def test_blockwise_casts_are_read_as_transformer_engine_reads_them(rehearsal: Any) -> None:
    import sys

    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    from tests.lab.te_rehearsal.compiled.quantizers import operand, quantize

    extension = sys.modules["transformer_engine_torch"]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(144, 272, generator=generator)
    for dim in (1, 2):
        quantizer = Float8BlockQuantizer(
            fp8_dtype=extension.DType.kFloat8E4M3,
            rowwise=True,
            columnwise=True,
            block_scaling_dim=dim,
        )
        cast = quantize(rows, quantizer)
        for is_rowwise in (True, False):
            error = (operand(cast, is_rowwise=is_rowwise) - rows).abs()
            assert (error <= rows.abs() * 2**-4 + 2e-2).all()
        reference = cast.dequantize(dtype=torch.float32)
        torch.testing.assert_close(operand(cast, is_rowwise=True), reference)


def test_interpreter_computes_in_bfloat16(rehearsal: Any) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def multiply_add(x_pointer, y_pointer, out_pointer, SIZE: tl.constexpr):  # type: ignore
        place = tl.arange(0, SIZE)
        x = tl.load(x_pointer + place)
        y = tl.load(y_pointer + place)
        tl.store(out_pointer + place, x * y + x)

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, generator=generator).bfloat16() for _ in range(2))
    out = torch.empty_like(x)
    multiply_add[(1,)](x, y, out, SIZE=64)
    assert torch.equal(out, x * y + x)
