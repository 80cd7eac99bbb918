"""Logits of every model family compared with transformers, and the exported weights bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import torch
from safetensors.torch import load_file

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.mcore import parallel
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.weights import iterate_hf_weights, load_hf_weights
from megatron_rl.models.families import read_shape
from tests.lab.gpu_stages.stage import Report, Setting, run
from tests.support.layer_specs import named_te_limits, spec_variants
from tests.support.packed_sequences import pack, sequence, to_device
from tests.support.tiny_families import FAMILIES, randomize_weights

INDICES = range(12)
# Of logits of size 1 to 10; on GPUs sums have another order than in transformers
MAX_ERROR_FLOAT32 = 1e-4
# The mean: where rounding changes the experts of a token, its logits differ as far as they can
MAX_MEAN_ERROR_BFLOAT16 = 0.05
_GPU_HEADS = {"qk_nope_head_dim": 16, "v_head_dim": 16}


def parity(setting: Setting, report: Report) -> None:
    """Compare each family in float32 and bfloat16, with every layer spec that runs here."""
    parallel.initialize(ParallelSettings(timeout_s=60), seed=1)
    variants = spec_variants(report)
    references = {}
    for family, make in FAMILIES.items():
        with report.part(family):
            references[family] = _write_family(family, make, setting, report)
    for spec, dtype in variants:
        for family, reference in references.items():
            with report.part(f"{family} {spec} {dtype}"), named_te_limits(spec):
                _compare(setting.scratch / family, family, reference, spec, dtype, report)
    parallel.shutdown()


def _write_family(
    family: str, make: Callable[..., Any], setting: Setting, report: Report
) -> torch.Tensor:
    """Save a model with random weights; returns its logits for the packed sequences."""
    # Attention kernels of GPUs take heads with a multiple of eight columns.
    sizes = _GPU_HEADS if family.startswith("deepseek") and not setting.small else {}
    hf = randomize_weights(make(**sizes))
    hf.save_pretrained(setting.scratch / family)
    with torch.no_grad():
        reference = torch.cat([hf(input_ids=sequence(i)[None]).logits[0] for i in INDICES])
    report.require(f"{family} logits_far_from_0", float(reference.abs().max()) > 1)
    return reference


def _compare(
    directory: Path, family: str, reference: torch.Tensor, spec: str, dtype: str, report: Report
) -> None:
    logits = _logits(directory, family, report, dtype=dtype, spec=spec)
    error = (logits - reference).abs() / reference.abs().max()
    if dtype == "float32":
        largest = float(error.max())
        report.require_at_most(f"{family} {spec} float32 max", largest, MAX_ERROR_FLOAT32)
    else:
        mean = float(error.mean())
        report.require_at_most(f"{family} {spec} bfloat16 mean", mean, MAX_MEAN_ERROR_BFLOAT16)


def _logits(directory: Path, family: str, report: Report, **settings: Any) -> torch.Tensor:
    """Logits of the packed sequences in float32. Also checks that the export keeps the weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = read_shape(directory)
    models = build_models(shape, ModelSettings(path=str(directory), **settings), ParallelSettings())
    load_hf_weights(models, shape, directory)
    batch = to_device(pack(list(INDICES)), device)
    with torch.no_grad():
        logits = models[0](
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            packed_seq_params=batch.packed_seq_params(),
        )
    original = load_file(directory / "model.safetensors")
    export = {name: tensor.cpu() for name, tensor in iterate_hf_weights(models, shape)}
    is_same = export.keys() == original.keys() and all(
        torch.equal(tensor, original[name].to(tensor.dtype)) for name, tensor in export.items()
    )
    report.require(f"{family} {settings['spec']} {settings['dtype']} exports_its_bits", is_same)
    return logits[0].float().cpu()


if __name__ == "__main__":
    run(parity)
