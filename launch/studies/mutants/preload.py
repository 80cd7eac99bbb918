"""What a process that tries mutants of `mcore` needs imported before it forks: seconds once instead
of every time.
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
