"""The only rank of a grid owns every tensor of every family, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.models.families import read_shape
from sglang_bridge.weights.buckets import iterate_buckets
from sglang_bridge.weights.fused_layout import locate_slot, update_unit
from tests.support.tiny_families import FAMILIES, randomize_weights

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=list(FAMILIES))
def weights(request: Any, tmp_path_factory: pytest.TempPathFactory, megatron: Any) -> Any:
    """A function that opens the weights of a tiny model as an engine of a dtype gets them."""
    from megatron_rl.mcore.job import join
    from megatron_rl.mcore.model import build_models
    from megatron_rl.mcore.weights import OwnedWeights, load_hf_weights

    checkpoint = tmp_path_factory.mktemp("family") / "checkpoint"
    randomize_weights(FAMILIES[request.param]()).save_pretrained(checkpoint)
    shape = read_shape(checkpoint)
    settings = ModelSettings(path=str(checkpoint))
    models = build_models(shape, settings, ParallelSettings())
    load_hf_weights(models, shape, checkpoint)
    job = join(ParallelSettings())

    def open_weights(dtype: torch.dtype) -> OwnedWeights:
        return OwnedWeights(models, shape, job, dtype, iter, bucket_bytes=1024)

    return open_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_owned_and_gathered_tensors_are_those_of_the_export(
    weights: Any, dtype: torch.dtype
) -> None:
    from megatron_rl.mcore.weights import iterate_hf_weights

    source = weights(dtype)
    expected = dict(iterate_hf_weights(source.models, source.shape, dtype))
    assert source.owns_any
    for stream in (source.stream_owned(), source.stream_all()):
        tensors = dict(stream)
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor, expected[name]), name
    assert set(source.seconds) == {"gather", "quantise"}


def test_what_engines_fuse_stays_in_one_bucket(weights: Any) -> None:
    """Megatron has another parameter between the two of latent attention."""
    for bucket_bytes in (64, 3000):
        units: dict[str, int] = {}
        stream = weights(torch.bfloat16).stream_owned()
        for index, bucket in enumerate(
            iterate_buckets(stream, bucket_bytes=bucket_bytes, device=CPU)
        ):
            for name in bucket.names:
                assert units.setdefault(update_unit(name), index) == index, name


def test_gathered_tensors_come_in_the_order_of_an_engine_s_parameters(weights: Any) -> None:
    """The hash of an audit then waits for no tensor, and copies none."""
    source = weights(torch.float32)
    next_slots: dict[str, int] = {}
    for name, _ in source.stream_all():
        slot = locate_slot(name, num_experts=source.shape.num_experts)
        assert slot.index == next_slots.get(slot.parameter, 0), name
        next_slots[slot.parameter] = slot.index + 1
