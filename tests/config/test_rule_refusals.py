"""Refusals by rules across keys.

Each case pins the setting and a fragment of the sentence, so that a better sentence costs one edit.
"""

from pathlib import Path

import pytest

from tests.support.configurations import assert_refused

INDIVISIBLE_JOB = "does not divide the 1 rank"
COLLECTIVE = "collective"
NO_EFFECT = "no effect"
NOT_READ = "does not read"
NO_WEIGHTS = "no weights"
NOT_A_PAIR = "low at most high"
UNKNOWN_RATES = "not known"

# overrides, the setting as the refusal shows it, a fragment of the refusal
PARALLEL = [
    ("parallel.ep=3", "parallel.ep=3", INDIVISIBLE_JOB),
    ("parallel.ep=3", "parallel.ep=3", "--nproc-per-node 3"),
    ("parallel.ep=3", "parallel.ep=3", "8 experts"),
    ("parallel=tp2_ep2", "parallel.tp=2", INDIVISIBLE_JOB),
    ("parallel.pp=2", "parallel.pp=2", INDIVISIBLE_JOB),
    ("parallel.cp=2", "parallel.cp=2", INDIVISIBLE_JOB),
    ("parallel.pp=5", "parallel.pp=5", "4 layers"),
    ("parallel.overlap=true", "parallel.overlap=true", NO_EFFECT),
    ("parallel.vpp=2", "parallel.vpp=2", "only one"),
    ("parallel.timeout_s=180", "engine.start_timeout_s=180.0", "parallel.timeout_s=180"),
    ("engine.start_timeout_s=601", "engine.start_timeout_s=601.0", COLLECTIVE),
    (
        "sync.transport=delta engine=external engine.urls=[http://10.0.0.7:30000]",
        "sync.transport=delta",
        "no process on the nodes of external engines",
    ),
    (
        "sync.transport=disk sync.engines_per_tree=4",
        "sync.engines_per_tree=4",
        "each engine loads weights by itself",
    ),
    ("sync.timeout_s=600", "sync.timeout_s=600.0", COLLECTIVE),
]
ENGINES = [
    ("engine=external", "engine.urls=null", "Give it"),
    ("engine.key_file=keys.json", "engine.key_file=keys.json", "engine.urls"),
    ("engine.ep=2", "engine.ep=2", "engine.tp=1"),
    ("engine.quantization=fp8", "engine.quantization=fp8", "hidden_size=64 is no multiple of 128"),
    ("engine.quantization=fp8", "engine.quantization=fp8", "choose another model"),
    ("engine.quantization=fp4", "engine.quantization=fp4", "fp8"),
    (
        "engine.unquantized_first_layers=1",
        "engine.unquantized_first_layers=1",
        "for quantized engines",
    ),
    (
        "engine.extra_args=['--json-model-override-args={}']",
        "engine.extra_args=['--json-model-override-args={}']",
        "--json-model-override-args",
    ),
    ("engine.max_total_tokens=32", "engine.max_total_tokens=32", "66 slots"),
    ("data.max_prompt_tokens=300", "rollout.max_new_tokens=32", "256 positions"),
    ("engine.extra_args=['']", "engine.extra_args=['']", "empty"),
    ("engine.extra_args=['--port=1']", "engine.extra_args=['--port=1']", "--port"),
    (
        "engine.extra_args=['--quantization=fp8']",
        "engine.extra_args=['--quantization=fp8']",
        "--quantization",
    ),
    (
        "engine.extra_args=['--dp-size=2']",
        "engine.extra_args=['--dp-size=2']",
        "Remove --dp-size",
    ),
    (
        "engine.extra_args=['--load-format=dummy']",
        "engine.extra_args=['--load-format=dummy']",
        "Remove --load-format",
    ),
]
DATA = [
    ("data=jsonl", "data.train_path=null", "file of questions"),
    ("data.source=jsonl", "data.train_path=null", "file of questions"),
    ("data.train_path=a.jsonl", "data.train_path=a.jsonl", NOT_READ),
    ("data.source=reasoning_gym", "data.options={}", "generator"),
    ("data.num_train=10", "rollout.prompts_per_step=64", "data.num_train=10"),
    ("data.options.a=1", "data.options={'a': 1}", "user-defined"),
    ("data.pass_rates=nowhere", "data.pass_rates=nowhere", "no such file"),
    ("mode=profile", "data.pass_rates=null", "mode=profile writes"),
    ("mode=profile data.pass_rates=/dev/null", "data.pass_rates=/dev/null", "exists"),
    ("mode=profile data.pass_rates=/dev/null/a", "data.pass_rates=/dev/null/a", "is a file"),
    ("data.pass_rate_range=[0.1,0.9]", "data.pass_rate_range=[0.1, 0.9]", UNKNOWN_RATES),
    (
        "mode=profile data.pass_rates=a data.pass_rate_range=[0,1]",
        "data.pass_rate_range=[0.0, 1.0]",
        UNKNOWN_RATES,
    ),
    (
        "data.pass_rates=/dev/null data.pass_rate_range=[0.9,0.1]",
        "data.pass_rate_range=[0.9, 0.1]",
        NOT_A_PAIR,
    ),
    (
        "data.pass_rates=/dev/null data.pass_rate_range=[0.9]",
        "data.pass_rate_range=[0.9]",
        NOT_A_PAIR,
    ),
]
SIXTEEN = ",".join(["0.01"] * 16)
METHOD = [
    ("rollout.max_staleness=1 mode=rollout_only", "rollout.max_staleness=1", "mode=train"),
    ("rollout.max_staleness=9 train.total_steps=9", "rollout.max_staleness=9", "total_steps=9"),
    (
        "rollout.max_staleness=1 environment=demonstration algo=sft",
        "rollout.max_staleness=1",
        "worked responses",
    ),
    ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt=1", "group"),
    (
        "train.optimizer_steps_per_batch=513",
        "train.optimizer_steps_per_batch=513",
        "512 samples",
    ),
    ("algo.fractions=[0.6,0.6]", "algo.fractions=[0.6, 0.6]", "add up"),
    (f"algo.fractions=[{SIXTEEN}]", f"algo.fractions={[0.01] * 16}", "at most 15"),
    ("reward.options.weight=2", "reward.options={'weight': 2}", "exact_match"),
    ("reward.name=json:X reward.answer=boxed", "reward.answer=boxed", "exact_match"),
    ("reward.processes=2", "reward.processes=2", "runs in the collector"),
    ("reward.name=math reward.answer=boxed", "reward.answer=boxed", "exact_match"),
    ("environment=demonstration", "algo.name=espo", "compared"),
    (
        "environment=demonstration environment.options.tool=abacus",
        "environment.options={'tool': 'abacus'}",
        "{tool: calculator}",
    ),
    ("environment=demonstration", "train.replay=rollout", "routes"),
    ("algo=sft", "algo.name=sft", "correct or incorrect"),
    (
        "algo=sft environment=calculator",
        "algo.name=sft",
        "environment=demonstration environment.options.tool=calculator",
    ),
    ("algo=sft algo.correction.kind=tis", "algo.correction.kind=tis", "responses"),
    ("algo.correction.high=3", "algo.correction.high=3.0", NO_EFFECT),
    (
        "algo.correction.kind=tis algo.correction.low=0.5",
        "algo.correction.low=0.5",
        "upper bound",
    ),
    (
        "algo.correction.kind=icepop algo.correction.level=sequence",
        "algo.correction.level=sequence",
        "tokens",
    ),
    (
        "algo.correction.kind=mis algo.correction.level=token",
        "algo.correction.level=token",
        "sequences",
    ),
    (
        "train.replay_measure_every=2 train.replay=off",
        "train.replay_measure_every=2",
        "recorded",
    ),
    ("model.hidden_dropout=0.1", "model.hidden_dropout=0.1", "another policy"),
    ("model.hidden_dropout=0.1", "model.hidden_dropout=0.1", "random"),
]
REGULARIZATION = [
    ("algo=cispo algo.alpha=1", "algo.alpha=1", "algo=espo"),
    ("algo=cispo algo.clip_low=1.5", "algo.clip_low=1.5", "at most 1"),
    ("algo.kl.reference=x", "algo.kl.reference=x", NO_EFFECT),
    ("algo.kl.coef=1 algo.kl.reference=nowhere", "algo.kl.reference=nowhere", "no such"),
    ("algo.kl.coef=-1", "algo.kl.coef=-1", "at least 0"),
    ("algo.entropy_coef=-1", "algo.entropy_coef=-1", "at least 0"),
    ("algo=sft algo.kl.coef=1", "algo.kl.coef=1.0", "demonstrations"),
    ("algo=sft algo.entropy_coef=1", "algo.entropy_coef=1.0", "demonstrations"),
    ("environment=demonstration algo.kl.coef=1", "algo.kl.coef=1.0", "demonstrations"),
    ("algo.kl.coef=1 credit.all_correct=keep", "algo.kl.coef=1.0", "credit.all_correct=drop"),
    (
        "algo.entropy_coef=1 credit.all_incorrect=keep",
        "algo.entropy_coef=1.0",
        "credit.all_incorrect=drop",
    ),
    ("algo.kl.coef=1 model.init=random", "algo.kl.reference=null", "random"),
    ("algo.kl.coef=1 model.fp8=blockwise", "algo.kl.coef=1.0", "model.fp8=null"),
]
MODES = [
    ("run.root=''", "run.root=''", "names no directory"),
    ("mode=train_only", "rollout.recording=null", "recorded"),
    ("mode=train_only rollout.recording=nowhere", "rollout.recording=nowhere", "directory"),
    ("rollout.recording=x", "rollout.recording=x", "mode=train "),
    ("mode=train_only eval.stop_at=0.5", "eval.stop_at=0.5", "mode=train_only"),
    ("mode=eval eval.stop_at=0.5", "eval.stop_at=0.5", "mode=eval"),
    ("mode=rollout_only eval.sets={a:x}", "eval.sets={'a': 'x'}", "mode=rollout_only measures"),
    ("mode=eval eval.sets={a:x}", "eval.sets={'a': 'x'}", "a: there is no such file"),
    ("eval.sets={a:{path:x}}", "eval.sets={'a': 'x'}", "as x"),
    ("eval.sets={held_out:x}", "eval.sets={'held_out': 'x'}", "another name"),
    ("eval.sets={a:{every:2}}", "eval.sets.a.path={'every': 2}", "was not given"),
    ("eval.sets={a:{path:x,every:-1}}", "eval.sets.a.every=-1", "at least 0"),
    ("eval.sets={a:{path:x,top_p:0}}", "eval.sets.a.top_p=0", "greater than 0"),
    ("eval.sets={a:{path:x,top_k:2}}", "eval.sets.a.top_k=2", "no such key"),
    ("eval.sets={_a:x}", "eval.sets._a=_a", "starts with a letter"),
    ("eval.max_new_tokens=300", "eval.max_new_tokens=300", "256 positions"),
    (
        "eval.sets={a:{path:x,max_new_tokens:300}}",
        "eval.sets={'a': {'path': 'x', 'max_new_tokens': 300}}",
        "eval.sets.a: data.max",
    ),
    ("run.keep_best=held_out", "run.keep_best=held_out", "run.checkpoint_every=N"),
    ("run.keep_best=a run.checkpoint_every=1", "run.keep_best=a", "The names are held_out"),
    ("mode=eval run.keep_best=held_out", "run.keep_best=held_out", "mode=eval"),
    ("mode=eval environment=demonstration", "mode=eval", "samples no responses"),
    ("mode=eval run.checkpoint_every=2", "run.checkpoint_every=2", NO_WEIGHTS),
    ("mode=rollout_only run.checkpoint_every=2", "run.checkpoint_every=2", NO_WEIGHTS),
    (
        "mode=profile data.pass_rates=a run.checkpoint_every=1",
        "run.checkpoint_every=1",
        NO_WEIGHTS,
    ),
    ("run.resume=nowhere", "run.resume=nowhere", "directory"),
    ("run.resume=auto", "run.name=null", "found again"),
    (
        "run.resume=auto run.name=a run.on_existing=overwrite_failed",
        "run.on_existing=overwrite_failed",
        "remove",
    ),
    ("mode=eval run.resume=auto run.name=a", "run.resume=auto", "mode=eval"),
    ("mode=rollout_only run.resume=auto run.name=a", "run.resume=auto", "start checkpoint"),
]
CREDIT = [
    ("credit.zvp_alpha=0.2", "credit.zvp_alpha=0.2", NO_EFFECT),
    ("credit.zvp_alpha=0.2", "credit.zvp_alpha=0.2", "credit.all_correct=zvp"),
    ("credit.length_start=4", "credit.length_start=4.0", NO_EFFECT),
    ("credit.tied=shape", "credit.tied=shape", NO_EFFECT),
    ("credit.tied=shape", "credit.tied=shape", "repetition_ngram=40"),
    ("credit.length=excess credit.shaping=0", "credit.length=excess", NO_EFFECT),
    (
        "credit.repetition_ngram=4 credit.shaping=0",
        "credit.repetition_ngram=4",
        "credit.shaping above 0",
    ),
    (
        "credit.length=buffer credit.length_start=33",
        "credit.length_start=33.0",
        "at most 32",
    ),
    (
        "credit.length=buffer credit.length_start=1.5",
        "credit.length_start=1.5",
        "a number of tokens",
    ),
    (
        "credit.length=excess credit.length_start=200",
        "credit.length_start=200.0",
        "at most 10",
    ),
    ("credit.repetition_ngram=32", "credit.repetition_ngram=32", "at most 31"),
    (
        "algo=sft credit.all_correct=zvp",
        "credit.all_correct=zvp",
        "algo=sft",
    ),
]
SELECTION = [
    ("selection.probe_samples=2", "selection.probe_samples=2", NOT_READ),
    ("selection=oversample selection.reweight=10", "selection.reweight=10.0", NOT_READ),
    ("selection.surplus=abort", "selection.surplus=abort", "selection=oversample"),
    (
        "rollout.stop_repetition=0.5 rollout.max_new_tokens=512",
        "rollout.stop_repetition=0.5",
        "every 512 tokens",
    ),
    (
        "mode=train_only rollout.recording=. rollout.stop_repetition=0.5",
        "rollout.stop_repetition=0.5",
        "samples no rollouts",
    ),
    ("selection=belief selection.surplus=abort", "selection.surplus=abort", NOT_READ),
    ("selection.budget=2", "selection.budget=2.0", "selection=oversample or selection=belief"),
    ("selection.beliefs_from=.", "selection.beliefs_from=.", NOT_READ),
    (
        "selection=oversample selection.beliefs_from=.",
        "selection.beliefs_from=.",
        "selection.name=oversample",
    ),
    (
        "selection=belief selection.beliefs_from=no",
        "selection.beliefs_from=no",
        "no such directory",
    ),
    ("selection=belief selection.probe_samples=8", "selection.probe_samples=8", "2 to 7"),
    ("selection=belief selection.probe_samples=1", "selection.probe_samples=1", "2 to 7"),
    (
        "selection=belief rollout.samples_per_prompt=2",
        "selection.probe_samples=4",
        "Use 0",
    ),
    ("selection=belief algo=sft", "selection.name=belief", "algo=sft"),
    ("selection=belief mode=eval", "selection.name=belief", "mode=eval"),
]
LOGGER = [
    ("logger.wandb=project", "logger.wandb=project", "pip install wandb"),
    ("logger.prometheus=65536", "logger.prometheus=65536", "from 1 to 65535"),
    ("logger.prometheus=localhost:00000", "logger.prometheus=localhost:00000", "from 1 to 65535"),
    ("logger.profile_steps=[1,999]", "logger.profile_steps=[1, 999]", "train.total_steps"),
    ("logger.profile_steps=[1] mode=eval", "logger.profile_steps=[1]", "mode=eval"),
]
ENTROPY = "guard.min_entropy=0.1"
GUARD = [
    ("guard.spike=rollback", "guard.spike=rollback", "off, skip, stop"),
    ("guard.nonfinite=rollback", "guard.nonfinite=rollback", "skip, stop"),
    (f"{ENTROPY} run.checkpoint_every=1", "run.keep_checkpoints=2", "Give at least 4"),
    (f"{ENTROPY} run.checkpoint_every=2", "run.keep_checkpoints=2", "Give at least 3"),
    ("guard.min_entropy=0", "guard.min_entropy=0", "greater than 0"),
    ("mode=eval guard.spike=stop", "guard.spike=stop", "mode=eval"),
    ("mode=rollout_only guard.nonfinite=stop", "guard.nonfinite=stop", "mode=rollout_only"),
    (
        "mode=profile data.pass_rates=a guard.min_entropy=0.1",
        "guard.min_entropy=0.1",
        "mode=profile",
    ),
]
CASES = (
    PARALLEL
    + ENGINES
    + DATA
    + METHOD
    + REGULARIZATION
    + MODES
    + CREDIT
    + SELECTION
    + LOGGER
    + GUARD
)


@pytest.mark.parametrize(
    ("overrides", "setting", "fragment"), CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES]
)
def test_a_combination_is_refused_with_rule_and_remedy(
    checkpoint: Path, overrides: str, setting: str, fragment: str
) -> None:
    assert_refused(checkpoint, overrides, setting, fragment)
