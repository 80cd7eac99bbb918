"""What a process that tries mutants of `mcore` needs imported before it forks: seconds once instead of every time."""

import contextlib

import torch

from megatron_rl.mcore.cpu import compat

library = torch.library.Library("torchvision", "FRAGMENT")  # as in tests/mcore/conftest.py
for name in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
compat.install()

import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

import megatron_rl.mcore.model
import megatron_rl.mcore.optimizer
import megatron_rl.mcore.parallel
import megatron_rl.mcore.replay
import megatron_rl.mcore.schedule
import megatron_rl.mcore.weights  # noqa: F401
