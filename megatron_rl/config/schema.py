"""Every configuration key, its type and its default, as Hydra structured configs.

Invariant: a key that is not declared here does not exist. Defaults are safe rather than tuned; recipes live in
`hydra_conf/experiment`. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class ModelConfig:
    """The start checkpoint, a directory in Hugging Face format, and the precision it is trained in."""

    path: str = MISSING
    dtype: str = "float32"  # float32 | bfloat16
    recompute: str = "none"  # none | selective | full


@dataclass
class AlgoConfig:
    """What every algorithm shares. `name` chooses the loss; see the subclasses."""

    name: str = MISSING
    normalize_std: bool = True  # divide group advantages by the group's standard deviation
    zero_variance: str = "drop"  # drop: groups whose raw correctness does not differ leave the step
    permute_rewards: bool = False  # control experiment: verdicts shuffled across the batch; nothing can be learnt


@dataclass
class GrpoConfig(AlgoConfig):
    """Token-level ratios with asymmetric clipping (DAPO's clip-higher), averaged over the batch's tokens."""

    name: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28


@dataclass
class GspoConfig(AlgoConfig):
    """Sequence-level ratios with gradients through the tokens (GSPO-token)."""

    name: str = "gspo"
    clip_low: float = 3e-4
    clip_high: float = 4e-4


@dataclass
class EspoConfig(AlgoConfig):
    """Entropy-grouped importance sampling with entropy-adaptive clipping."""

    name: str = "espo"
    alpha: float = 0.02
    fractions: list[float] = field(default_factory=lambda: [0.2])  # [] = one group: no grouping
    min_clip: float = 3e-4
    fixed_clip: float | None = None  # ablation: one epsilon for every group instead of the adaptive one
    ratio_denominator: str = "current"  # current | old


@dataclass
class DataConfig:
    """Where prompts come from and how they are split into train and held-out questions."""

    source: str = MISSING  # column_addition | two_digit_addition | jsonl | reasoning_gym
    train_path: str | None = None  # jsonl only
    eval_path: str | None = None  # jsonl only; null: num_eval questions are held out of train_path
    task: str | None = None  # reasoning_gym only: the generator's name
    task_config: dict[str, Any] = field(default_factory=dict)  # reasoning_gym only: the generator's own settings
    num_train: int = 24000
    num_eval: int = 512
    shuffle: bool = True
    seed: int = 0
    on_bad_row: str = "fail"  # fail | skip
    max_prompt_tokens: int = 1024


@dataclass
class RewardConfig:
    """How a response is judged."""

    name: str = "exact_match"
    answer: str = "last_number"  # last_number | last_line | boxed: where the final answer is looked for
    timeout_s: float = 10.0


@dataclass
class EngineConfig:
    """SGLang servers: started and watched by the run (managed), or already running (external)."""

    mode: str = "managed"  # managed | external
    urls: list[str] = field(default_factory=list)  # external only
    key_file: str | None = None  # external only: a 0600 file with {"api_key": ..., "admin_api_key": ...}
    count: int = 1  # managed only: engines per node
    tp: int = 1
    ep: int = 1
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "float32"
    quantization: str | None = None
    max_running_requests: int = 256
    max_total_tokens: int = 16384
    threads: int = 1
    start_timeout_s: float = 180.0
    request_timeout_s: float = 120.0
    retries: int = 2
    extra_args: list[str] = field(default_factory=list)


@dataclass
class ParallelConfig:
    """Megatron's parallel sizes. Data parallelism is what is left of the world."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    timeout_s: float = 600.0


@dataclass
class RolloutConfig:
    """One rollout batch: prompts x samples, drawn from the untruncated distribution."""

    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    max_new_tokens: int = MISSING
    temperature: float = 1.0
    train_truncated: bool = True  # whether a response cut at max_new_tokens receives a loss
    max_staleness: int = 0


@dataclass
class OptimizerConfig:
    """AdamW and its schedule, counted in optimizer steps."""

    lr: float = 3e-4
    warmup_steps: int = 5
    decay: str = "linear"  # constant | linear | cosine
    min_lr_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0


@dataclass
class TrainConfig:
    """One training step: how many optimizer steps a rollout batch is split into, and how big a micro-batch is."""

    total_steps: int = MISSING
    optimizer_steps_per_batch: int = 4
    tokens_per_micro_batch: int = 8192
    logit_chunk_tokens: int = 4096  # rows of logits turned into log-probabilities at a time
    replay_routes: bool = True
    max_nonfinite_steps: int = 3  # consecutive steps with NaN or Inf after which the run stops


@dataclass
class EvalConfig:
    """Sampled pass@1 on the held-out questions, at the training temperature unless told otherwise."""

    every: int = 10  # steps; 0: only at the start and the end
    samples_per_prompt: int = 4
    temperature: float | None = None


@dataclass
class SyncConfig:
    """How new weights reach the engines."""

    transport: str = "distributed"  # distributed | disk
    bucket_mb: float = 256.0
    audit_every: int = 10  # syncs; the first sync is always audited, 0: only that one
    timeout_s: float = 120.0


@dataclass
class LoggerConfig:
    """What is written beside metrics.jsonl."""

    tensorboard: bool = True
    progress: bool = True
    save_rollouts_every: int = 0  # steps; 0: only batches that a non-finite step leaves behind


@dataclass
class RunConfig:
    """The run directory is `root/name`; `name` null: experiment, date and time."""

    root: str = "runs"
    name: str | None = None
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
    seed: int = 0
