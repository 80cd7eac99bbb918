"""The simulated machines of a run: nodes with engines, a trainer, and their clock."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_rl.rollouts.wire.messages import Priority, slots_of_engine
from tests.lab.run_time.simulation.engine import EngineSpeed, Piece, Response, SimulatedEngine

SAME_TIME = 1e-9  # seconds


class Slowdown(NamedTuple):
    """The slowdown of engine and trainer by each other, if they share cores or memory.

    engine: what a second of an engine, or of the way to it, takes longer while the trainer works,
    in seconds. trainer: what a second of the trainer takes longer while an engine works or gets
    requests. Below 0, it takes less.
    """

    engine: float = 0.0
    trainer: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The engines and the trainer.

    engines: their number. node_engines: engines of a node; the last node may have fewer.
    max_running: responses that an engine runs at a time. kv_tokens: of contexts that the cache of
    an engine holds. binds_late: a group waits for a node with
    room, as in rollouts/queue. Otherwise it goes to a node at once. slowdowns: of the first step,
    the second one and so on. After the last of them, the first one follows.

    Raises ValueError for values outside of their limits.
    """

    speed: EngineSpeed
    engines: int = 1
    node_engines: int = 8
    max_running: int = 256
    kv_tokens: float = math.inf
    binds_late: bool = True
    slowdowns: Sequence[Slowdown] = (Slowdown(),)

    def __post_init__(self) -> None:
        if min(self.engines, self.node_engines, self.max_running, self.kv_tokens) < 1:
            raise ValueError("engines, node_engines, max_running and kv_tokens must be at least 1")
        if not self.slowdowns:
            raise ValueError("machines need at least one slowdown")
        if min(min(slowdown) for slowdown in self.slowdowns) <= -1:
            raise ValueError("slowdowns must be above -1")

    def open_nodes(self) -> list[SimulatedNode]:
        """Make the nodes, with engines that do nothing."""
        engines = [
            SimulatedEngine(self.speed, self.max_running, self.kv_tokens)
            for _ in range(self.engines)
        ]
        starts = range(0, self.engines, self.node_engines)
        slots = slots_of_engine(self.max_running)
        return [
            SimulatedNode(engines[i : i + self.node_engines], slots, self.speed) for i in starts
        ]


@dataclass
class Group:
    """The responses to one prompt."""

    responses: Sequence[Response]
    num_open: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_open = len(self.responses)

    @property
    def step(self) -> int:
        return self.responses[0].key[0]

    @property
    def priority(self) -> Priority:
        """The place of its first response."""
        return min(response.priority for response in self.responses)


class SimulatedNode:
    """A node: what its collector does with requests, as in rollouts/collector/engines.

    Slots bound the requests in flight, and are given out by priority, then in the order of the
    requests. Requests reach the engines one after the other, each that with the fewest requests in
    flight. All times are on the clock of the engines.

    loads: responses that are not complete, by step. next_arrival: when the next request reaches an
    engine, infinite without one.
    """

    def __init__(
        self, engines: Sequence[SimulatedEngine], slots_per_engine: int, speed: EngineSpeed
    ) -> None:
        self.engines = engines
        self.loads = Counter[int]()
        self.version = 0
        self._speed = speed
        self._num_slots = slots_per_engine * len(engines)
        self._free_slots = self._num_slots
        self._waiters: list[tuple[Priority, int, Response]] = []  # a heap: they wait for a slot
        self._numbers = itertools.count()
        # Requests on their way to an engine, with the time of their arrival
        self._way: deque[tuple[float, Response]] = deque()
        self._last_arrival = -math.inf
        self._open_responses: list[Response] = []  # they keep their slots
        self._groups: dict[Response, Group] = {}  # of responses that are not complete
        self._is_open = True

    @property
    def next_arrival(self) -> float:
        return self._way[0][0] if self._way else math.inf

    @property
    def load(self) -> float:
        """The responses that are not complete, for each engine."""
        return self.loads.total() / len(self.engines)

    def has_room(self, step: int) -> bool:
        """True if it has slots that go to no response of this or an earlier step."""
        return sum(n for other, n in self.loads.items() if other <= step) < self._num_slots

    def accept(self, group: Group) -> None:
        """Take the requests for a group."""
        self.loads[group.step] += len(group.responses)
        for response in group.responses:
            self._groups[response] = group
            heapq.heappush(self._waiters, (response.priority, next(self._numbers), response))

    def finish(self, engine: SimulatedEngine, time: float) -> None:
        """End passes of an engine, and the pieces that end with them. time: since the start."""
        for piece in engine.finish():
            self._free_slots += 1
            self._end(piece, time)

    def dispatch(self, now: float) -> None:
        """Send what has a slot, hand engines what has arrived, and let them work."""
        while self._is_open and self._free_slots and self._waiters:
            self._free_slots -= 1
            self._send(heapq.heappop(self._waiters)[-1], now)
        while self.next_arrival <= now + SAME_TIME:
            self._hand_over(self._way.popleft()[1])
        for engine in self.engines:
            engine.start(now)

    def stop(self, now: float) -> None:
        """Send nothing more, and let engines stop after their pass."""
        self._is_open = False
        for engine in self.engines:
            engine.stop(now)

    def interrupt(self) -> None:
        """Take what engines have sampled. They must have stopped."""
        for engine in self.engines:
            for piece in engine.withdraw():
                piece.response.add(self.version, piece.num_sampled)
                self._open_responses.append(piece.response)
        self._open_responses += [response for _, response in self._way]
        self._way.clear()
        self._last_arrival = -math.inf

    def proceed(self, now: float) -> None:
        """Continue what was interrupted."""
        self._is_open = True
        for engine in self.engines:
            engine.proceed()
        for response in self._open_responses:
            self._send(response, now)
        self._open_responses = []

    def _send(self, response: Response, now: float) -> None:
        """Send a request to an engine, which gets it after those that were sent before."""
        arrival = max(now + self._speed.dispatch, self._last_arrival) + self._speed.arrival
        self._last_arrival = arrival
        self._way.append((arrival, response))

    def _end(self, piece: Piece, time: float) -> None:
        response = piece.response
        response.add(self.version, piece.num_sampled)
        response.end = time
        group = self._groups.pop(response)
        group.num_open -= 1
        self.loads[group.step] -= 1

    def _hand_over(self, response: Response) -> None:
        engine = min(self.engines, key=lambda engine: engine.in_flight)
        engine.add(Piece(response, response.length - response.num_tokens))


class Cluster:
    """All machines of a run, and their clock.

    now: seconds since the start.
    """

    def __init__(self, machines: Machines) -> None:
        self.now = 0.0
        self._nodes = machines.open_nodes()
        self._engines = [(node, engine) for node in self._nodes for engine in node.engines]
        self._binds_late = machines.binds_late
        self._waiting: list[tuple[Priority, int, Group]] = []  # a heap: they wait for a node
        self._numbers = itertools.count()
        self._slowdowns = itertools.cycle(machines.slowdowns)
        # The clock of engines advances less while the trainer slows them down
        self._engine_now = 0.0
        self._engine_slowness = 1.0

    @property
    def engines(self) -> list[SimulatedEngine]:
        """The engines of all nodes."""
        return [engine for _, engine in self._engines]

    def request(self, groups: Iterable[Group]) -> None:
        """Let groups wait for a node."""
        for group in groups:
            heapq.heappush(self._waiting, (group.priority, next(self._numbers), group))
        self._bind(needs_room=self._binds_late)

    def _bind(self, *, needs_room: bool) -> None:
        """Send groups to the nodes with the smallest load, as far as these have room."""
        while self._waiting:
            group = self._waiting[0][-1]
            nodes = [node for node in self._nodes if not needs_room or node.has_room(group.step)]
            if not nodes:
                return
            heapq.heappop(self._waiting)
            min(nodes, key=lambda node: node.load).accept(group)

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Let time pass until a condition holds. Raises RuntimeError if nothing can change it."""
        self._dispatch()
        while not is_over():
            event = self._next_event_seconds()
            if event == math.inf:
                raise RuntimeError("the run waits for responses, and nothing samples them")
            self._pass_until_event(event)
            self._bind(needs_room=True)
            self._dispatch()

    def train(self, seconds: float) -> None:
        """Train a step for so many seconds of a trainer that nothing slows down.

        Nothing waits for a node meanwhile: rank 0 could not send it.
        """
        self._bind(needs_room=False)
        self._dispatch()
        slowdown = next(self._slowdowns)
        self._engine_slowness = 1.0 + slowdown.engine
        while seconds > 0:
            slowness = 1.0
            if self._is_any_busy() or self._next_arrival() < math.inf:
                slowness += slowdown.trainer
            event = self._next_event_seconds()
            if event >= seconds * slowness:
                self._pass(seconds * slowness)
                break
            seconds -= event / slowness
            self._pass_until_event(event)
        self._engine_slowness = 1.0

    def rest(self, seconds: float) -> None:
        """Let time pass in which no engine may work. Raises RuntimeError if one does."""
        if self._is_any_busy():
            raise RuntimeError("an engine works on requests while it gets other weights")
        self._pass(seconds)

    def interrupt(self) -> bool:
        """Stop every response in the middle, until `proceed`. Returns False if none is running."""
        is_any_busy = self._is_any_busy()
        for node in self._nodes:
            node.stop(self._engine_now)
        self.wait(lambda: not self._is_any_busy())
        for node in self._nodes:
            node.interrupt()
        return is_any_busy

    def proceed(self) -> None:
        """Continue the responses that were interrupted."""
        for node in self._nodes:
            node.proceed(self._engine_now)

    def set_version(self, version: int) -> None:
        """Let engines sample with other weights."""
        for node in self._nodes:
            node.version = version

    def _is_any_busy(self) -> bool:
        return any(engine.is_busy for _, engine in self._engines)

    def _next_event_seconds(self) -> float:
        """Return the seconds until something happens, infinite if nothing will."""
        end = min(engine.end for _, engine in self._engines)
        event = min(end, self._next_arrival())
        return max(0.0, event - self._engine_now) * self._engine_slowness

    def _next_arrival(self) -> float:
        return min(node.next_arrival for node in self._nodes)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self._engine_now += seconds / self._engine_slowness

    def _pass_until_event(self, seconds: float) -> None:
        """Let time pass until the next event, and handle it with all that happen at that time."""
        self._pass(seconds)
        due = self._engine_now + SAME_TIME
        for node, engine in self._engines:
            if engine.end <= due:
                node.finish(engine, self.now)
        self._dispatch()

    def _dispatch(self) -> None:
        for node in self._nodes:
            node.dispatch(self._engine_now)
