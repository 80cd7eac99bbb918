"""Refusals of single settings: unknown keys, types, limits, and what Hydra cannot take.

Each case pins the setting and a fragment of the sentence, so that a better sentence costs one edit.
"""

from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from megatron_rl.contracts.refusal import format_value
from tests.support.configurations import accept, assert_refused, refusals

NO_KEY = "no such key"
NO_FILE = "no such file"
NO_DELETION = "deleted"
HYDRA_SETTING = "Hydra's own settings"
WHOLE = "whole number"
NUMBER = "a number"
NOT_NULL = "null"
ONE_OF = "Must be one of"
FINITE = "finite"

# overrides, the setting as the refusal shows it, a fragment of the refusal
UNKNOWN_KEYS = [
    ("foo=1", "foo=1", NO_KEY),
    ("+foo=1", "foo=1", NO_KEY),
    ("++foo.bar=1", "foo={'bar': 1}", NO_KEY),
    ("++foo.bar.baz=1", "foo={'bar': {'baz': 1}}", NO_KEY),
    ("foo.bar.baz=1", "foo.bar.baz=1", NO_KEY),
    ("mode.x=1", "mode.x=1", NO_KEY),
    ("algo.zero_variance=drop", "algo.zero_variance=drop", NO_KEY),
    ("algo.correction.cap=2", "algo.correction.cap=2", NO_KEY),
    (["+engine.server={a: 1}"], "engine.server={'a': 1}", NO_KEY),
    ("+logger.reward=nope", "logger.reward=nope", NO_KEY),
    ("TRAIN.total_steps=3", "TRAIN.total_steps=3", NO_KEY),
]
# overrides, the setting, the suggestion
SUGGESTIONS = [
    ("+train.total_step=1", "train.total_step=1", "train.total_steps"),
    ("++rollout.max_new_token=1", "rollout.max_new_token=1", "rollout.max_new_tokens"),
    ("+train.replay_routes=false", "train.replay_routes=false", "train.replay"),
    ("algo.correction.hi=2", "algo.correction.hi=2", "algo.correction.high"),
    ("selection.floor=1", "selection.floor=1", "name, budget, surplus, skip"),
    ("+lr=1", "lr=1", "optimizer.lr"),
    ("trian.total_steps=3", "trian.total_steps=3", "train.total_steps"),
    ("Experiment=smoke", "Experiment=smoke", "experiment"),
    ("algo.clip_low=1", "algo.clip_low=1", "algo=grpo or algo=gspo"),
    ("+algo.clip_low=1", "algo.clip_low=1", "algo=grpo or algo=gspo"),
    ("optimizer.learning_rate=1", "optimizer.learning_rate=1", "lr, warmup_steps"),
    ("algo.correction.cap=2", "algo.correction.cap=2", "kind, level, low, high"),
    ("foo=1", "foo=1", "model, algo"),
    ("foo.bar.baz=1", "foo.bar.baz=1", "--cfg job"),
    ("algo=ppo", "algo=ppo", "custom, espo, espo_wide, grpo, gspo, gspo_wide, sft"),
    ("experiment=nope", "experiment=nope", "quickstart"),
    ("+engine=nope", "engine=nope", "external, managed"),
    ("algo.name=ppo", "algo.name=ppo", "algo=grpo|gspo|cispo|espo|sft|custom"),
    ("rollout.on_update=budget", "rollout.on_update=budget", "wait, resume"),
    ("run.name=a,b", "run.name=a,b", "'run.name=\"a,b\"'"),
    (["model.path=/a b/c=d"], "model.path=/a b/c=d", "'model.path=\"/a b/c=d\"'"),
    (
        "engine.extra_args=[--x=y]",
        "engine.extra_args=[--x=y]",
        "\"engine.extra_args=['--x=y']\"",
    ),
    ("--train.total_steps=3", "--train.total_steps=3", "Write train.total_steps=3"),
    ("--lr 1e-5", "--lr=1e-5", "Write optimizer.lr=1e-5"),
    ("--optimizer.lr 1e-5 seed=1", "--optimizer.lr=1e-5", "Write optimizer.lr=1e-5"),
    ("--max-new-tokens 64", "--max-new-tokens=64", "Write rollout.max_new_tokens=64 or eval."),
    ("--optimizer.lrr=1", "--optimizer.lrr=1", "Write optimizer.lr=1"),
    ("--seed --lr=1", "--seed=''", "Write seed=VALUE"),
    ("--seed train.total_steps=3", "--seed=''", "Write seed=VALUE"),
    ("-experiment smoke", "-experiment=smoke", "Write experiment=smoke"),
    ("--multirun", "--multirun=''", "Loop in the shell"),
    ("--learning-rate 1", "--learning-rate=''", "settings without dashes: --cfg job prints"),
    ("optimizer.lr = 1e-5", "optimizer.lr=1e-5", "Write optimizer.lr=1e-5"),
    ("optimizer.lr= 1e-5", "optimizer.lr=1e-5", "Write optimizer.lr=1e-5"),
    ("optimizer.lr =1e-5", "optimizer.lr=1e-5", "Write optimizer.lr=1e-5"),
    (
        "parallel.timeout_s=10m",
        "parallel.timeout_s=10m",
        "Give seconds, as a number without a unit",
    ),
    ("sync.bucket_mb=64MB", "sync.bucket_mb=64MB", "Give megabytes, as a number without a unit"),
    ("rollout.max_new_tokens=2k", "rollout.max_new_tokens=2k", "Give a number without a unit"),
    ("rollout.max_new_tokens=2.5", "rollout.max_new_tokens=2.5", "Give a value of that type"),
    ("--config-dir=x", "--config-dir=x", "hydra.searchpath"),
    ("optimizer.lr=nan", "optimizer.lr=nan", "leave the key out, which gives 0.0003"),
    ("eval.temperature=-1", "eval.temperature=-1", "leave the key out, which gives null"),
    ("experiment=smoke data.num_eval=1e9", "data.num_eval=1000000000.0", "which gives 128"),
    ("experiment=smoke eval.every=-5 seed=-1", "eval.every=-5", "which gives 0"),
    ("eval.every=-5 experiment=smoke seed=-1", "seed=-1", "which gives 0"),
]
COMPOSITION = [
    ("algo=ppo", "algo=ppo", NO_FILE),
    ("algo=", "algo=''", NO_FILE),
    ("experiment=nope", "experiment=nope", NO_FILE),
    ("+engine=nope", "engine=nope", NO_FILE),
    ("optimizer.lr=1 +engine=nope seed=2", "engine=nope", NO_FILE),
    ("+experiment=smoke", "experiment=smoke", "choice"),
    ("+algo=grpo", "algo=grpo", "choice"),
    ("+train.total_steps=3", "train.total_steps=3", "value already"),
    ("seed=2 +train.total_steps=3", "train.total_steps=3", "value already"),
    ("algo.name=ppo", "algo.name=ppo", "algo=espo"),
    ("algo.name=grpo", "algo.name=grpo", "algo=espo"),
    ("algo=gspo_wide algo.name=grpo", "algo.name=grpo", "algo=gspo"),
    ("~optimizer", "optimizer=''", NO_DELETION),
    ("~seed", "seed=''", NO_DELETION),
    ("~optimizer.lr", "optimizer.lr=''", NO_DELETION),
    ("hydra.mode=MULTIRUN", "hydra.mode=MULTIRUN", HYDRA_SETTING),
    ("+hydra.foo=1", "hydra.foo=1", HYDRA_SETTING),
    ("hydra/job_logging=none", "hydra/job_logging=none", HYDRA_SETTING),
    ("hydra.searchpath=[/tmp]", "hydra.searchpath=[/tmp]", "no directory /tmp"),
    (
        "hydra.searchpath=[file:///nowhere]",
        "hydra.searchpath=[file:///nowhere]",
        "no directory file:///nowhere",
    ),
    ("--config-dir=x", "--config-dir=x", "torchrun"),
    ("--package=algo", "--package=algo", "torchrun"),
    ("--train.total_steps=3", "--train.total_steps=3", "without dashes"),
    (["a b"], "a b=''", "spaces"),
    ("engine.extra_args=[--x=y]", "engine.extra_args=[--x=y]", "parse"),
    (["model.path=/a b/c=d"], "model.path=/a b/c=d", "parse"),
    ("run.name=a,b", "run.name=a,b", "several values"),
    ("seed=choice(1,2)", "seed=choice(1,2)", "several values"),
    ("run.name=${nope}", "run.name=${nope}", "'nope' not found"),
    ("model=5", "model=5", "options"),
    ("experiment=null", "experiment=null", "options"),
    ("model.path=???", "model.path=???", "default"),
]
TYPES = [
    ("optimizer.lr=abc", "optimizer.lr=abc", NUMBER),
    ("optimizer.lr=true", "optimizer.lr=true", NUMBER),
    ("optimizer.lr.x=1", "optimizer.lr={'x': 1}", NUMBER),
    ("train.total_steps=2.5", "train.total_steps=2.5", WHOLE),
    ("train.total_steps=true", "train.total_steps=true", WHOLE),
    ("train.total_steps=", "train.total_steps=''", WHOLE),
    ("seed=false", "seed=false", WHOLE),
    ("run.root=[a]", "run.root=['a']", "text"),
    ("run.root=false", "run.root=false", "text"),
    ("run.name=true", "run.name=true", "text"),
    ("run.resume=false", "run.resume=false", "text"),
    ("run.keep_best=false", "run.keep_best=false", "text"),
    ("data.eval_path=false", "data.eval_path=false", "text"),
    ("data.pass_rates=false", "data.pass_rates=false", "text"),
    ("model.path=true", "model.path=true", "text"),
    ("logger.wandb=true", "logger.wandb=true", "text"),
    ("logger.prometheus=x", "logger.prometheus=x", "HOST:PORT"),
    ("logger.prometheus=localhost:", "logger.prometheus=localhost:", "0.0.0.0:9400"),
    ("logger.prometheus=true", "logger.prometheus=true", "text"),
    ("engine.urls=[false]", "engine.urls[0]=false", "text"),
    ("engine.key_file=false", "engine.key_file=false", "text"),
    (["eval.sets={s: false}"], "eval.sets.s.path=false", "text"),
    ("algo.kl.reference=false", "algo.kl.reference=false", "text"),
    ("selection.beliefs_from=false", "selection.beliefs_from=false", "text"),
    ("train.total_steps=null", "train.total_steps=null", NOT_NULL),
    ("engine.urls=[a,null]", "engine.urls[1]=null", NOT_NULL),
    ("optimizer=null", "optimizer=null", NOT_NULL),
    ("logger.profile_steps=abc", "logger.profile_steps=abc", "list"),
    ("data.shuffle=maybe", "data.shuffle=maybe", "true or false"),
    ("rollout=x", "rollout=x", "group of keys"),
    ("algo.correction=tis", "algo.correction=tis", "group of keys"),
    ("run.name=a..b", "run.name=a..b", "'..'"),
    (f"run.name={'a' * 129}", f"run.name={'a' * 129}", "at most 128 characters"),
    ("run.name=a/b", "run.name=a/b", "letters"),
    ("run.name=''", "run.name=''", "letters"),
    ("train.replay=none", "train.replay=none", ONE_OF),
    ("optimizer.decay=step", "optimizer.decay=step", ONE_OF),
    ("data.on_bad_row=ignore", "data.on_bad_row=ignore", ONE_OF),
    ("data.source=web", "data.source=web", "package.module"),
    ("environment.name=a:b:c", "environment.name=a:b:c", "package.module"),
    ("reward.answer=first", "reward.answer=first", ONE_OF),
    ("model.dtype=float16", "model.dtype=float16", ONE_OF),
    ("sync.transport=rdma", "sync.transport=rdma", ONE_OF),
    ("algo.correction.kind=yes", "algo.correction.kind=yes", ONE_OF),
    ("mode=eval_only", "mode=eval_only", ONE_OF),
    ("credit.all_correct=shape", "credit.all_correct=shape", ONE_OF),
    ("credit.tied=zvp", "credit.tied=zvp", ONE_OF),
    ("selection.name=best", "selection.name=best", ONE_OF),
    ("selection.skip=solved", "selection.skip=solved", ONE_OF),
]
LIMITS = [
    ("optimizer.lr=-1e-4", "optimizer.lr=-0.0001", "at least 0"),
    ("optimizer.lr=3", "optimizer.lr=3", "at most 1"),
    ("optimizer.lr=nan", "optimizer.lr=nan", FINITE),
    ("optimizer.lr=inf", "optimizer.lr=inf", FINITE),
    ("optimizer.beta2=1", "optimizer.beta2=1", "less than 1"),
    ("rollout.temperature=0", "rollout.temperature=0", "at least 0.01"),
    ("rollout.temperature=1e300", "rollout.temperature=1e+300", "at most 100"),
    ("sync.bucket_mb=1e-9", "sync.bucket_mb=1e-09", "at least 0.001"),
    ("samples.every=-1", "samples.every=-1", "at least 0"),
    ("seed=4294967296", "seed=4294967296", "at most 4294967295"),
    ("seed=-1", "seed=-1", "at least 0"),
    ("rollout.max_new_tokens=0", "rollout.max_new_tokens=0", "at least 1"),
    ("eval.every=-1", "eval.every=-1", "at least 0"),
    ("eval.temperature=-1", "eval.temperature=-1", "at least 0"),
    ("algo.fractions=[0.2,2]", "algo.fractions[1]=2", "at most 0.999999"),
    ("algo.fractions=[1]", "algo.fractions[0]=1", "at most 0.999999"),
    ("algo.fractions=[1e-7]", "algo.fractions[0]=1e-07", "at least 1e-06"),
    ("algo.min_clip=1", "algo.min_clip=1", "less than 1"),
    ("algo.correction.low=1.5", "algo.correction.low=1.5", "less than 1"),
    ("algo.correction.high=0.5", "algo.correction.high=0.5", "greater than 1"),
    ("parallel.ep=0", "parallel.ep=0", "at least 1"),
    ("data.num_eval=0", "data.num_eval=0", "at least 1"),
    (
        "data.pass_rates=/dev/null data.pass_rate_range=[0.9,2]",
        "data.pass_rate_range[1]=2",
        "at most 1",
    ),
    ("parallel.timeout_s=1e300", "parallel.timeout_s=1e+300", "at most 1000000"),
    ("engine.start_timeout_s=1e9", "engine.start_timeout_s=1000000000.0", "at most 1000000"),
    ("train.total_steps=1" + 20 * "0", "train.total_steps=1" + 20 * "0", "at most 2147"),
    ("reward.processes=0", "reward.processes=0", "at least 1"),
    ("reward.processes=300", "reward.processes=300", "at most 256"),
    ("engine.count=5000", "engine.count=5000", "at most 1024"),
    (
        "rollout.samples_per_prompt=100000000",
        "rollout.samples_per_prompt=100000000",
        "at most 10000000",
    ),
    ("credit.shaping=0.6", "credit.shaping=0.6", "at most 0.5"),
    ("credit.shaping=-0.1", "credit.shaping=-0.1", "at least 0"),
    ("credit.zvp_alpha=nan", "credit.zvp_alpha=nan", FINITE),
    ("credit.length_start=0.5", "credit.length_start=0.5", "at least 1"),
    ("credit.repetition_ngram=1", "credit.repetition_ngram=1", "at least 2"),
    ("selection.budget=0.5", "selection.budget=0.5", "at least 1"),
    ("selection.reweight=0.5", "selection.reweight=0.5", "at least 1"),
    ("selection.reweight=inf", "selection.reweight=inf", FINITE),
]
CASES = UNKNOWN_KEYS + SUGGESTIONS + COMPOSITION + TYPES
# Mistakes that Hydra finds, each a composition or several, and each like one that is not here
LIKE_OTHERS = {
    f"{overrides}-{fragment}"
    for overrides, fragment in [
        ("++foo.bar=1", NO_KEY),
        ("++foo.bar.baz=1", NO_KEY),
        ("mode.x=1", NO_KEY),
        ("+logger.reward=nope", NO_KEY),
        ("TRAIN.total_steps=3", NO_KEY),
        ("+train.replay_routes=false", "train.replay"),
        ("Experiment=smoke", "experiment"),
        ("foo=1", "model, algo"),
        ("foo.bar.baz=1", "--cfg job"),
        ("+algo=grpo", "choice"),
        ("model=5", "options"),
        ("seed=2 +train.total_steps=3", "value already"),
    ]
}


def parameters_of(case: tuple[str | list[str], str, str]) -> ParameterSet:
    """A case with its name, and its marker if it is slow."""
    name = f"{case[0]}-{case[2]}"
    return pytest.param(*case, id=name, marks=pytest.mark.slow if name in LIKE_OTHERS else ())


@pytest.mark.parametrize(("overrides", "setting", "fragment"), map(parameters_of, CASES))
def test_a_setting_is_refused_with_rule_and_remedy(
    checkpoint: Path, overrides: str | list[str], setting: str, fragment: str
) -> None:
    assert_refused(checkpoint, overrides, setting, fragment)


@pytest.mark.parametrize(
    "words",
    ["optimizer.lr = 1e-5", "optimizer.lr= 1e-5", "optimizer.lr =1e-5", "--lr 1e-5", "--seed 3"],
)
def test_a_setting_in_several_words_is_refused_once(checkpoint: Path, words: str) -> None:
    assert len(refusals(checkpoint, "seed=1", *words.split(" "), "train.total_steps=3")) == 1


@pytest.mark.parametrize(
    "word", ["false", "False", "off", "Off", "no", "none", "None", "null", "disabled", "0"]
)
def test_words_that_mean_off_send_nothing_to_wandb(checkpoint: Path, word: str) -> None:
    assert accept(checkpoint, f"logger.wandb={word}").logger.wandb is None


def limits_without_repeated_keys() -> list[list[tuple[str, str, str]]]:
    """The cases of `LIMITS` in as few lists as possible. No list sets a key twice."""
    batches: list[dict[str, tuple[str, str, str]]] = []
    for case in LIMITS:
        key = case[0].partition("=")[0]
        batch = next((batch for batch in batches if key not in batch), None)
        if batch is None:
            batch = {}
            batches.append(batch)
        batch[key] = case
    return [list(batch.values()) for batch in batches]


@pytest.mark.parametrize("cases", limits_without_repeated_keys())
def test_all_values_beyond_their_limits_are_refused_at_once(
    checkpoint: Path, cases: list[tuple[str, str, str]]
) -> None:
    overrides = " ".join(case[0] for case in cases)
    results = refusals(checkpoint, *overrides.split(" "))
    texts = {f"{refusal.key}={format_value(refusal.value)}": refusal for refusal in results}
    for _, setting, fragment in cases:
        assert fragment in texts[setting].rule and texts[setting].remedy
