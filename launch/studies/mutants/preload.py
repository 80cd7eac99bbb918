"""Imports that a process needs before it forks to try mutants of `mcore`.

They take seconds, which are spent once instead of for each mutant.
"""

from megatron_rl.mcore import compat

compat.install()

import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

import megatron_rl.mcore.model
import megatron_rl.mcore.optimizer
import megatron_rl.mcore.parallel
import megatron_rl.mcore.replay
import megatron_rl.mcore.schedule
import megatron_rl.mcore.weights  # noqa: F401
