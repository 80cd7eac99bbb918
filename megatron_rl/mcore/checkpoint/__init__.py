"""Saves and loads a rank's part of a checkpoint.

Tensors go through Megatron's dist_checkpointing. The states of random generators are files of their
own.
"""

from megatron_rl.mcore.checkpoint.random_state import (
    load_random_state,
    random_state,
    random_state_file,
)
from megatron_rl.mcore.checkpoint.streaming import SavedWeights, write_hf
from megatron_rl.mcore.checkpoint.tensors import gather_tensors, load_tensors, write_tensors

__all__ = [
    "SavedWeights",
    "gather_tensors",
    "load_random_state",
    "load_tensors",
    "random_state",
    "random_state_file",
    "write_hf",
    "write_tensors",
]
