"""The one Hugging Face weight iterator: load, export and weight sync all go through it.

Invariant: names and values are exactly those of the checkpoint format; a load followed by an export is bit-exact.
"""

from megatron_rl.mcore.hf_weights.export import iterate_hf_weights
from megatron_rl.mcore.hf_weights.load import load_hf_weights
from megatron_rl.mcore.hf_weights.save import save_hf_weights

__all__ = ["iterate_hf_weights", "load_hf_weights", "save_hf_weights"]
