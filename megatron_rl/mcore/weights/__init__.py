"""Loads, initializes, walks through and saves a rank's weights under Hugging Face names."""

from megatron_rl.mcore.weights.engine_weights import open_engine_weights
from megatron_rl.mcore.weights.export import iterate_hf_weights
from megatron_rl.mcore.weights.fp8_weights import complete, fp8_weights_of, quantize_weights
from megatron_rl.mcore.weights.load import load_hf_weights
from megatron_rl.mcore.weights.owned_export import OwnedWeights
from megatron_rl.mcore.weights.random_init import initialize_hf_weights
from megatron_rl.mcore.weights.save import save_hf_weights

__all__ = [
    "OwnedWeights",
    "complete",
    "fp8_weights_of",
    "initialize_hf_weights",
    "iterate_hf_weights",
    "load_hf_weights",
    "open_engine_weights",
    "quantize_weights",
    "save_hf_weights",
]
