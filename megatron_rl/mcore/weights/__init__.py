"""A rank's weights under Hugging Face names: loaded or drawn, walked through and saved."""

from megatron_rl.mcore.weights.export import iterate_hf_weights
from megatron_rl.mcore.weights.load import load_hf_weights
from megatron_rl.mcore.weights.pipeline_stages import every_stage
from megatron_rl.mcore.weights.random_init import draw_hf_weights
from megatron_rl.mcore.weights.rounding import rounded
from megatron_rl.mcore.weights.save import save_hf_weights

__all__ = [
    "draw_hf_weights",
    "every_stage",
    "iterate_hf_weights",
    "load_hf_weights",
    "rounded",
    "save_hf_weights",
]
