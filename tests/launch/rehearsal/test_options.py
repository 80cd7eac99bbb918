"""Options of the command that rehearses a rank."""

import pytest

from launch.rehearsal.cuda_guard import RehearsalUnavailable
from launch.rehearsal.options import read_options


def test_options_are_told_from_overrides() -> None:
    options = read_options(["rank=17", "ranks=128", "gpu=h200", "parallel=ep8", "seed=1"])
    assert (options.rank, options.ranks, options.gpu.name) == (17, 128, "h200")
    assert options.overrides == ("parallel=ep8", "seed=1")
    assert (options.gpus_per_node, options.micro_batches, options.routing) == (8, 0, "balanced")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("rank=x", r"rank='x': give a whole number"),
        ("rank=4", r"rank=4: there are ranks=1, counted from 0"),
        ("gpu=v100", r"gpu='v100': choose one of a100"),
        ("routing=even", r"routing='even': choose one of balanced, skewed"),
    ],
)
def test_a_wrong_option_is_refused(argument: str, words: str) -> None:
    with pytest.raises(RehearsalUnavailable, match=words):
        read_options([argument])
