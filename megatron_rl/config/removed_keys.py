"""Keys of older configurations that this version lacks, each with what to do instead."""

from __future__ import annotations

_CONSTANT = "Remove it: it is a constant"
_STAGES = "Remove it: stages that do not divide the layers get fewer at both ends"
REMOVED_KEYS = {
    "algo.advantages": "Remove it: advantages are 1 with algo=sft or environment=demonstration, "
    "and else relative to the group",
    "engine.device": "Remove it: engines run on GPUs wherever the machine has any. "
    'CUDA_VISIBLE_DEVICES="" runs everything on the CPU',
    "engine.mode": "Remove it: with engine.urls the run uses those servers, and else its own",
    "engine.urls_file": "Give the file as engine.urls=FILE",
    "engine.threads": "Set OMP_NUM_THREADS, which the engines take",
    "guard.spike_factor": f"{_CONSTANT}, 10",
    "logger.profile_ranks": "Remove it: rank 0 writes the traces",
    "model.embedding_std": "Give embedding_initializer_range in the model's config.json",
    "optimizer.min_lr_ratio": f"{_CONSTANT}, 0.1",
    "parallel.first_stage_layers": _STAGES,
    "parallel.last_stage_layers": _STAGES,
    "parallel.overlap_grad_reduce": "Use parallel.overlap",
    "parallel.overlap_param_gather": "Use parallel.overlap",
    "parallel.sequence_parallel": "Remove it: sequences are split wherever parallel.tp is above 1",
    "recovery.wait_s": f"{_CONSTANT}, 900 seconds",
    "rollout.max_rejected_share": f"{_CONSTANT}, 0.5",
    "run.experiment": "Remove it. run.name names a run",
    "run.on_failed_save": "Remove it: a run whose checkpoint cannot be written ends with code 8",
    "run.save_dtype": "Remove it. python launch/checkpoint.py export RUN --out DIR --dtype DTYPE "
    "writes the weights of a checkpoint in another format",
    "run.stop_within_s": f"{_CONSTANT}, 25 seconds, because torchrun kills its ranks after 30",
    "sync.when": "Remove it: environment=demonstration syncs for evaluations alone",
    "samples.groups": f"{_CONSTANT}, 8",
}
