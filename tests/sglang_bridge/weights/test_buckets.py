"""Streams of tensors cut into buckets."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_bridge.weights.buckets import Bucket, iterate_buckets

CPU = torch.device("cpu")


def copies(
    tensors: list[tuple[str, torch.Tensor]], bucket_bytes: int, slots: int = 1
) -> list[Bucket]:
    """Copy the buckets, because the next one overwrites the bytes of an earlier one."""
    buckets = []
    for bucket in iterate_buckets(
        iter(tensors), bucket_bytes=bucket_bytes, device=CPU, slots=slots
    ):
        flat = bucket.flat.clone()
        bucket.release()
        bucket.flat = flat
        buckets.append(bucket)
    return buckets


def test_buckets_are_filled_in_order() -> None:
    tensors = [
        (name, torch.full((2,), value)) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))
    ]  # 8 bytes each
    first, second = copies(tensors, 16)
    assert [first.names, second.names] == [["a", "b"], ["c"]]
    assert first.flat.view(torch.float32).tolist() == [1, 1, 2, 2]


def test_a_tensor_larger_than_a_bucket_gets_its_own() -> None:
    tensors = [("a", torch.ones(1)), ("big", torch.arange(5.0)), ("c", torch.ones(1))]
    buckets = copies(tensors, 8)
    assert [bucket.names for bucket in buckets] == [["a"], ["big"], ["c"]]
    assert dict(buckets[1].tensors())["big"].tolist() == [0, 1, 2, 3, 4]


def test_unaligned_tensors_start_a_new_bucket() -> None:
    tensors = [
        ("half", torch.ones(1, dtype=torch.bfloat16)),
        ("full", torch.ones(1)),
        ("byte", torch.ones(1).to(torch.uint8)),
    ]
    assert [bucket.names for bucket in copies(tensors, 64)] == [["half"], ["full", "byte"]]


def test_stream_is_read_one_bucket_ahead() -> None:
    reads = []

    def lazy() -> object:
        for index in range(100):
            reads.append(index)
            yield str(index), torch.ones(4)

    buckets = iterate_buckets(lazy(), bucket_bytes=64, device=CPU)  # type: ignore[arg-type]
    next(buckets)
    assert len(reads) == 5  # four fill the bucket, and the fifth does not fit


def test_an_owner_of_nothing_has_no_bucket() -> None:
    assert copies([], 64) == []


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "a: sent twice"),
        ([("a", torch.ones(0))], "a: has no elements"),
    ],
)
def test_invalid_streams_are_refused(tensors: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        copies(tensors, 64)


Q, K, V = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")


@pytest.mark.parametrize("slots", [1, 2])
def test_a_unit_that_does_not_fit_any_more_moves_to_the_next_bucket(slots: int) -> None:
    tensors = [("a", torch.ones(2)), (Q, torch.full((2,), 2.0)), (K, torch.full((1,), 3.0))]
    tensors += [(V, torch.full((1,), 4.0)), ("b", torch.ones(1))]
    first, second, third = copies(tensors, 16, slots)
    assert [first.names, second.names, third.names] == [["a"], [Q, K, V], ["b"]]
    assert second.flat.view(torch.float32).tolist() == [2, 2, 3, 4]


@pytest.mark.parametrize("slots", [1, 2])
def test_a_unit_larger_than_a_bucket_stays_whole(slots: int) -> None:
    tensors = [("a", torch.ones(1)), (Q, torch.arange(2.0)), (K, torch.arange(3.0))]
    tensors += [(V, torch.arange(4.0)), ("b", torch.ones(1))]
    first, second, third = copies(tensors, 8, slots)
    assert [first.names, second.names, third.names] == [["a"], [Q, K, V], ["b"]]
    assert second.flat.view(torch.float32).tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3]


def test_the_parts_of_a_unit_must_follow_one_another() -> None:
    """SGLang forgets a projection of latent attention that comes without the other."""
    tensors = [(f"model.layers.1.self_attn.{x}.weight", torch.ones(1)) for x in ("q_a_proj", "o")]
    tensors += [("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", torch.ones(1))]
    with pytest.raises(ValueError, match=r"kv_a_proj_with_mqa\.weight: apart from"):
        copies(tensors, 64)


def test_a_scale_that_would_not_be_aligned_is_refused() -> None:
    tensors = [(Q, torch.ones(3, dtype=torch.uint8)), (f"{Q}_scale_inv", torch.ones(1))]
    with pytest.raises(ValueError, match=r"q_proj\.weight_scale_inv: .* not aligned"):
        copies(tensors, 64)


def test_the_next_bucket_is_filled_while_the_last_one_is_in_use() -> None:
    reads = []

    def lazy() -> object:
        for index in range(8):
            reads.append(index)
            yield str(index), torch.full((2,), float(index))

    stream: Any = lazy()
    buckets = iterate_buckets(stream, bucket_bytes=16, device=CPU, slots=2)
    first = next(buckets)
    second = next(buckets)
    assert len(reads) == 5
    assert first.flat.view(torch.float32).tolist() == [0, 0, 1, 1]
    assert second.flat.view(torch.float32).tolist() == [2, 2, 3, 3]
    thread = threading.Thread(target=lambda: next(buckets))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "a third bucket exists beside two that are in use"
    first.release()
    thread.join(5)
    assert not thread.is_alive()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
            st.lists(st.integers(1, 5), min_size=0, max_size=3),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 200),
    st.integers(1, 3),
)
def test_every_tensor_arrives_once_unchanged_and_aligned(
    kinds: list, bucket_bytes: int, slots: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        (f"t{index}", torch.randint(0, 200, shape, generator=generator).to(dtype))
        for index, (dtype, shape) in enumerate(kinds)
    ]
    buckets = copies(tensors, bucket_bytes, slots)
    arrivals = {}
    for bucket in buckets:
        arrivals |= dict(bucket.tensors())  # a view of an unaligned tensor raises
        assert bucket.flat.numel() <= bucket_bytes or len(bucket.names) == 1
    assert list(arrivals) == [name for name, _ in tensors]
    assert all(
        torch.equal(arrivals[name], tensor) and arrivals[name].dtype == tensor.dtype
        for name, tensor in tensors
    )
