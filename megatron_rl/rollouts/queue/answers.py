"""Reports of collectors: about a pause, stored rollouts, and the idle time of their engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from megatron_rl.contracts.group import Group
from megatron_rl.rollouts.wire.messages import Served


class PauseAnswers:
    """The answers of collectors to a pause: no engine works on their requests.

    nodes: whose collectors have answered.
    """

    def __init__(self) -> None:
        self._first_number = 0
        self._answers: dict[int, Served] = {}  # by node
        # By node and epoch: the tokens that the collector had received at the last pause
        self._num_sampled: Counter[tuple[int, int]] = Counter()

    @property
    def nodes(self) -> set[int]:
        return set(self._answers)

    def expect(self, first_number: int) -> None:
        """Expect answers to a state of this number or a later one. Others come late."""
        self._first_number = first_number
        self._answers = {}

    def take(self, node: int, answer: Served) -> None:
        """Take the answer of a node's collector."""
        if answer.number >= self._first_number:
            self._answers[node] = answer

    def forget(self, node: int) -> None:
        """Forget the answer of a collector that is gone."""
        self._answers.pop(node, None)

    def count_new_tokens(self, epochs: Mapping[int, int]) -> int:
        """Return the tokens that collectors have received since the last call.

        epochs: by node, of the collectors.
        """
        num_tokens = 0
        for node, answer in self._answers.items():
            collector = (node, epochs[node])
            num_tokens += answer.num_sampled - self._num_sampled[collector]
            self._num_sampled[collector] = answer.num_sampled
        return num_tokens


class StoredGroups:
    """Groups that collectors have stored and still sample.

    number: of the last request to store them. is_wanted: it is not released.
    groups: each with the node that has stored it. complete_nodes: whose collectors have stored all
    of their groups.
    """

    def __init__(self) -> None:
        self.number = 0
        self.is_wanted = False
        self.complete_nodes: set[int] = set()
        self.groups: list[tuple[int, Group]] = []

    def expect(self) -> int:
        """Expect answers to another request. Returns its number."""
        self.number += 1
        self.is_wanted = True
        return self.number

    def expects(self, number: int) -> bool:
        """Return False for an answer that comes too late."""
        return self.is_wanted and number == self.number

    def add(self, node: int, group: Group | None) -> None:
        """Add a group that a node has stored. None: it has stored all."""
        if group is None:
            self.complete_nodes.add(node)
        else:
            self.groups.append((node, group))

    def forget(self, node: int) -> None:
        """Forget what a collector had stored that is gone."""
        self.groups = [(other, group) for other, group in self.groups if other != node]
        self.complete_nodes.discard(node)

    def release(self) -> list[tuple[int, Group]]:
        """Return what was stored, which is to be freed."""
        groups = self.groups
        self.groups = []
        self.complete_nodes = set()
        self.is_wanted = False
        return groups


class IdleEngines:
    """The idle seconds that collectors have reported, each from its start on."""

    def __init__(self) -> None:
        # By node and epoch: now, and at the last call of `take`
        self._seconds: dict[tuple[int, int], float] = {}
        self._last_seconds: dict[tuple[int, int], float] = {}

    def note(self, node: int, epoch: int, seconds: float) -> None:
        """Note the report of a node's collector. epoch: counts its starts."""
        self._seconds[node, epoch] = seconds

    def take(self, epochs: Mapping[int, int]) -> float:
        """Return the seconds since the last call, as a mean over the nodes.

        epochs: by node, of the collectors that are connected.
        """
        total = sum(self._seconds.values())
        total -= sum(self._last_seconds.get(key, 0.0) for key in self._seconds)
        current_keys = set(epochs.items())
        self._seconds = {k: s for k, s in self._seconds.items() if k in current_keys}
        self._last_seconds = dict(self._seconds)
        return total / max(1, len(epochs))
