"""Every family's logits are those of transformers, with every spec that runs here, and its export
keeps every bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from megatron_rl.mcore import compat

compat.install()

import torch
from safetensors.torch import load_file

from launch.gpu_stages.stage import Report, Setting, run
from launch.testbed.packed_sequences import pack, sequence
from launch.testbed.tiny_families import FAMILIES, randomized
from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.mcore import parallel
from megatron_rl.mcore.layer_spec import Spec
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.weights import iterate_hf_weights, load_hf_weights
from megatron_rl.models.families import read_shape

INDICES = range(12)
FLOAT32 = 1e-4  # of logits of size 1 to 10; on GPUs sums have another order than transformers'
BFLOAT16 = (
    0.05  # the mean: where rounding changes a token's experts its logits differ as far as they can
)


def parity(setting: Setting, report: Report) -> None:
    """Each family in float32 and, on a GPU, in bfloat16, with `local` and, where it imports, `te`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parallel.initialize(ParallelSettings(timeout_s=60), seed=1)
    specs = [spec for spec in get_args(Spec) if spec == "local" or _transformer_engine_runs()]
    report.note("specs", ", ".join(specs))
    for family, make in FAMILIES.items():
        hf = randomized(make())
        directory = setting.scratch / family
        hf.save_pretrained(directory)
        with torch.no_grad():
            expected = torch.cat([hf(input_ids=sequence(i)[None]).logits[0] for i in INDICES])
        scale = float(expected.abs().max())
        report.holds(f"{family} logits_far_from_0", scale > 1)
        error = (
            logits(directory, device, report, family, dtype="float32", spec="local") - expected
        ).abs()
        report.at_most(f"{family} local float32 max", float(error.max()) / scale, FLOAT32)
        for spec in specs:
            error = (
                logits(directory, device, report, family, dtype="bfloat16", spec=spec) - expected
            ).abs()
            report.at_most(f"{family} {spec} bfloat16 mean", float(error.mean()) / scale, BFLOAT16)
    parallel.shutdown()


def logits(
    directory: Path, device: torch.device, report: Report, family: str, **settings: Any
) -> torch.Tensor:
    """Of the packed sequences, float32; and the loaded model exports what it was given."""
    shape = read_shape(directory)
    models = build_models(shape, ModelSettings(path=str(directory), **settings), ParallelSettings())
    load_hf_weights(models, shape, directory)
    batch = pack(list(INDICES))
    bounds = batch.cu_seqlens.to(device)
    packed = type(batch)(
        batch.input_ids.to(device), batch.position_ids.to(device), bounds, batch.max_seqlen
    )
    with torch.no_grad():
        out = models[0](
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=None,
            packed_seq_params=packed.packed_seq_params(),
        )
    original = load_file(directory / "model.safetensors")
    exported = {name: tensor.cpu() for name, tensor in iterate_hf_weights(models, shape)}
    same = exported.keys() == original.keys()
    same = same and all(torch.equal(t, original[name].to(t.dtype)) for name, t in exported.items())
    report.holds(f"{family} {settings['spec']} {settings['dtype']} exports_its_bits", same)
    return out[0].float().cpu()


def _transformer_engine_runs() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception:  # installed and broken is as good as missing
        return False
    return True


if __name__ == "__main__":
    run(parity)
