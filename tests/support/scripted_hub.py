"""A hub in memory: its collectors answer in a random order, without sockets and engines."""

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from megatron_rl.contracts.group import Group, RolloutRef, sampled_tokens
from megatron_rl.rollouts.queue.hub import CollectorConnected, CollectorGone, Event
from megatron_rl.rollouts.wire.messages import Drop, Dropped, GroupDone, GroupRequest, ToCollector
from tests.support.groups import group as make_group

TOKENS_PER_ROLLOUT = 4
# Score of a rollout: of the prompt's id and the rollout's place in the group. None: no verdict
ScoreOf = Callable[[str, int], float | None]


@dataclass
class ScriptedCollector:
    """The requests that a collector has, the groups that it keeps, and its messages to rank 0."""

    epoch: int = 0
    running: dict[str, GroupRequest] = field(default_factory=dict)
    kept_ids: set[str] = field(default_factory=set)
    outbox: deque[Event] = field(default_factory=deque)


class ScriptedHub:
    """Connects `num_nodes` collectors, which answer requests in the order of a seed.

    num_tokens: those that engines have sampled so far. num_aborted: aborted groups. num_extended:
    probes that collectors have extended. endless_ids: groups that never complete. score_seconds: of
    each verdict. Set another value where real verdicts would take other times. answer: samples the
    group of a request.
    """

    def __init__(self, seed: int, score: ScoreOf, *, num_nodes: int = 1) -> None:
        self.rng = random.Random(seed)
        self.score = score
        self.num_tokens = 0
        self.num_aborted = 0
        self.num_extended = 0
        self.score_seconds = 0.0
        self.endless_ids: set[str] = set()
        self.answer: Callable[[GroupRequest], Group] = self._sample
        self.collectors: dict[int, ScriptedCollector] = {}
        for node in range(num_nodes):
            self._connect(node, 0)

    @property
    def nodes(self) -> list[int]:
        return sorted(self.collectors)

    @property
    def kept_ids(self) -> set[str]:
        """The groups whose rollouts are stored."""
        return set().union(*(collector.kept_ids for collector in self.collectors.values()))

    @property
    def is_idle(self) -> bool:
        return not any(c.running or c.outbox for c in self.collectors.values())

    def epoch(self, node: int) -> int | None:
        return self.collectors[node].epoch

    def send(self, node: int, message: ToCollector) -> None:
        collector = self.collectors[node]
        match message:
            case GroupRequest():
                collector.running[message.group_id] = message
            case Drop(group_ids, is_reported=True):
                for group_id in group_ids:
                    self._abort(collector, group_id)
            case Drop(group_ids):
                for group_id in group_ids:
                    collector.running.pop(group_id, None)
                    collector.kept_ids.discard(group_id)

    def send_to_each(self, nodes: Iterable[int], message: ToCollector) -> None:
        for node in nodes:
            self.send(node, message)

    def poll(self, timeout_seconds: float) -> tuple[int, Event] | None:
        """Let some groups complete, and return a message, sooner or later."""
        node = self.rng.choice(self.nodes)
        collector = self.collectors[node]
        candidates = sorted(collector.running.keys() - self.endless_ids)
        if candidates and self.rng.random() < 0.4:
            self.complete(collector, self.rng.choice(candidates))
        if collector.outbox and self.rng.random() < 0.8:
            return node, collector.outbox.popleft()
        return None

    def lose(self, node: int) -> None:
        """End a collector, with all that it has not said, and connect the next one."""
        collector = self.collectors[node]
        self._connect(node, collector.epoch + 1)
        self.collectors[node].outbox.appendleft(CollectorGone(collector.epoch, "it is gone"))

    def _connect(self, node: int, epoch: int) -> None:
        self.collectors[node] = ScriptedCollector(epoch, outbox=deque([CollectorConnected(epoch)]))

    def complete(self, collector: ScriptedCollector, group_id: str) -> None:
        """Let a collector complete a group that it has, and extend it by its rule."""
        request = collector.running.pop(group_id)
        collector.kept_ids.add(group_id)
        if request.start is not None and not request.start.open_samples:  # it is only read
            group = msgspec.structs.replace(request.start, weight=1.0, prompt_weight=1.0)
            num_tokens = sampled_tokens(group)
        else:
            group = self.answer(request)
            num_tokens = TOKENS_PER_ROLLOUT * request.num_samples
            self.num_tokens += num_tokens
        answer = GroupDone(group=group, generated_tokens=num_tokens, attempt=request.attempt)
        rule = request.extension
        if rule is not None and rule.applies_to(answer.group):
            answer = msgspec.structs.replace(answer, is_extended=True)
            rest = request.rest()
            collector.running[rest.group_id] = rest
            self.num_extended += 1
        collector.outbox.append(answer)

    def _abort(self, collector: ScriptedCollector, group_id: str) -> None:
        """Abort a group, unless it is complete by then."""
        if group_id not in collector.running:
            return
        if group_id not in self.endless_ids and self.rng.random() < 0.2:
            self.complete(collector, group_id)
            return
        request = collector.running.pop(group_id)
        num_tokens = self.rng.randrange(TOKENS_PER_ROLLOUT * request.num_samples)
        self.num_tokens += num_tokens
        self.num_aborted += 1
        collector.outbox.append(
            Dropped(group_id=group_id, generated_tokens=num_tokens, attempt=request.attempt)
        )

    def _sample(self, request: GroupRequest) -> Group:
        places = range(request.first_sample, request.first_sample + request.num_samples)
        scores = [self.score(request.prompt.id, place) for place in places]
        answer = make_group(*scores, name=request.group_id)
        rollouts = tuple(
            self._at(rollout, place) for rollout, place in zip(answer.rollouts, places, strict=True)
        )
        return msgspec.structs.replace(answer, prompt=request.prompt, rollouts=rollouts)

    def _at(self, rollout: RolloutRef, place: int) -> RolloutRef:
        return msgspec.structs.replace(
            rollout,
            sample_index=place,
            rollout_id=f"{rollout.prompt_id}/{place}",
            verdict=msgspec.structs.replace(rollout.verdict, seconds=self.score_seconds),
        )
