"""Every configuration key is used by the program: a key that is only copied about would be a
promise nobody keeps.
"""

from pathlib import Path

from megatron_rl.config.keys import INNER_SECTIONS, declared_keys
from tests.config.read_keys import unread_keys

ROOT = Path(__file__).resolve().parents[2]


def test_every_key_is_read_by_what_it_is_for() -> None:
    files = [
        file
        for package in ("megatron_rl", "sglang_bridge")
        for file in (ROOT / package).rglob("*.py")
    ]
    assert unread_keys({str(file.relative_to(ROOT)): file.read_text() for file in files}) == []


def test_a_key_that_only_the_build_function_copies_is_reported() -> None:
    build = (
        "def build(c: Configuration):\n    return Adam(lr=c.optimizer.lr, eps=c.optimizer.eps)\n"
    )
    adam = "class Adam:\n    def __init__(self, lr: float, eps: float):\n        self.lr, self.eps = lr, eps\n"
    found = unread_keys({"megatron_rl/run/build.py": build, "megatron_rl/mcore/adam.py": adam})
    keys = [key for key in declared_keys() if key not in INNER_SECTIONS]
    assert found == [key for key in keys if "." in key or key in ("seed", "mode", "curriculum")]


def test_a_key_that_is_only_handed_on_is_reported_wherever_that_happens() -> None:
    handed_on = (
        "def open_adam(c: Configuration):\n    return Adam(lr=c.optimizer.lr)\nclass Adam:\n    lr: float\n",
        "class A:\n    def __init__(self, s: OptimizerSettings):\n        self._lr = s.lr\n",
        "def f(s: OptimizerSettings):\n    s.lr\n",
    )
    for source in handed_on:
        assert "optimizer.lr" in unread_keys({"megatron_rl/mcore/a.py": source}), source
    elsewhere = "import torch\ndef f(s: OptimizerSettings):\n    return AdamW(lr=s.lr)\n"
    assert "optimizer.lr" not in unread_keys({"megatron_rl/mcore/a.py": elsewhere})


def test_ways_of_reading_a_key() -> None:
    ways = {
        "optimizer.lr": "def f(settings: OptimizerSettings):\n    return settings.lr",
        "optimizer.eps": "class A:\n    def __init__(self, s: OptimizerSettings | None):\n        self._s = s\n"
        "    def f(self):\n        return self._s.eps",
        "rollout.temperature": "class Stage:\n    rollout: RolloutSettings\n"
        "def f(stage: Stage):\n    return [stage.rollout.temperature for _ in range(3)]",
        "eval.every": "def f(c: Configuration):\n    rollout, settings = c.rollout, c.eval\n    return settings.every",
        "seed": "def f(c: Configuration):\n    return c.seed",
        "algo.alpha": "def f(algo: AlgoSettings):\n    if isinstance(algo, EspoSettings):\n        return algo.alpha",
        "engine.tp": "def f(settings: ServerSettings):\n    return settings.tp",
    }
    everything = set(unread_keys({}))
    for key, source in ways.items():
        assert everything - set(unread_keys({"megatron_rl/a.py": source})) == {key}, key


def test_names_that_are_no_sections_are_not_mistaken_for_one() -> None:
    source = (
        "def f(other: Other, lr: float):\n    other.lr = 1\n    return other.lr, lr, Adam(lr=lr).lr"
    )
    writing = "def f(settings: OptimizerSettings):\n    settings.lr = 1"
    assert "optimizer.lr" in unread_keys({"megatron_rl/a.py": source, "megatron_rl/b.py": writing})
