"""Export: what a worker saves in Hugging Face format computes in transformers what the trainer's
model does.
"""

from __future__ import annotations

import time

from megatron_rl.mcore import compat

compat.install()

import torch

from launch.gpu_stages.stage import Report, Setting, run
from launch.gpu_stages.workers import configure, open_worker, write_model
from launch.testbed.packed_sequences import pack, sequence
from megatron_rl.mcore import parallel

INDICES = range(6)
_LIMIT = {"float32": 1e-4, "bfloat16": 0.05}  # the mean, of logits whose largest is 1


def export(setting: Setting, report: Report) -> None:
    """A worker with random weights: save, load in transformers, compare packed logits."""
    from transformers import AutoModelForCausalLM

    write_model(
        setting.scratch / "model",
        small=setting.small,
        layers=2,
        vocabulary=512 if setting.small else 32_000,
    )
    worker = open_worker(configure(setting.scratch / "model", setting.scratch), setting.scratch)
    target, start = setting.scratch / "exported", time.perf_counter()
    worker.save(target)
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    report.note("exported_gib", round(size / 2**30, 3))
    report.note("gb_s", round(size / seconds / 1e9, 2))
    device = worker.layout.device
    batch = pack(list(INDICES))
    packed = type(batch)(
        *(t.to(device) for t in (batch.input_ids, batch.position_ids, batch.cu_seqlens)),
        batch.max_seqlen,
    )
    inputs = {
        "input_ids": packed.input_ids,
        "position_ids": packed.position_ids,
        "attention_mask": None,
    }
    with torch.no_grad():
        ours = worker.policy.models[0](**inputs, packed_seq_params=packed.packed_seq_params())[
            0
        ].float()
        loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        theirs = torch.cat([loaded(input_ids=sequence(i)[None]).logits[0] for i in INDICES])
    error = (ours.cpu()[:, : theirs.shape[1]] - theirs).abs() / theirs.abs().max()
    report.at_most("mean_error", float(error.mean()), _LIMIT[worker.model.dtype])
    report.note("max_error", float(error.max()))
    parallel.shutdown()


if __name__ == "__main__":
    run(export)
