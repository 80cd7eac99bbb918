"""Make a tiny start checkpoint from scratch: random weights, supervised steps, stopped by measured accuracy.

    python launch/cold_start_sft.py --task column_addition --seed 1 --evaluate-from 240 --out DIRECTORY
    python launch/cold_start_sft.py --task two_digit_addition --seed 1 --evaluate-from 60 --batch-size 256 \\
        --max-new-tokens 6 --out DIRECTORY

These two made the checkpoints in `megatron_rl/models/assets`.

The learning rate stays constant: a checkpoint annealed to a low one is destroyed by the updates of reinforcement
learning within ten steps. Dropout and wide initial weights make it well-conditioned: without them a float32 rounding
error grows to 1e-4 nats in some log-probabilities, three to four times as much as with them, and engines disagree.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import tempfile
from collections import deque
from pathlib import Path

from megatron_rl.mcore.cpu import compat

compat.install()

import torch  # noqa: E402

from megatron_rl.contracts.prompt import Prompt, Sampling  # noqa: E402
from megatron_rl.mcore import parallel  # noqa: E402
from megatron_rl.mcore.model import FromScratch, ParallelSizes, build_models  # noqa: E402
from megatron_rl.mcore.optimizer import AdamSettings, DistributedAdam, wrap_data_parallel  # noqa: E402
from megatron_rl.mcore.weights import iterate_hf_weights, save_hf_weights  # noqa: E402
from megatron_rl.models.qwen3_moe import read_shape  # noqa: E402
from megatron_rl.models.tokenizer import Tokenizer  # noqa: E402
from megatron_rl.planning.rank_view import RankView  # noqa: E402
from megatron_rl.prompts.factory import open_prompts  # noqa: E402
from megatron_rl.prompts.worked import worked_examples  # noqa: E402
from megatron_rl.rollouts.evaluation import Accuracy, evaluate  # noqa: E402
from megatron_rl.rollouts.hub import Hub  # noqa: E402
from megatron_rl.rollouts.messages import Configure  # noqa: E402
from megatron_rl.rollouts.queue import RolloutQueue  # noqa: E402
from megatron_rl.run.services import NodeServices  # noqa: E402
from megatron_rl.sync.weight_sync import WeightSync, build_weight_sync  # noqa: E402
from megatron_rl.training.batch import Batcher  # noqa: E402
from megatron_rl.training.cold_start import SupervisedTrainer, write_blank_model  # noqa: E402
from megatron_rl.training.logprobs import ResponseLogprobs  # noqa: E402
from sglang_bridge.handle import EngineHandle  # noqa: E402
from sglang_bridge.keys import create_keys  # noqa: E402
from sglang_bridge.settings import EngineSettings  # noqa: E402

# Narrower embeddings, or no dropout, make float32 rounding errors grow: see above.
_SCRATCH = FromScratch(embedding_std=0.16, hidden_dropout=0.1)


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        blank = Path(scratch) / "blank"
        write_blank_model(blank)
        model = read_shape(blank)
        sizes = ParallelSizes()
        parallel.initialize(sizes, seed=arguments.seed, timeout_s=600)
        stack.callback(parallel.shutdown)
        chunks = build_models(model, sizes, dtype=torch.float32, scratch=_SCRATCH)
        save_hf_weights(chunks, model, source=blank, target=Path(scratch) / "start", dtype=torch.float32)
        producer, weights, services = _open_engine(Path(scratch) / "start", Path(scratch), stack)
        models = wrap_data_parallel(chunks)
        tokenizer = Tokenizer.from_directory(blank)
        trainer = SupervisedTrainer(
            worked_examples(arguments.task, tokenizer),
            models,
            DistributedAdam(models, _adam(arguments.lr)),
            Batcher(RankView.of(num_layers=model.num_layers), None, torch.device("cpu")),
            ResponseLogprobs(temperature=1.0, vocab_size=model.vocab_size, chunk_tokens=4096, tp_group=None),
            batch_size=arguments.batch_size,
            seed=arguments.seed,
        )
        prompts = open_prompts(arguments.task, tokenizer, num_eval=256).held_out
        recent: deque[float] = deque(maxlen=arguments.average)
        for step in range(1, arguments.max_steps + 1):
            loss, _ = trainer.step()
            if step < arguments.evaluate_from or step % arguments.evaluate_every:
                continue
            weights.push(weights.next_command(), iterate_hf_weights(models, model))
            accuracy = _measure(producer, prompts, str(step), arguments.max_new_tokens, model.eos_token_ids, services)
            recent.append(accuracy.accuracy)
            print(
                f"step {step}: loss {loss:.4f}, pass@1 {accuracy.accuracy:.3f} ± {accuracy.half_width:.3f}, "
                f"{accuracy.parseable:.1%} parseable",
                flush=True,
            )
            if len(recent) == recent.maxlen and sum(recent) / len(recent) >= arguments.target:
                break
        save_hf_weights(models, model, source=blank, target=arguments.out, dtype=torch.bfloat16)
        print(f"wrote {arguments.out}")


def _open_engine(
    start: Path, scratch: Path, stack: contextlib.ExitStack
) -> tuple[RolloutQueue, WeightSync, NodeServices]:
    """One engine on CPU with its collector, ended with `stack`."""
    services = NodeServices(node=0, log_directory=scratch)
    stack.callback(services.stop)
    keys, run_key = create_keys(), secrets.token_urlsafe(32)
    settings = EngineSettings(
        model_path=str(start), dtype="float32", device="cpu", max_running_requests=256, max_total_tokens=16384,
        return_routes=False,
    )  # fmt: skip
    services.start_engines([settings], keys)
    (endpoint,) = services.wait_healthy(180.0)
    hub = Hub("127.0.0.1", run_key)
    stack.callback(hub.close)
    services.start_collector(hub.address, run_key)
    hub.wait_for(1, 60.0)
    producer = RolloutQueue(hub, max_staleness=1 << 30)
    producer.configure(
        {
            0: Configure(
                engines=(endpoint,),
                tokenizer_path=str(start),
                routes=None,
                reward_name="exact_match",
                reward_answer="last_number",
                reward_timeout_s=10.0,
                request_timeout_s=120.0,
                retries=2,
                max_in_flight=512,
                train_truncated=True,
            )
        }
    )
    weights = build_weight_sync(
        [EngineHandle(urls=(endpoint.url,))], keys, transport="distributed", bucket_mb=64.0, timeout_s=120.0,
        directory=scratch / "sync", model_path=start, device=torch.device("cpu"), dtype=torch.float32,
        num_experts=read_shape(start).num_experts, audit_every=0,
    )  # fmt: skip
    stack.callback(weights.close)
    return producer, weights, services


def _measure(
    producer: RolloutQueue,
    prompts: tuple[Prompt, ...],
    label: str,
    max_new_tokens: int,
    eos_ids: tuple[int, ...],
    services: NodeServices,
) -> Accuracy:
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=1.0, stop_token_ids=eos_ids)
    return evaluate(producer, prompts, label=label, samples_per_prompt=4, sampling=sampling, idle=services.check)


def _adam(lr: float) -> AdamSettings:
    return AdamSettings(
        lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, clip_grad=1.0, warmup_steps=20, decay_steps=1,
        decay="constant", min_lr_ratio=1.0,
    )  # fmt: skip


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--task", required=True, choices=["column_addition", "two_digit_addition"])
    parser.add_argument("--out", required=True, type=Path, help="directory of the checkpoint; must not exist")
    parser.add_argument("--target", type=float, default=0.30, help="sampled pass@1 at which training stops")
    parser.add_argument("--average", type=int, default=2, help="evaluations the accuracy is averaged over")
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--evaluate-from", type=int, default=150)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"--out {arguments.out}: exists already; choose another directory")
    return arguments


if __name__ == "__main__":
    main()
