"""Every configuration key, its type and its default, as Hydra structured configs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from megatron_rl.config.limits import setting

MAX_SEED = 2**32 - 1  # of numpy's global generator, which Megatron seeds


@dataclass
class ModelConfig:
    """The start checkpoint, a directory in Hugging Face format, and the precision it is trained in."""

    path: str = MISSING
    dtype: str = setting("float32", choices=("float32", "bfloat16"))
    recompute: str = setting("none", choices=("none", "selective", "full"))


@dataclass
class AlgoConfig:
    """What every algorithm shares. `name` chooses the loss; see the subclasses."""

    name: str = MISSING
    normalize_std: bool = True  # divide group advantages by the group's standard deviation
    zero_variance: str = setting(
        "drop", choices=("drop",)
    )  # drop: groups whose raw correctness does not differ leave the step
    permute_rewards: bool = False  # control experiment: verdicts shuffled across the batch; nothing can be learnt


@dataclass
class GrpoConfig(AlgoConfig):
    """Token-level ratios with asymmetric clipping (DAPO's clip-higher), averaged over the batch's tokens."""

    name: str = "grpo"
    clip_low: float = setting(0.2, gt=0, lt=1)
    clip_high: float = setting(0.28, gt=0)


@dataclass
class GspoConfig(AlgoConfig):
    """Sequence-level ratios with gradients through the tokens (GSPO-token)."""

    name: str = "gspo"
    clip_low: float = setting(3e-4, gt=0, lt=1)
    clip_high: float = setting(4e-4, gt=0)


@dataclass
class EspoConfig(AlgoConfig):
    """Entropy-grouped importance sampling with entropy-adaptive clipping."""

    name: str = "espo"
    alpha: float = setting(0.02, ge=0)
    fractions: list[float] = field(default_factory=lambda: [0.2])  # [] = one group: no grouping
    min_clip: float = setting(3e-4, ge=0, lt=1)
    fixed_clip: float | None = setting(None, gt=0, lt=1)  # ablation: one epsilon instead of the adaptive ones
    ratio_denominator: str = setting("current", choices=("current", "old"))


@dataclass
class DataConfig:
    """Where prompts come from and how they are split into train and held-out questions."""

    source: str = setting(MISSING, choices=("column_addition", "two_digit_addition", "jsonl", "reasoning_gym"))
    train_path: str | None = None  # jsonl only
    eval_path: str | None = None  # jsonl only; null: num_eval questions are held out of train_path
    task: str | None = None  # reasoning_gym only: the generator's name
    task_config: dict[str, Any] = field(default_factory=dict)  # reasoning_gym only: the generator's own settings
    num_train: int = setting(24000, ge=1)
    num_eval: int = setting(512, ge=1)
    shuffle: bool = True
    seed: int = setting(0, ge=0, le=MAX_SEED)
    on_bad_row: str = setting("fail", choices=("fail", "skip"))
    max_prompt_tokens: int = setting(1024, ge=1)


@dataclass
class RewardConfig:
    """How a response is judged."""

    name: str = setting("exact_match", choices=("exact_match",))
    answer: str = setting("last_number", choices=("last_number", "last_line", "boxed"))  # where it is looked for
    timeout_s: float = setting(10.0, gt=0)


@dataclass
class EngineConfig:
    """SGLang servers: started and watched by the run (managed), or already running (external)."""

    mode: str = setting("managed", choices=("managed", "external"))
    urls: list[str] = field(default_factory=list)  # external only
    key_file: str | None = None  # external only: a 0600 file with {"api_key": ..., "admin_api_key": ...}
    count: int = setting(1, ge=1)  # managed only: engines per node
    tp: int = setting(1, ge=1)
    ep: int = setting(1, ge=1)
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))  # managed only; the trainer's: GPUs where there are
    dtype: str = setting("float32", choices=("float32", "bfloat16"))
    quantization: str | None = None
    max_running_requests: int = setting(256, ge=1)  # bounds the requests in flight too
    max_total_tokens: int = setting(16384, ge=1)  # managed only
    threads: int = setting(1, ge=1)  # managed only
    start_timeout_s: float = setting(180.0, gt=0)  # managed only; less than parallel.timeout_s
    request_timeout_s: float = setting(120.0, gt=0)
    retries: int = setting(2, ge=0)
    extra_args: list[str] = field(default_factory=list)  # managed only


@dataclass
class ParallelConfig:
    """Megatron's parallel sizes. Data parallelism is what is left of the world."""

    tp: int = setting(1, ge=1)
    pp: int = setting(1, ge=1)  # more than 1 is not supported yet, as of vpp and cp
    vpp: int | None = setting(None, ge=1)
    cp: int = setting(1, ge=1)
    ep: int = setting(1, ge=1)
    etp: int = setting(1, ge=1)
    sequence_parallel: bool = False
    timeout_s: float = setting(600.0, gt=0)


@dataclass
class RolloutConfig:
    """One rollout batch: prompts x samples, drawn from the untruncated distribution."""

    prompts_per_step: int = setting(64, ge=1)
    samples_per_prompt: int = setting(8, ge=2)
    max_new_tokens: int = setting(MISSING, ge=1)
    # Beyond these SGLang samples greedily, or logits lose their digits, while the trainer divides by it
    temperature: float = setting(1.0, ge=0.01, le=100)
    train_truncated: bool = True  # whether a response cut at max_new_tokens receives a loss
    max_staleness: int = setting(0, ge=0)


@dataclass
class OptimizerConfig:
    """AdamW and its schedule, counted in optimizer steps."""

    lr: float = setting(3e-4, ge=0)
    warmup_steps: int = setting(5, ge=0)
    decay: str = setting("linear", choices=("constant", "linear", "cosine"))
    min_lr_ratio: float = setting(0.1, ge=0, le=1)
    beta1: float = setting(0.9, ge=0, lt=1)
    beta2: float = setting(0.95, ge=0, lt=1)
    eps: float = setting(1e-8, gt=0)
    weight_decay: float = setting(0.0, ge=0)
    clip_grad: float = setting(1.0, ge=0)  # 0: no clipping


@dataclass
class TrainConfig:
    """One training step: how many optimizer steps a rollout batch is split into, and how big a micro-batch is."""

    total_steps: int = setting(MISSING, ge=1)
    optimizer_steps_per_batch: int = setting(4, ge=1)
    tokens_per_micro_batch: int = setting(8192, ge=1)
    logit_chunk_tokens: int = setting(4096, ge=1)  # rows of logits turned into log-probabilities at a time
    replay_routes: bool = True
    max_nonfinite_steps: int = setting(3, ge=1)  # consecutive steps with NaN or Inf after which the run stops


@dataclass
class EvalConfig:
    """Sampled pass@1 on the held-out questions, at the training temperature unless told otherwise."""

    every: int = setting(10, ge=0)  # steps; 0: only at the start and the end
    samples_per_prompt: int = setting(4, ge=1)
    temperature: float | None = setting(None, ge=0, le=100)  # null: the training temperature


@dataclass
class SyncConfig:
    """How new weights reach the engines."""

    transport: str = setting("distributed", choices=("distributed", "disk"))
    bucket_mb: float = setting(256.0, ge=0.001)
    audit_every: int = setting(10, ge=0)  # syncs; the first sync is always audited, 0: only that one
    timeout_s: float = setting(120.0, gt=0)  # less than parallel.timeout_s


@dataclass
class LoggerConfig:
    """What is written beside metrics.jsonl."""

    tensorboard: bool = True
    progress: bool = True
    save_rollouts_every: int = setting(0, ge=0)  # steps; 0: only batches that a non-finite step leaves behind


@dataclass
class RunConfig:
    """The run directory is `root/name`; `name` null: experiment, date and time."""

    root: str = "runs"
    name: str | None = None
    experiment: str | None = None  # null: the name of the experiment group chosen
    save_weights: bool = True  # write the final weights in Hugging Face format


@dataclass
class TrainRlConfig:
    """The whole of `launch/train_rl.py`'s configuration."""

    model: ModelConfig = field(default_factory=ModelConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    run: RunConfig = field(default_factory=RunConfig)
    seed: int = setting(0, ge=0, le=MAX_SEED)
