"""The commands of a run, as a rehearsed rank executes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from launch.rehearsal.device_mode import DeviceMode
from launch.rehearsal.order.grid import Grid
from launch.rehearsal.order.phases import WITH_ROLLOUTS, WITHOUT_ROLLOUTS
from launch.rehearsal.order.recorder import Recorder
from launch.rehearsal.rank import Place, job_of
from launch.rehearsal.synthetic_batches import make_rollout, make_routes
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.commands import (
    Checkpoint,
    Command,
    Finish,
    Poll,
    Save,
    Train,
    WaitForSave,
)
from megatron_rl.contracts.group import RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.rollout import FinishReason, Rollout
from megatron_rl.contracts.step_plan import Denominators, OptimizerStep, StepPlan
from megatron_rl.losses import open_loss
from megatron_rl.mcore import optimizer, parallel
from megatron_rl.mcore.checkpoint import tensors
from megatron_rl.mcore.seams import skip_check_of_places
from megatron_rl.mcore.weights import save as weight_save
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.rollouts.wire import codec
from megatron_rl.run.build_worker import build_worker
from megatron_rl.run.checkpoints import saving
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.command_table import model_commands
from megatron_rl.training import batch_recording
from megatron_rl.training import worker as worker_module
from megatron_rl.training.dispatcher import Dispatcher
from megatron_rl.training.exchange import rollout_exchange
from megatron_rl.training.exchange.transfer_plan import Receiver

# Verdicts of all ranks on a step
_NOT_FINITE: Mapping[str, float | int] = {"_agree": optimizer._NOT_FINITE}
_SPIKE: Mapping[str, float | int] = {"_agree": optimizer._TOO_LARGE}
# The last stage reads NaN as its loss, and all ranks learn that a rank does.
_NAN: Mapping[str, float | int] = {**_NOT_FINITE, "update_policy": math.nan}


class RankCommands:
    """One rank with its worker, which executes commands through the trainer's own dispatcher.

    folder: for the files that the rank writes.
    """

    def __init__(
        self,
        c: Configuration,
        shape: ModelShape,
        place: Place,
        mode: DeviceMode,
        recorder: Recorder,
        folder: Path,
    ) -> None:
        self._c = c
        self._shape = shape
        self._place = place
        self._mode = mode
        self._recorder = recorder
        self._folder = folder
        self._step = 0
        mode.set_phase("setup")
        self._layout = parallel.initialize(c.parallel, seed=c.seed, job=job_of(place))
        loss = open_loss(c.algo, shape)
        self._worker = build_worker(c, shape, loss, self._layout, folder / "rollouts")
        self._grid = Grid(recorder.trace.groups, place.world_size)
        self._worker.receivers = self._receivers()
        self._store = CheckpointStore(folder / "checkpoints")
        self._store.folder.mkdir()
        checkpoints = saving.CheckpointWriter(self._worker, self._store, nbytes=0, keep=1)
        table = dict(model_commands(self._worker, checkpoints))
        table[Poll] = lambda command: None
        self._dispatcher = Dispatcher(self._layout.control_group, table)
        self._answer_host_memory()

    def run(self) -> None:
        """Run the commands of a scenario with normal and abnormal steps."""
        fills_pipeline = self._c.parallel.pp + 1
        few = 2
        if (self._c.parallel.vpp or 1) > 1:  # the interleaved schedule needs a multiple
            fills_pipeline = 2 * self._c.parallel.pp
            few = self._c.parallel.pp
        self._execute("evaluation", Poll())
        self._train("step", fills_pipeline)
        self._train("step with NaN", few, answers=_NAN)
        self._train("step with infinite gradients", few, answers=_NOT_FINITE)
        self._train("step with a spike", few, answers=_SPIKE, max_norm=1.0)
        self._train("step without rollouts", 0)
        self._train_unevenly(few)
        self._checkpoint("checkpoint")
        self._checkpoint("second checkpoint")
        self._execute("wait for a save", WaitForSave())
        self._execute("save of the weights", Save(path=str(self._folder / "weights")))

    def _train(
        self,
        name: str,
        micro_batches: int,
        answers: Mapping[str, float | int] | None = None,
        max_norm: float | None = None,
    ) -> None:
        replicas = [micro_batches] * self._layout.dp_size
        plan = self._plan(replicas, micro_batches)
        check_weights = max_norm is not None
        self._execute(name, Train(plan, max_norm=max_norm, check_weights=check_weights), answers)

    def _train_unevenly(self, micro_batches: int) -> None:
        """Train steps in which half of the replicas have empty micro-batches alone.

        This rank is once of one half and once of the other.
        """
        size = self._layout.dp_size
        if size == 1:
            return
        half = -(-size // 2)
        is_first = self._layout.dp_rank < half
        for name, has_rollouts in ((WITH_ROLLOUTS, True), (WITHOUT_ROLLOUTS, False)):
            first = micro_batches if is_first == has_rollouts else 0
            replicas = [first] * half + [micro_batches - first] * (size - half)
            self._execute(name, Train(plan=self._plan(replicas, micro_batches)))

    def _checkpoint(self, name: str) -> None:
        self._step += 1
        if self._place.rank:
            self._store.create_staging(self._step)  # rank 0 makes it on a shared file system
        names = msgspec.msgpack.encode([])
        self._execute(name, Checkpoint(step=self._step, state=b""), broadcasts=[names])

    def _execute(
        self,
        phase: str,
        command: Command,
        answers: Mapping[str, float | int] | None = None,
        broadcasts: Sequence[bytes] = (),
    ) -> None:
        """Run a command on this rank, followed by the command that ends the loop.

        broadcasts: what rank 0 sends to all ranks while the command runs.
        """
        recorder = self._recorder
        recorder.begin(phase)
        self._mode.set_phase(phase)
        self._mode.host_answers = dict(answers or {})
        if self._place.rank == 0:
            self._dispatcher.run(command)
            self._dispatcher.finish()
            return
        commands = [msgspec.msgpack.encode(item) for item in (command, Finish())]
        for data in (commands[0], *broadcasts, commands[1]):
            recorder.inbox += [
                torch.tensor([len(data)]),
                torch.frombuffer(bytearray(data), dtype=torch.uint8),
            ]
        self._dispatcher.follow()
        assert not recorder.inbox, "the rank left broadcasts of rank 0 unread"

    def _plan(self, replicas: Sequence[int], micro_batches: int) -> StepPlan:
        """A step with one rollout in each micro-batch.

        replicas: the number of micro-batches with a rollout, by data-parallel rank.
        """
        self._step += 1
        if micro_batches:
            count = 2 * self._c.parallel.cp * self._c.parallel.tp
            rows = self._longest() - 1
            # Rows of all chunks are a whole number, so that no rank pads
            assert rows % count == 0, "rows must be a multiple of the ranks that share them"
            self._announce_shape(rows)
        refs: list[RolloutRef] = []
        batches: list[tuple[tuple[int, ...], ...]] = []
        for has in replicas:
            of_replica: list[tuple[int, ...]] = []
            for index in range(micro_batches):
                of_replica.append((len(refs),) if index < has else ())
                if index < has:
                    refs.append(self._ref(len(refs)))
            batches.append(tuple(of_replica))
        step = OptimizerStep(
            micro_batches=tuple(batches), denominators=Denominators(sequences=1.0, tokens=1.0)
        )
        if micro_batches and not replicas[self._layout.dp_rank]:
            self._announce_shape(self._filler_rows())
        return StepPlan(
            step=self._step,
            rollouts=tuple(refs),
            advantages=(1.0,) * len(refs),
            optimizer_steps=(step,) if micro_batches else (),
        )

    def _announce_shape(self, rows: int) -> None:
        """Tell the shape of the hidden states that stages exchange."""
        p = self._c.parallel
        rows_of_rank = rows // (p.cp * p.tp)
        self._mode.log.message_shape = (rows_of_rank, 1, self._shape.hidden_size)

    def _filler_rows(self) -> int:
        filler = self._worker.batcher.pack([], [])
        return filler.inputs.num_tokens * self._c.parallel.cp

    def _ref(self, index: int) -> RolloutRef:
        num_nodes = self._layout.num_nodes
        location = RolloutLocation(node=index % num_nodes, pid=0, fd=0, offset=0, nbytes=0)
        return RolloutRef(
            rollout_id=str(index),
            prompt_id=str(index),
            sample_index=0,
            num_inputs=self._longest() - 1,
            num_trainable=self._c.rollout.max_new_tokens,
            finish_reason=FinishReason.STOP,
            tokens_by_version=((0, 1),),
            verdict=Verdict(reward=1.0, correctness=1.0),
            location=location,
        )

    def _longest(self) -> int:
        return self._c.data.max_prompt_tokens + self._c.rollout.max_new_tokens

    def _read_rollout(self, ref: RolloutRef) -> Rollout:
        generator = np.random.default_rng(0)
        layers = len(self._shape.moe_layers)
        routes = make_routes(ref.num_inputs, layers, self._shape, "balanced", generator)
        return make_rollout(
            int(ref.rollout_id),
            self._c.data.max_prompt_tokens,
            self._c.rollout.max_new_tokens,
            routes,
        )

    def _swap(
        self, outgoing: Sequence[Any], incoming: Sequence[Sequence[int]], group: dist.ProcessGroup
    ) -> dict[int, memoryview]:
        """Stand in for the exchange of rollouts: its two collectives, and what others would send.

        Every rollout is the same on all ranks, so that this rank can encode what it receives.
        """
        sizes = torch.zeros(self._place.world_size, dtype=torch.int64)
        dist.all_to_all_single(torch.zeros_like(sizes), sizes, group=group)
        empty = torch.empty(0, dtype=torch.uint8)
        none = [0] * self._place.world_size
        dist.all_to_all_single(torch.empty_like(empty), empty, none, none, group=group)
        rows = self._worker.receivers[self._place.rank].moe_rows
        return {
            index: memoryview(
                codec.encode(codec.select_layers(self._read_rollout(self._ref(index)), rows))
            )
            for indices in incoming
            for index in indices
        }

    def _receivers(self) -> list[Receiver]:
        """All ranks as receivers of rollouts; the collective that gathers them has equal values."""
        receivers = []
        for rank in range(self._place.world_size):
            view = RankView.for_rank(
                self._shape.num_layers,
                self._c.parallel,
                **self._layout.ranks | {"pp_rank": self._grid.stage(rank)},
            )
            receivers.append(
                Receiver(
                    dp_rank=self._grid.replica(rank),
                    node=rank // self._place.gpus_per_node,
                    moe_rows=view.moe_rows(self._shape.moe_layers),
                )
            )
        return receivers

    def _answer_host_memory(self) -> None:
        """Stand in for what reads rollouts and writes tensors, which have no data here."""
        recording: Any = batch_recording
        recording.read_rollout = self._read_rollout
        worker: Any = worker_module
        worker.RolloutReader = partial(_PlannedRollouts, self._read_rollout)
        exchange: Any = rollout_exchange
        exchange._swap = self._swap
        checkpoints: Any = saving
        checkpoints.write_tensors = lambda *_: None
        # Rank 0's check of what all ranks hold. Here all descriptions are this rank's own.
        skip_check_of_places()
        validator: Any = tensors
        validator.validate_sharding_integrity = lambda *_, **__: None
        weights: Any = weight_save
        weights._open_writer = lambda *_: None
        weights.begin_checkpoint = weights.commit_checkpoint = lambda *_, **__: None


class _PlannedRollouts:
    """Stands in for the reader of rollouts in a collector's memory."""

    def __init__(self, read: Callable[[RolloutRef], Rollout]) -> None:
        self.read = read

    def keep(self, ref: RolloutRef) -> None:
        """Do nothing: every rollout can be made again."""

    def close(self) -> None:
        """Do nothing."""
