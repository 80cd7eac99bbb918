"""Fixtures of tests/mcore for studies that compute with a model."""

from tests.mcore.conftest import checkpoint, hf_model, megatron

__all__ = ["checkpoint", "hf_model", "megatron"]
