"""Export: transformers computes with a saved model what the model of the trainer computes."""

from __future__ import annotations

import time
from pathlib import Path

from megatron_rl.mcore import compat

compat.install()

import torch

from megatron_rl.mcore import parallel
from megatron_rl.training.worker import Worker
from tests.lab.gpu_stages.stage import Report, Setting, run
from tests.support.packed_sequences import pack, sequence, to_device
from tests.support.workers import configure, open_worker, write_model

INDICES = range(6)
# Largest mean error of logits whose largest value is 1
_MAX_MEAN_ERROR = {"float32": 1e-4, "bfloat16": 0.05}


def export(setting: Setting, report: Report) -> None:
    """Save a worker with random weights, load it in transformers, and compare packed logits."""
    from transformers import AutoModelForCausalLM

    model = setting.scratch / "model"
    vocabulary = 512 if setting.small else 32_000
    write_model(model, small=setting.small, layers=2, vocabulary=vocabulary)
    worker = open_worker(configure(model, setting.scratch), setting.scratch)
    target = setting.scratch / "exported"
    _save(worker, target, report)
    with torch.no_grad():
        ours = _packed_logits(worker)
        reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        theirs = torch.cat([reference(input_ids=sequence(i)[None]).logits[0] for i in INDICES])
    error = (ours[:, : theirs.shape[1]] - theirs).abs() / theirs.abs().max()
    limit = _MAX_MEAN_ERROR[worker.model.dtype]
    report.require_at_most("mean_error", float(error.mean()), limit)
    report.note("max_error", float(error.max()))
    parallel.shutdown()


def _save(worker: Worker, target: Path, report: Report) -> None:
    start = time.perf_counter()
    worker.save(target)
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    report.note("exported_gib", round(size / 2**30, 3))
    report.note("gb_s", round(size / seconds / 1e9, 2))


def _packed_logits(worker: Worker) -> torch.Tensor:
    """Logits [T, vocabulary] of the packed sequences: float32, on the CPU."""
    device = worker.layout.device
    batch = to_device(pack(list(INDICES)), device)
    logits = worker.policy.models[0](
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=batch.packed_seq_params(),
    )
    return logits[0].float().cpu()


if __name__ == "__main__":
    run(export)
