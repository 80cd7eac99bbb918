"""The table of the instrument that measures the processor time of a response."""

import pytest

from tests.lab.response_cost import COLLECTOR, HTTP, SCHEDULER, main, table


def test_the_ratio_is_taken_within_a_round() -> None:
    before = [
        {SCHEDULER: 0.004, HTTP: 0.002, COLLECTOR: 0.002},
        {SCHEDULER: 0.008, HTTP: 0.004, COLLECTOR: 0.004},
    ]
    after = [
        {SCHEDULER: 0.002, HTTP: 0.001, COLLECTOR: 0.001},
        {SCHEDULER: 0.004, HTTP: 0.002, COLLECTOR: 0.002},
    ]
    lines = list(table(before, after))
    assert lines[2] == ("| engine's scheduler | 6.00 ± 25.42 | 3.00 ± 12.71 | 0.50 ± 0.00 |")
    assert lines[-1].startswith("| all | 12.00 ± 50.84 | 6.00") and "0.50 ± 0.00" in lines[-1]


@pytest.mark.parametrize("argument", ["--rounds=1", "--prompts=0", "--samples=0", "--round=3"])
def test_a_mistake_ends_the_command(argument: str) -> None:
    with pytest.raises(SystemExit) as error_info:
        main([argument])
    assert error_info.value.code == 2
