"""Where prompts come from: JSONL files, embedded tasks and reasoning-gym's generators behind one interface.

Invariant: prompts are validated here and trusted afterwards; no question is on both sides of the train/held-out split.
"""

from megatron_rl.prompts.embedded import EMBEDDED
from megatron_rl.prompts.factory import SOURCES, open_prompts
from megatron_rl.prompts.question import OnBadRow, PromptDataError
from megatron_rl.prompts.source import Excluded, PromptSource
from megatron_rl.prompts.worked import WorkedExample, worked_examples

__all__ = [
    "EMBEDDED",
    "SOURCES",
    "Excluded",
    "OnBadRow",
    "PromptDataError",
    "PromptSource",
    "WorkedExample",
    "open_prompts",
    "worked_examples",
]
