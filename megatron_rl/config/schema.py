"""Every configuration key with its type, its limits and its default.

Rules across keys are in `rules/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import PlainValidator

from megatron_rl.config.algorithms import AlgoSettings, read_algorithm
from megatron_rl.config.values import (
    BelowOne,
    Count,
    Dtype,
    Name,
    NotNegative,
    Off,
    Options,
    PluginName,
    Positive,
    Seconds,
    Section,
    Seed,
    Share,
    Whole,
)
from sglang_bridge.settings import ServerSettings

RecomputeModule = Literal[
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"
]


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Section):
    """The start checkpoint, a directory in Hugging Face format, and the precision it is trained in."""

    path: str
    dtype: Dtype = "float32"
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: list[RecomputeModule] | None = (
        None  # selective only, Megatron's names; null: [core_attn]
    )
    spec: Literal["local", "te"] | None = (
        None  # null: te with CUDA, Transformer Engine and bfloat16
    )
    fp8: Literal["tensorwise", "blockwise", "mxfp8"] | None = (
        None  # te only: matrix products of training in FP8
    )
    init: Literal["checkpoint", "random"] = (
        "checkpoint"  # random: config.json and the tokenizer are enough
    )
    embedding_std: Annotated[float, Gt(0)] | None = (
        None  # init=random; null: the model's initializer_range
    )
    hidden_dropout: BelowOne = 0.0  # init=random


@dataclass(frozen=True, kw_only=True)
class DataSettings(Section):
    """Where prompts come from and how they are split into train and held-out questions."""

    source: (
        Literal[
            "column_addition",
            "column_addition_mixed",
            "two_digit_addition",
            "jsonl",
            "reasoning_gym",
        ]
        | PluginName
    )
    train_path: str | None = None  # jsonl only
    eval_path: str | None = None  # jsonl only; null: num_eval questions are held out of train_path
    task: str | None = None  # reasoning_gym only: the generator's name
    task_config: Options = field(
        default_factory=dict
    )  # reasoning_gym only: the generator's own settings
    options: Options = field(default_factory=dict)  # arguments of a source of the user's own
    num_train: Count = 24000
    num_eval: Count = 512
    shuffle: bool = True
    seed: Seed = 0
    on_bad_row: Literal["fail", "skip"] = "fail"
    max_prompt_tokens: Positive = 1024
    pass_rates: str | None = (
        None  # a file of launch/profile_prompts.py, where beliefs begin; mode=profile writes it
    )
    pass_rate_range: list[Share] | None = (
        None  # [low, high]: only prompts whose pass rate there lies between these are trained on
    )


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings(Section):
    """What happens with one prompt."""

    name: Literal["single_turn", "demonstration"] | PluginName = (
        "single_turn"  # worked: the source's own worked responses
    )
    options: Options = field(default_factory=dict)  # arguments of an environment of the user's own
    timeout_s: Seconds = (
        600.0  # what an environment may take between two responses before its rollout is rejected
    )


@dataclass(frozen=True, kw_only=True)
class RewardSettings(Section):
    """How a response is judged."""

    name: Literal["exact_match"] | PluginName = "exact_match"
    answer: Literal["last_number", "last_line", "boxed"] = (
        "last_number"  # exact_match: where it is looked for
    )
    timeout_s: Seconds = 10.0
    options: Options = field(default_factory=dict)  # arguments of a scorer of the user's own


@dataclass(frozen=True, kw_only=True)
class CreditSettings(Section):
    """What becomes of groups without a contrast, and what shaping may add to the others'
    (docs/zero_variance.md).
    """

    all_correct: Literal["drop", "zvp", "keep"] = (
        "drop"  # zvp: trained by entropy; keep: counted, as plain GRPO does
    )
    all_incorrect: Literal["drop", "zvp", "keep"] = "drop"
    tied_correct: Literal["drop", "shape"] = (
        "drop"  # all right, of lengths that differ: the shorter, the better
    )
    tied_incorrect: Literal["drop", "shape"] = (
        "drop"  # all wrong, some repeating themselves: the others are better
    )
    zvp_alpha: Share = 0.1  # advantage per nat of entropy; 0: as drop
    shaping: Annotated[float, Ge(0), Le(0.5)] = (
        0.5  # the share of an advantage that penalties may take or add; 0: none
    )
    length: Literal["buffer", "excess"] | None = None  # penalty of right responses; null: none
    length_buffer: Positive | None = (
        None  # tokens before rollout.max_new_tokens; null: a fifth of that
    )
    length_excess: Annotated[float, Ge(1)] = (
        1.5  # times the group's median length of right responses
    )
    repetition_ngram: Annotated[int, Ge(2), Le(10**4)] | None = (
        None  # penalty of wrong responses (40); null: none
    )
    tied_scale: Annotated[float, Gt(0), Le(0.1)] = 0.1  # the largest advantage in a tied group


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Section, ServerSettings):
    """SGLang servers: started and watched by the run (managed), or already running (external)."""

    mode: Literal["managed", "external"] = "managed"
    urls: list[str] = field(default_factory=list)  # external only
    key_file: str | None = (
        None  # external only: a 0600 file with {"api_key": ..., "admin_api_key": ...}
    )
    count: Annotated[int, Ge(1), Le(1024)] = 1  # managed only: engines per node
    fake_quant: Annotated[Literal["off", "bf16", "fp8_blockwise"], Off] = (
        "off"  # a rounding of weights, and no more
    )
    # An engine that answers nobody for request_timeout_s and this for each of
    # rollout.max_new_tokens has failed
    token_timeout_s: Annotated[float, Ge(0), Le(3600)] = 0.1


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(Section):
    """Megatron's parallel sizes. Data parallelism is what is left of the world."""

    tp: Positive = 1
    pp: Positive = 1
    vpp: Positive | None = None  # virtual pipeline chunks of a stage; null is 1
    first_stage_layers: Positive | None = (
        None  # of the stage that embeds too; null: as many as the others
    )
    last_stage_layers: Positive | None = (
        None  # of the stage that computes logits too; null: as many as the others
    )
    cp: Positive = 1
    ep: Positive = 1
    etp: Positive | None = (
        None  # ranks that share one expert; null: 1 with ep above 1, else tp (Megatron: always tp)
    )
    sequence_parallel: bool = False
    timeout_s: Seconds = 600.0

    @property
    def default_etp(self) -> int:
        """What `etp` is when it is null."""
        return self.tp if self.ep == 1 else 1


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Section):
    """One rollout batch: prompts x samples, drawn from the untruncated distribution."""

    prompts_per_step: Count = 64
    samples_per_prompt: Count = 8
    max_new_tokens: Positive
    # Beyond these SGLang samples greedily, or logits lose their digits, while the trainer divides
    # by it
    temperature: Annotated[float, Ge(0.01), Le(100)] = 1.0
    train_truncated: bool = True  # whether a response cut at max_new_tokens receives a loss
    max_staleness: Whole = 0
    max_rejected_share: Share = (
        0.5  # of a batch's rollouts: with more of them unusable the run stops
    )
    recording: str | None = None  # mode=train_only: the directory of a run with mode=rollout_only


@dataclass(frozen=True, kw_only=True)
class SelectionExpertSettings(Section):
    """Numbers of `selection=belief` that seldom need a change. See docs/selection.md."""

    # A prompt is accepted with probability (chance / acceptance_target) ^ acceptance_exponent.
    acceptance_exponent: Annotated[float, Ge(0), Le(100)] = 5.0
    acceptance_target: Annotated[float, Gt(0), Le(1)] = 0.6
    # No prompt is accepted with a smaller probability.
    min_acceptance: Annotated[float, Gt(0), Le(1)] = 0.1
    # A prompt that was not sampled for this many steps is accepted at least every other time.
    max_age_steps: Positive = 100
    # A step with this share of rollout.prompts_per_step mixed groups starts no further round.
    min_filled: Annotated[float, Gt(0), Le(1)] = 0.9


@dataclass(frozen=True, kw_only=True)
class SelectionSettings(Section):
    """Which prompts a step samples, and how many rollouts of each. See docs/selection.md."""

    name: Literal["uniform", "oversample", "belief"] = "uniform"
    # oversample, belief: the rollouts of a step at most, in multiples of rollout.prompts_per_step x
    # rollout.samples_per_prompt.
    budget: Annotated[float, Ge(1), Le(10**4)] = 4.0
    # belief: the prompts to avoid. all_correct: those whose responses are probably all correct;
    # zero_variance: also those whose responses are probably all incorrect.
    skip: Literal["all_correct", "zero_variance"] = "all_correct"
    # belief: the rollouts of an uncertain prompt's first group. The group is completed unless
    # `skip` names what they show. 0: sample whole groups at once.
    probe_samples: Whole = 4
    # belief: the directory of a run, or of one of its checkpoints, whose beliefs a new run starts
    # with.
    beliefs_from: str | None = None
    expert: SelectionExpertSettings = field(default_factory=SelectionExpertSettings)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Section):
    """AdamW and its schedule, counted in optimizer steps."""

    lr: NotNegative = 3e-4
    warmup_steps: Whole = 5
    decay: Literal["constant", "linear", "cosine"] = "linear"
    min_lr_ratio: Share = 0.1
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    eps: Annotated[float, Gt(0)] = 1e-8
    weight_decay: NotNegative = 0.0
    clip_grad: NotNegative = 1.0  # 0: no clipping


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Section):
    """One training step: how many optimizer steps a rollout batch is split into, and how big a
    micro-batch is.
    """

    total_steps: Positive
    optimizer_steps_per_batch: Positive = 4
    tokens_per_micro_batch: Positive = 8192
    logit_chunk_tokens: Positive = 4096  # rows of logits turned into log-probabilities at a time
    replay: Annotated[Literal["rollout", "trainer", "off"], Off] = (
        "rollout"  # the routes of engines (R3), own (R2)
    )
    replay_measure_every: Whole = (
        0  # steps in which a pass with live routing shows what replay changes; 0: never
    )
    max_route_disagreement: Share = (
        0.5  # with the trainer's own routing; above it the run stops, 1: never
    )
    max_nonfinite_steps: Positive = 3  # consecutive steps with NaN or Inf after which the run stops


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Section):
    """Sampled pass@1 on the held-out questions, at the training temperature unless told otherwise."""

    every: Whole = 10  # steps; 0: only at the start and the end
    start_step: Whole = 0  # no evaluation before this step
    samples_per_prompt: Count = 4
    sets: dict[str, str] = field(
        default_factory=dict
    )  # mode=eval: JSONL files by name; none: the held-out questions
    temperature: Annotated[float, Ge(0), Le(100)] | None = None  # null: the training temperature
    stop_at: Share | None = (
        None  # the run ends once the mean accuracy of the last `stop_average` evaluations is here
    )
    stop_average: Positive = 2
    max_rejected_share: Share = (
        0.1  # with more unusable responses there is no accuracy: the run stops
    )


@dataclass(frozen=True, kw_only=True)
class SyncSettings(Section):
    """How new weights reach the engines."""

    when: Literal["step", "evaluation"] = "step"  # evaluation: for rollouts that no engine draws
    transport: Literal["distributed", "disk"] = "distributed"
    bucket_mb: Annotated[float, Ge(0.001)] = 256.0
    audit_every: Whole = 10  # syncs; the first sync is always audited, 0: only that one
    timeout_s: Seconds = 120.0  # less than parallel.timeout_s


@dataclass(frozen=True, kw_only=True)
class LoggerSettings(Section):
    """What is written beside metrics.jsonl."""

    tensorboard: bool = True
    progress: bool = True
    save_rollouts_every: Whole = 0  # steps; 0: only batches that a non-finite step leaves behind


@dataclass(frozen=True, kw_only=True)
class RunSettings(Section):
    """The run directory is `root/name`; `name` null: experiment, date and time."""

    root: str = "runs"
    name: Name | None = None
    experiment: Name | None = None  # null: the name of the experiment group chosen
    on_existing: Literal["refuse", "overwrite_failed"] = (
        "refuse"  # overwrite_failed: the name of a run that failed
    )
    save_weights: bool = True  # write the final weights in Hugging Face format
    save_dtype: Dtype | None = None  # null: the dtype they are trained in
    checkpoint_every: Whole = (
        0  # steps after which all that a run needs to go on is saved; 0: never
    )
    keep_checkpoints: Positive = (
        2  # the newest ones; a new one is whole before an old one is removed
    )
    background_saves: bool = (
        False  # checkpoints are copied to host memory, and written while the next steps train
    )
    on_failed_save: Literal["stop", "continue"] = (
        "stop"  # such as a full disk; the checkpoints before it stay whole
    )
    resume: str = (
        "never"  # auto: go on from root/name's newest checkpoint, if any; or the path of one
    )
    stop_within_s: Seconds = (
        25.0  # after SIGTERM, for the step and a checkpoint; torchrun kills after 30 s
    )


@dataclass(frozen=True, kw_only=True)
class Configuration(Section):
    """The whole of `launch/train_rl.py`'s configuration."""

    model: ModelSettings
    algo: Annotated[AlgoSettings, PlainValidator(read_algorithm)]
    data: DataSettings
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    credit: CreditSettings = field(default_factory=CreditSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    logger: LoggerSettings = field(default_factory=LoggerSettings)
    rollout: RolloutSettings
    selection: SelectionSettings = field(default_factory=SelectionSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    train: TrainSettings
    eval: EvalSettings = field(default_factory=EvalSettings)
    sync: SyncSettings = field(default_factory=SyncSettings)
    run: RunSettings = field(default_factory=RunSettings)
    # train_only takes what rollout_only records; profile: see data.pass_rates
    mode: Literal["train", "rollout_only", "train_only", "eval", "profile"] = "train"
    curriculum: list[Options] | None = (
        None  # one after another: name, keys that differ, until; see docs/curriculum.md
    )
    seed: Seed = 0
