"""A rank's part of a checkpoint: tensors through Megatron's dist_checkpointing, and the state of random numbers."""

from megatron_rl.mcore.checkpoint.random_state import load_random_state, random_state_file, save_random_state
from megatron_rl.mcore.checkpoint.tensors import load_tensors, save_tensors

__all__ = ["load_random_state", "load_tensors", "random_state_file", "save_random_state", "save_tensors"]
