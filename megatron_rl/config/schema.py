"""The sections of the configuration: each key with its type, its limits and its default.

Three sections have keys that stand elsewhere: `algo` in `algorithms.py`, the part of `engine` that
starts a server in `sglang_bridge/settings.py`, and the phases of `curriculum` in `curriculum.py`.
Rules across keys are in `rules/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, PlainValidator

from megatron_rl.config.algorithms import AlgoSettings, read_algorithm
from megatron_rl.config.values import (
    Address,
    BelowOne,
    Count,
    Dtype,
    Name,
    NotNegative,
    Off,
    OffIsNull,
    Options,
    PluginName,
    Positive,
    Seconds,
    Section,
    Seed,
    Share,
    Text,
    Whole,
)
from sglang_bridge.settings import ServerSettings

EvalTemperature = Annotated[float, Ge(0), Le(100)]
TopP = Annotated[float, Gt(0), Le(1)]
# A response is looked at for repetition each time that it has this many further tokens: rarely
# enough that requests which end and continue cost little.
REPETITION_CHECK_TOKENS = 512
# A single low entropy may be noise of one batch. The rule about kept checkpoints reads it, too.
LOW_ENTROPY_STEPS = 3

RecomputeModule = Literal[
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"
]


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Section):
    """The start checkpoint, the precision it is trained in, and how its layers are built."""

    # A directory in Hugging Face format.
    path: Text
    dtype: Dtype = "float32"
    # Activations that the backward pass recomputes instead of keeping them.
    recompute: Literal["none", "selective", "full"] = "none"
    # recompute=selective only: modules under Megatron's names. null: [core_attn].
    recompute_modules: list[RecomputeModule] | None = None
    # Megatron's own layers (local) or Transformer Engine's (te). null: te in bfloat16 on GPUs where
    # Transformer Engine is installed, else local.
    spec: Literal["local", "te"] | None = None
    # spec=te only: a recipe for matrix products of training in FP8.
    fp8: Literal["tensorwise", "blockwise", "mxfp8"] | None = None
    # random: train from random weights. `path` then needs only config.json and the tokenizer.
    init: Literal["checkpoint", "random"] = "checkpoint"
    # init=random only: the dropout of the outputs of attention and MLPs.
    hidden_dropout: BelowOne = 0.0


GeneratorName = Literal[
    "column_addition",
    "column_addition_calls",
    "column_addition_mixed",
    "two_digit_addition",
    "letter_sorting",
]
FileFormat = Literal["jsonl", "csv", "parquet", "hf_dataset"]


@dataclass(frozen=True, kw_only=True)
class SourceSettings(Section):
    """One source of a mixture, an entry of data.sources. Most of its keys exist in data.* too."""

    source: Literal[GeneratorName, FileFormat, "reasoning_gym"] | PluginName
    # The source's share of the training prompts, relative to the weights of the others.
    weight: Annotated[float, Gt(0), Le(10**6)]
    train_path: Text | None = None
    eval_path: Text | None = None
    columns: dict[str, Text] = field(default_factory=dict)
    split: Text | None = None
    eval_split: Text | None = None
    options: Options = field(default_factory=dict)
    # null: data.num_train, or data.num_eval.
    num_train: Count | None = None
    num_eval: Count | None = None


@dataclass(frozen=True, kw_only=True)
class DataSettings(Section):
    """The source of prompts, and their split into training and held-out questions."""

    # mixture: several sources, which `sources` names.
    source: Literal[GeneratorName, FileFormat, "reasoning_gym", "mixture"] | PluginName
    # Files only: the file or folder of training questions.
    train_path: Text | None = None
    # Files only: the file or folder of held-out questions, in any format. null: train_path reserves
    # one question in eight, and num_eval of these are held out.
    eval_path: Text | None = None
    # Files only: the columns with the keys of a row, where they have other names, such as
    # {prompt: problem, answer: reward_model.ground_truth}. A dot leads into an object.
    columns: dict[str, Text] = field(default_factory=dict)
    # Folders only: the split with the training questions. null: the only one, or train.
    split: Text | None = None
    # Folders only: the split with the held-out questions, of eval_path or else of train_path.
    eval_split: Text | None = None
    # source=mixture only: each source by name, such as
    # {sums: {source: jsonl, train_path: sums.jsonl, weight: 0.7}, ...}.
    sources: dict[str, SourceSettings] = field(default_factory=dict)
    # The constructor arguments of a user-defined source. source=reasoning_gym: {task: chain_sum,
    # ...}, the name of a generator and the generator's own settings.
    options: Options = field(default_factory=dict)
    num_train: Count = 24000
    num_eval: Count = 512
    shuffle: bool = True
    seed: Seed = 0
    # fail: the first unusable row ends the run. skip: unusable rows are skipped and counted.
    on_bad_row: Literal["fail", "skip"] = "fail"
    # Questions with more tokens are unusable. A command line without it takes half of the model's
    # positions, at most 1024.
    max_prompt_tokens: Positive = 1024
    # A file of pass rates: mode=profile writes it, selection=belief starts from it.
    pass_rates: Text | None = None
    # [low, high]: train only on prompts whose pass rate in `pass_rates` lies between these.
    pass_rate_range: list[Share] | None = None


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings(Section):
    """The environment that turns a prompt into a rollout."""

    # single_turn: sample one response. demonstration: take the data source's worked response. The
    # engines then sample, and get weights, for evaluations alone.
    # calculator: sample responses, and answer those that end with a call of the calculator.
    name: Literal["single_turn", "demonstration", "calculator"] | PluginName = "single_turn"
    # The constructor arguments of a user-defined environment. name=demonstration: {tool:
    # calculator} if the worked responses hold calls of the calculator, with their results.
    options: Options = field(default_factory=dict)
    # The longest time an environment may take between two responses. Beyond it the rollout is
    # rejected.
    timeout_s: Seconds = 600.0


# exact_match compares the final answer as text or number. remote: a server scores. The others are
# verifiers (docs/verifiers.md).
ScorerName = Literal[
    "exact_match",
    "math",
    "choice",
    "json_schema",
    "instructions",
    "reasoning_gym",
    "unit_tests",
    "remote",
]
AnswerRule = Literal["last_number", "last_line", "boxed"]


@dataclass(frozen=True, kw_only=True)
class PartSettings(Section):
    """One scorer of several, an entry of reward.parts. Most of its keys exist in reward.* too."""

    name: ScorerName | PluginName
    answer: AnswerRule = "last_number"
    options: Options = field(default_factory=dict)
    # The tasks of the prompts that it scores. []: all of them.
    tasks: list[Text] = field(default_factory=list)
    # Its share of the reward, relative to the weights of the other parts. null: 1, or 0 of a gate.
    # 0: it is shown and recorded, and changes nothing.
    weight: Annotated[float, Ge(0), Le(10**6)] | None = None
    # A response to which a gate gives 0 has the reward and the correctness 0.
    gate: bool = False
    # null: reward.timeout_s, or reward.processes.
    timeout_s: Seconds | None = None
    processes: Annotated[int, Ge(1), Le(256)] | None = None

    @property
    def share(self) -> float:
        """Its weight, with the default of its kind."""
        if self.weight is None:
            return 0.0 if self.gate else 1.0
        return self.weight

    def scores(self, task: str) -> bool:
        """Return True if it scores the prompts of a task."""
        return not self.tasks or task in self.tasks


@dataclass(frozen=True, kw_only=True)
class RewardSettings(Section):
    """The scorer of responses."""

    # parts: several scorers, which `parts` names.
    name: ScorerName | Literal["parts"] | PluginName = "exact_match"
    # Each scorer by name, such as {sums: {name: exact_match, tasks: [sums]}, style: {name:
    # my_reward:Style, weight: 0.1}, ...}.
    parts: dict[str, PartSettings] = field(default_factory=dict)
    # exact_match only: the part of the response that is compared with the expected answer.
    answer: AnswerRule = "last_number"
    # The longest time that scoring one response may take. Beyond it the reward is missing.
    timeout_s: Seconds = 10.0
    # Processes of the scorer on each node. Each constructs it. A call goes to the least busy one,
    # which makes one call at a time unless the scorer is user-defined. exact_match has none.
    processes: Annotated[int, Ge(1), Le(256)] = 1
    # The constructor arguments of a user-defined scorer, or what the chosen one reads.
    options: Options = field(default_factory=dict)

    def of_part(self, name: str) -> RewardSettings:
        """Return the settings of a part, as if it were the only scorer."""
        part = self.parts[name]
        return RewardSettings(
            name=part.name,
            answer=part.answer,
            options=part.options,
            timeout_s=part.timeout_s or self.timeout_s,
            processes=part.processes or self.processes,
        )


@dataclass(frozen=True, kw_only=True)
class CreditSettings(Section):
    """The treatment of zero-variance and tied groups, and the penalties that shape advantages.

    See docs/zero_variance.md.
    """

    # Groups whose responses are all correct. drop: not trained on. zvp: trained with advantages
    # from the tokens' entropies. keep: advantages of 0 that count in the loss' denominators, as in
    # plain GRPO.
    all_correct: Literal["drop", "zvp", "keep"] = "drop"
    # Groups whose responses are all incorrect, with the same treatments.
    all_incorrect: Literal["drop", "zvp", "keep"] = "drop"
    # Groups of correct responses whose length penalties differ, and of incorrect responses whose
    # repetition penalties differ. shape: responses with lower penalties get higher advantages.
    tied: Literal["drop", "shape"] = "drop"
    # The advantage per nat of entropy of a zvp group. 0 has the same effect as drop.
    zvp_alpha: Share = 0.1
    # The share of an advantage that penalties may take or add. 0: no shaping.
    shaping: Annotated[float, Ge(0), Le(0.5)] = 0.5
    # The length penalty of correct responses. null: none.
    length: Literal["buffer", "excess"] | None = None
    # Where the length penalty starts. length=buffer: tokens before rollout.max_new_tokens; null: a
    # fifth of them. length=excess: a multiple of the median length of the group's correct
    # responses; null: 1.5.
    length_start: Annotated[float, Ge(1)] | None = None
    # The n of the repeated n-grams that penalize incorrect responses; 40 is usual. null: no
    # penalty.
    repetition_ngram: Annotated[int, Ge(2), Le(10**4)] | None = None


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Section, ServerSettings):
    """SGLang servers, which the run starts and watches (managed) or finds running (external)."""

    # The addresses of external servers, or a file with one URL a line: engines are added and
    # removed when it changes during the run. []: the run starts servers.
    urls: list[Text] | Text = field(default_factory=list)
    # external only: a file with {"api_key": ..., "admin_api_key": ...} and permissions 0600.
    key_file: Text | None = None
    # managed only: engines per node, or per group of nodes that share engines.
    count: Annotated[int, Ge(1), Le(1024)] = 1
    # managed only: engines and trainer share the GPUs, and take turns on them. See
    # docs/colocated.md.
    colocated: bool = False
    # managed only: nodes that share an engine. Each holds an equal part of its tp ranks.
    nodes_per_engine: Annotated[int, Ge(1), Le(1024)] = 1

    @property
    def mode(self) -> Literal["managed", "external"]:
        """managed if the run starts its servers, external if it uses running ones."""
        return "external" if self.urls else "managed"

    @property
    def urls_file(self) -> Path | None:
        """The file with the addresses of external servers."""
        return Path(self.urls) if isinstance(self.urls, str) and self.urls else None

    @property
    def url_list(self) -> list[str]:
        """The addresses of external servers that stay the same during the run."""
        return [] if isinstance(self.urls, str) else self.urls


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(Section):
    """Megatron's parallel sizes. Data parallelism takes the remaining ranks."""

    tp: Positive = 1
    # Pipeline stages. If they do not divide the layers, the first and the last one have fewer.
    pp: Positive = 1
    # Virtual pipeline chunks of each pipeline stage. null: 1.
    vpp: Positive | None = None
    cp: Positive = 1
    ep: Positive = 1
    # Ranks that share one expert. null: 1 if ep is above 1, else tp. (Megatron's default is tp.)
    etp: Positive | None = None
    # Reduce the gradients of a part of the model while other parts are still in their backward
    # pass, and gather its new weights during the next forward pass of a batch. The last bits of
    # the gradients' norm may change.
    overlap: bool = False
    # The longest time that a rank waits for the others in a collective.
    timeout_s: Seconds = 600.0

    @property
    def default_etp(self) -> int:
        """The value that `etp=null` stands for."""
        return self.tp if self.ep == 1 else 1


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Section):
    """One rollout batch: prompts x samples, drawn from the untruncated distribution."""

    prompts_per_step: Count = 64
    samples_per_prompt: Count = 8
    max_new_tokens: Positive
    # Beyond these limits SGLang samples greedily or logits lose precision, while the trainer would
    # still divide by the temperature.
    temperature: Annotated[float, Ge(0.01), Le(100)] = 1.0
    # Whether responses that were cut at max_new_tokens are trained on.
    train_truncated: bool = True
    # A response is cut off once a larger share of it repeats itself, like one that reaches
    # max_new_tokens. null: none is. See docs/zero_variance.md.
    stop_repetition: Annotated[float, Gt(0), Le(0.97)] | None = None
    # The largest age of a rollout's tokens in weight versions when a step trains on them. 0: each
    # step samples its own rollouts. From 1 on, the rollouts of the next step are sampled while a
    # step trains.
    max_staleness: Whole = 0
    # What happens to open responses when the engines get new weights. wait: they end first, so each
    # response has one version. resume: they are interrupted, and continued with the new
    # weights. See docs/ahead.md.
    on_update: Literal["wait", "resume"] = "wait"
    # Which rollouts of a step are sampled first. longest: those that are expected to have most
    # tokens, by earlier responses to their prompts. submission: in the order of the prompts. The
    # responses are the same. See docs/rollouts.md.
    order: Literal["longest", "submission"] = "longest"
    # mode=train_only: the directory of a run with mode=rollout_only.
    recording: Text | None = None


@dataclass(frozen=True, kw_only=True)
class SelectionSettings(Section):
    """The selector of the prompts of a step. See docs/selection.md."""

    name: Literal["uniform", "oversample", "belief"] = "uniform"
    # oversample and belief: the largest number of rollouts of a step, in multiples of
    # rollout.prompts_per_step x rollout.samples_per_prompt.
    budget: Annotated[float, Ge(1), Le(10**4)] = 4.0
    # oversample: groups that the step does not need. finish: they are sampled to their end.
    # abort: once the first groups, in the order of their requests, have enough mixed ones, later
    # ones are aborted and used for nothing.
    surplus: Literal["finish", "abort"] = "finish"
    # belief: prompts to sample less often. all_correct: those whose responses are probably all
    # correct. zero_variance: also those whose responses are probably all incorrect.
    skip: Literal["all_correct", "zero_variance"] = "all_correct"
    # belief: rollouts that a prompt gets first if a mixed group has a chance below 0.6. Its group
    # is completed unless `skip` names what they show. 0: sample whole groups at once.
    probe_samples: Whole = 4
    # belief: the largest weight of prompts that are sampled less often. A group counts
    # min(reweight, 1 / acceptance) times. From 10 on, all prompts have the same expected weight.
    # null: no such weights.
    reweight: Annotated[float, Ge(1), Le(10**4)] | None = None
    # belief: the directory of a run, or of one of its checkpoints. A new run starts with the
    # beliefs of that run.
    beliefs_from: Text | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Section):
    """AdamW and its learning rate schedule, counted in optimizer steps."""

    # AdamW changes each weight by up to this amount in a step.
    lr: Annotated[float, Ge(0), Le(1)] = 3e-4
    warmup_steps: Whole = 5
    # linear and cosine end at a tenth of `lr`.
    decay: Literal["constant", "linear", "cosine"] = "linear"
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    eps: Annotated[float, Gt(0)] = 1e-8
    weight_decay: NotNegative = 0.0
    # The largest norm of the gradient. 0: no clipping.
    clip_grad: NotNegative = 1.0


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Section):
    """Training steps: their number, their split into optimizer steps and micro-batches, and router
    replay.
    """

    # Steps of the run. Each trains on one rollout batch.
    total_steps: Positive
    optimizer_steps_per_batch: Positive = 4
    tokens_per_micro_batch: Positive = 8192
    # The routes that training replays. rollout: the engines recorded them (R3). trainer: the
    # trainer's own pass at the start of the step recorded them (R2).
    replay: Annotated[Literal["rollout", "trainer", "off"], Off] = "rollout"
    # Every this many steps an extra pass with live routing measures the effect of replay. 0: never.
    replay_measure_every: Whole = 0
    # The run stops when a larger share of the engines' routes disagrees with the trainer's own
    # routing. 1: never.
    max_route_disagreement: Share = 0.5


@dataclass(frozen=True, kw_only=True)
class EvalSetSettings(Section):
    """One set of questions, an entry of eval.sets. null: the value of eval.*."""

    # A file in any format of data.train_path.
    path: Text
    # As data.columns, for this file.
    columns: dict[str, Text] = field(default_factory=dict)
    every: Whole | None = None
    samples_per_prompt: Count | None = None
    temperature: EvalTemperature | None = None
    top_p: TopP | None = None
    max_new_tokens: Positive | None = None

    def __repr__(self) -> str:
        """Return the set as one writes it: its path alone, or a tree of what it sets."""
        changes = {key: value for key, value in vars(self).items() if value not in (None, {})}
        return repr(self.path if len(changes) == 1 else changes)


def _as_set(value: Any) -> Any:
    """Return the tree of a set, which may be given by its path alone."""
    return {"path": value} if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Section):
    """Evaluations: sampled pass@1 on the held-out questions, and on other sets."""

    # Steps between evaluations. 0: evaluate only at the start and at the end.
    every: Whole = 10
    # No evaluation takes place before this step.
    start_step: Whole = 0
    samples_per_prompt: Count = 4
    # Sets of questions by name: the path of a file, or {path: FILE, ...} with keys of
    # EvalSetSettings. mode=train measures them beside the held-out questions, mode=eval in their
    # place.
    sets: dict[Name, Annotated[EvalSetSettings, BeforeValidator(_as_set)]] = field(
        default_factory=dict
    )
    # null: rollout.temperature.
    temperature: EvalTemperature | None = None
    # Sample from the most probable tokens whose probabilities add up to this.
    top_p: TopP = 1.0
    # The longest response. null: rollout.max_new_tokens.
    max_new_tokens: Positive | None = None
    # The run ends once the mean accuracy of the last two evaluations reaches this.
    stop_at: Share | None = None

    def of_set(self, name: str) -> EvalSettings:
        """Return the settings of a set: its own, and the values of eval.* for the others."""
        settings = self.sets[name]
        changes: dict[str, Any] = {
            "every": settings.every,
            "samples_per_prompt": settings.samples_per_prompt,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_new_tokens": settings.max_new_tokens,
        }
        return replace(self, **{key: value for key, value in changes.items() if value is not None})

    @property
    def longest_responses(self) -> dict[str, int]:
        """The limits of responses that differ from rollout.max_new_tokens, by key."""
        limits = {"eval.max_new_tokens": self.max_new_tokens}
        limits |= {f"eval.sets.{name}": entry.max_new_tokens for name, entry in self.sets.items()}
        return {key: limit for key, limit in limits.items() if limit is not None}


@dataclass(frozen=True, kw_only=True)
class RecoverySettings(Section):
    """Limits of the recovery from engines and collectors that end, hang or answer rubbish."""

    # How often one engine, or the collector of one node, may be started again within an hour. After
    # that it is given up. 0: it is given up when it ends. An external engine may join as often
    # within an hour while others serve, and is not given up.
    restarts_per_hour: Annotated[int, Ge(0), Le(1000)] = 6


@dataclass(frozen=True, kw_only=True)
class GuardSettings(Section):
    """Reactions to numbers that go wrong: loss spikes, collapsing entropy, NaN. See docs/faults.md.

    skip: the update is not applied. stop: the run ends with code 5, and its last checkpoint is from
    before the trouble.
    """

    # An optimizer step whose gradients have a norm, before clipping, above ten times the median of
    # the last 32 ones. The first 8 are not judged.
    spike: Annotated[Literal["off", "skip", "stop"], Off] = "off"
    # The run stops when the mean entropy is below this, in nats per token, in three consecutive
    # steps. null: any entropy is fine.
    min_entropy: Annotated[float, Gt(0)] | None = None
    # NaN or Inf in a loss or in gradients. skip: the update is skipped, and the run stops after
    # three consecutive steps. stop: it stops at the first, and also for NaN or Inf in weights and
    # in the responses of engines.
    nonfinite: Literal["skip", "stop"] = "skip"


@dataclass(frozen=True, kw_only=True)
class SyncSettings(Section):
    """The transport of new weights to the engines."""

    # delta: files, too, with only the bytes that changed since the last sync, compressed. Each node
    # with engines rebuilds the weights in its directory for temporary files (TMPDIR). ipc:
    # engine.colocated=true on GPUs only. Every sync is audited.
    transport: Literal["distributed", "disk", "delta", "ipc"] = "distributed"
    # For transport=distributed: engines that get each bucket in one broadcast. Above 1, rank 0
    # collects all weights and sends them. If an engine fails, the others of its tree fail too.
    engines_per_tree: Positive = 1
    bucket_mb: Annotated[float, Ge(0.001)] = 256.0
    # Syncs between audits of the engines' weights. The first sync is always audited. 0: only that
    # one.
    audit_every: Whole = 10
    # The limit for forming a group with an engine, and again for the rest of a sync without its
    # audit. Must be less than parallel.timeout_s.
    timeout_s: Seconds = 120.0


@dataclass(frozen=True, kw_only=True)
class LoggerSettings(Section):
    """Outputs of a run besides metrics.jsonl."""

    tensorboard: bool = True
    progress: bool = True
    # Steps between saved rollout batches. 0: save only the batches of failed steps: those with NaN
    # or Inf, with routes that were not replayed, or with too many routes that disagree.
    save_rollouts_every: Whole = 0
    # A project of Weights & Biases that the metrics are sent to. Needs the package wandb.
    wandb: Annotated[Name | None, OffIsNull] = None
    # A port of rank 0's machine where Prometheus can read the latest metrics, or HOST:PORT. Without
    # a host it listens on 127.0.0.1. 0.0.0.0:PORT: other machines can read the metrics.
    prometheus: Annotated[Address | None, OffIsNull] = None
    # torch.profiler writes a trace of rank 0 in each of these steps to the folder profiles/ of the
    # run.
    profile_steps: list[Positive] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SampleSettings(Section):
    """The responses that a run keeps to look at, with the values of each token. See
    docs/samples.md.
    """

    # Steps between kept samples. The first step keeps samples, too. 0: keep none.
    every: Whole = 10


@dataclass(frozen=True, kw_only=True)
class RunSettings(Section):
    """The run directory `root/name`, its checkpoints, and the end of the run."""

    root: Text = "runs"
    # null: the date and time.
    name: Name | None = None
    # overwrite_failed: a new run may replace a failed run of the same name.
    on_existing: Literal["refuse", "overwrite_failed"] = "refuse"
    # Whether the final weights are written in Hugging Face format.
    save_weights: bool = True
    # Steps between checkpoints. 0: no checkpoints.
    checkpoint_every: Whole = 0
    # Checkpoints to keep. An old one is removed only after a new one is complete.
    keep_checkpoints: Positive = 2
    # The evaluation whose best checkpoint is kept besides: held_out, a name of eval.sets (their
    # accuracy), or a metric such as eval/NAME/pass@4. null: none.
    keep_best: Text | None = None
    # Copy a checkpoint to host memory and write it while the next steps train.
    background_saves: bool = False
    # never; auto: resume from the newest checkpoint of root/name, if there is one; or the path of a
    # run or of a checkpoint to start a new run from.
    resume: Text = "never"


@dataclass(frozen=True, kw_only=True)
class Configuration(Section):
    """The whole configuration of `launch/train_rl.py`."""

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
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    samples: SampleSettings = field(default_factory=SampleSettings)
    run: RunSettings = field(default_factory=RunSettings)
    # train_only trains on rollouts that a run with rollout_only recorded. eval measures the
    # accuracy of a checkpoint. profile writes the file of data.pass_rates.
    mode: Literal["train", "rollout_only", "train_only", "eval", "profile"] = "train"
    # Phases that follow one another: each has a name, the keys that it changes, and `until`. See
    # docs/curriculum.md.
    curriculum: list[Options] | None = None
    seed: Seed = 0

    @property
    def is_measurement(self) -> bool:
        """True for the modes in which no rank builds the model: the engines alone run it."""
        return self.mode in ("eval", "profile")

    @property
    def has_engines(self) -> bool:
        """True for the modes that sample from engines."""
        return self.mode != "train_only"

    @property
    def selects_prompts(self) -> bool:
        """True for the modes whose steps choose the prompts that they sample."""
        return self.mode in ("train", "rollout_only")
