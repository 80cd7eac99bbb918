"""The weights that engines hold, as rank 0's loop knows them."""

from __future__ import annotations

from megatron_rl.contracts.run_state import LoopState
from megatron_rl.engines.weight_sync import WeightSync
from megatron_rl.records.progress import Progress
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.run.loop.step_parts import RolloutHolder
from megatron_rl.training.dispatcher import Dispatcher


class EngineWeights:
    """Sends the trainer's weights to engines that do not hold them.

    sync: None without engines. follows_steps: engines get the weights of every step, and not only
    for evaluations. colocated: engines share their devices with the ranks.
    """

    def __init__(
        self,
        sync: WeightSync | None,
        *,
        follows_steps: bool,
        holder: RolloutHolder,
        dispatcher: Dispatcher,
        progress: Progress,
        colocated: bool,
    ) -> None:
        self.is_synced = False  # engines hold the weights that the trainer has
        self.follows_steps = follows_steps
        self._sync = sync
        self._holder = holder
        self._dispatcher = dispatcher
        self._progress = progress
        self._colocated = colocated
        self._has_logged_obstacle = False

    @property
    def has_engines(self) -> bool:
        """False where rollouts come from a recording."""
        return self._sync is not None

    @property
    def version(self) -> int | None:
        """The version that engines were sent last, None before the first."""
        return None if self._sync is None else self._sync.version

    def send(self, values: dict[str, float]) -> None:
        """Send the weights to every engine under the next version, unless they hold them."""
        if self.is_synced or self._sync is None:
            return
        # Steps may be so short that nothing waited for rollouts and looked after engines
        self._holder.refresh()
        command = self._sync.next_command()
        with self._progress.task("sending the weights to the engines"):
            values |= self._dispatcher.run(command)
        if self._sync.audit_obstacle and not self._has_logged_obstacle:
            self._has_logged_obstacle = True
            self._progress.log(f"weights are not audited by value: {self._sync.audit_obstacle}")
        self._holder.set_version(command.version)
        self.is_synced = True

    def send_again(self) -> None:
        """Send the weights to engines that have slept, so that they can sample once more."""
        if self._colocated:
            self.send({})

    def send_after_step(self, values: dict[str, float], watch: Stopwatch) -> None:
        """Send the weights if every step does."""
        with watch.section("sync"):
            if self.follows_steps:
                self.send(values)

    def expire(self) -> None:
        """Note that the engines do not hold the trainer's weights any more."""
        self.is_synced = False
        if self._sync is not None:
            self._sync.expire()

    def sleep(self, watch: Stopwatch) -> None:
        """Let engines sleep, if they share their devices with the ranks."""
        if not self._colocated or self._sync is None:
            return
        # An engine that has ended meanwhile cannot sleep, and holds no memory
        self._holder.refresh()
        with watch.section("sleep"), self._progress.task("letting the engines sleep"):
            self._sync.sleep()
        self.is_synced = False

    def restore(self, state: LoopState) -> None:
        """Go on with the version of a checkpoint."""
        if self._sync is not None:
            is_synced = state.weights_synced and self.follows_steps
            self._sync.resume_from(state.version, is_synced=is_synced)
