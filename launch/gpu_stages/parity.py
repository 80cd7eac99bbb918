"""Logits of every model family compared with transformers, and the exported weights bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from megatron_rl.mcore import compat

compat.install()

import torch
from safetensors.torch import load_file

from launch.gpu_stages.stage import Report, Setting, run
from launch.testbed.packed_sequences import pack, sequence, to_device
from launch.testbed.tiny_families import FAMILIES, randomize_weights
from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.mcore import parallel
from megatron_rl.mcore.layer_spec import Spec
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.weights import iterate_hf_weights, load_hf_weights
from megatron_rl.models.families import read_shape

INDICES = range(12)
# Of logits of size 1 to 10; on GPUs sums have another order than in transformers
MAX_ERROR_FLOAT32 = 1e-4
# The mean: where rounding changes the experts of a token, its logits differ as far as they can
MAX_MEAN_ERROR_BFLOAT16 = 0.05


def parity(setting: Setting, report: Report) -> None:
    """Compare each family in float32 and bfloat16, with every layer spec that runs here."""
    parallel.initialize(ParallelSettings(timeout_s=60), seed=1)
    specs = [spec for spec in get_args(Spec) if spec == "local" or _transformer_engine_runs()]
    report.note("specs", ", ".join(specs))
    for family, make in FAMILIES.items():
        _compare_family(family, make, specs, setting, report)
    parallel.shutdown()


def _compare_family(
    family: str, make: Callable[[], Any], specs: Sequence[str], setting: Setting, report: Report
) -> None:
    hf = randomize_weights(make())
    directory = setting.scratch / family
    hf.save_pretrained(directory)
    with torch.no_grad():
        reference = torch.cat([hf(input_ids=sequence(i)[None]).logits[0] for i in INDICES])
    scale = float(reference.abs().max())
    report.require(f"{family} logits_far_from_0", scale > 1)
    logits = _logits(directory, family, report, dtype="float32", spec="local")
    error = float((logits - reference).abs().max()) / scale
    report.require_at_most(f"{family} local float32 max", error, MAX_ERROR_FLOAT32)
    for spec in specs:
        logits = _logits(directory, family, report, dtype="bfloat16", spec=spec)
        error = float((logits - reference).abs().mean()) / scale
        report.require_at_most(f"{family} {spec} bfloat16 mean", error, MAX_MEAN_ERROR_BFLOAT16)


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


def _transformer_engine_runs() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception:  # A broken installation may raise anything, and counts as missing.
        return False
    return True


if __name__ == "__main__":
    run(parity)
