"""Every configuration that must be refused, and what the refusal says."""

from pathlib import Path

import pytest

from megatron_rl.config.cli import HYDRA_CONF
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import ConfigurationRefused
from tests.support.configurations import BF16, NODE, ON_CLUSTERS, accept, refusals

# overrides | key | value shown | part of the rule | part of the remedy
UNKNOWN_OR_WRONG_TYPE = [
    ("foo=1", "foo", "1", "no such key", "keys at the top are model, algo"),
    ("+foo=1", "foo", "1", "no such key", "keys at the top are model, algo"),
    ("++foo.bar=1", "foo", "{'bar': 1}", "no such key", "keys at the top"),
    ("++foo.bar.baz=1", "foo", "{'bar': {'baz': 1}}", "no such key", "keys at the top"),
    ("foo.bar.baz=1", "foo.bar.baz", "1", "no such key", "--cfg job"),
    (
        "optimizer.learning_rate=1",
        "optimizer.learning_rate",
        "1",
        "no such key",
        "keys of optimizer are lr, warmup",
    ),
    ("+train.total_step=1", "train.total_step", "1", "no such key", "train.total_steps"),
    (
        "++rollout.max_new_token=1",
        "rollout.max_new_token",
        "1",
        "no such key",
        "rollout.max_new_tokens",
    ),
    ("+lr=1", "lr", "1", "no such key", "optimizer.lr"),
    ("algo.clip_low=1", "algo.clip_low", "1", "no such key", "algo=grpo or algo=gspo"),
    ("+algo.clip_low=1", "algo.clip_low", "1", "no such key", "algo=grpo or algo=gspo"),
    (
        "+engine.server={a: 1}",
        "engine.server",
        "{'a': 1}",
        "no such key",
        "keys of engine are tp, ep",
    ),
    (
        "algo=ppo",
        "algo",
        "ppo",
        "no such file in hydra_conf/algo",
        "custom, espo, espo_wide, grpo, gspo, gspo_wide, sft",
    ),
    (
        "experiment=nope",
        "experiment",
        "nope",
        "no such file in hydra_conf/experiment",
        "quickstart",
    ),
    ("+engine=nope", "engine", "nope", "no such file in hydra_conf/engine", "external, managed"),
    ("+experiment=smoke", "experiment", "smoke", "has a choice already", "without the +"),
    ("+logger.reward=nope", "logger.reward", "nope", "no such key", "reward"),
    ("optimizer.lr=abc", "optimizer.lr", "abc", "Must be a number", "value of that type"),
    ("train.total_steps=2.5", "train.total_steps", "2.5", "whole number", "value of that type"),
    ("train.total_steps=true", "train.total_steps", "true", "whole number", "value of that type"),
    ("optimizer.lr=true", "optimizer.lr", "true", "Must be a number", "value of that type"),
    ("seed=false", "seed", "false", "whole number", "value of that type"),
    ("run.root=[a]", "run.root", "['a']", "Must be text", "value of that type"),
    ("train.total_steps=null", "train.total_steps", "null", "not be null", "value of that type"),
    ("engine.urls=[a,null]", "engine.urls[1]", "null", "not be null", "value of that type"),
    ("optimizer.lr.x=1", "optimizer.lr", "{'x': 1}", "Must be a number", "value of that type"),
    ("algo.name=ppo", "algo.name", "ppo", "those of algo=espo", "algo=grpo|gspo|espo|sft|custom"),
    ("--config-dir=x", "--config-dir", "x", "One torchrun is one run", "hydra.searchpath"),
    ("train.total_steps=", "train.total_steps", "''", "whole number", "value of that type"),
    (
        "+train.replay_routes=false",
        "train.replay_routes",
        "false",
        "no such key",
        "Did you mean train.replay?",
    ),
    (
        "train.replay=none",
        "train.replay",
        "none",
        "Must be one of rollout, trainer, off",
        "Choose one",
    ),
    ("data.shuffle=maybe", "data.shuffle", "maybe", "true or false", "value of that type"),
    ("engine.urls=abc", "engine.urls", "abc", "a list", "value of that type"),
    ("optimizer=null", "optimizer", "null", "not be null", "value of that type"),
    ("rollout=x", "rollout", "x", "a group of keys", "value of that type"),
    ("~optimizer", "optimizer", "''", "every key always exists", "Leave out ~optimizer"),
    ("~train", "train", "''", "every key always exists", "Leave out ~train"),
    ("~seed", "seed", "''", "every key always exists", "Leave out ~seed"),
    ("hydra.mode=MULTIRUN", "hydra.mode", "MULTIRUN", "one torchrun is one run", "run.root"),
    ("+hydra.foo=1", "hydra.foo", "1", "Hydra's own settings", "run.root"),
    ("hydra/job_logging=none", "hydra/job_logging", "none", "Hydra's own settings", "run.root"),
    (
        "engine.extra_args=[--x=y]",
        "engine.extra_args",
        "[--x=y]",
        "cannot parse",
        "\"engine.extra_args=['--x=y']\"",
    ),
    ("~optimizer.lr", "optimizer.lr", "''", "every key always exists", "Leave out ~optimizer.lr"),
    ("a b", "a b", "''", "key=value, without spaces", "Write a b=..."),
    ("run.name=${nope}", "run.name", "${nope}", "'nope' not found", "quote it for the shell"),
    ("model=5", "model", "5", "one of its options", "that --help lists"),
    ("experiment=null", "experiment", "null", "one of its options", "that --help lists"),
    ("algo=", "algo", "''", "no such file", "Choose one of custom, espo"),
    (
        "trian.total_steps=3",
        "trian.total_steps",
        "3",
        "no such key",
        "Did you mean train.total_steps?",
    ),
    (
        "TRAIN.total_steps=3",
        "TRAIN.total_steps",
        "3",
        "no such key",
        "Did you mean train.total_steps?",
    ),
    ("Experiment=smoke", "Experiment", "smoke", "no such key", "Did you mean experiment?"),
    (
        "+train.total_steps=3",
        "train.total_steps",
        "3",
        "has a value already",
        "without the +: train.total_steps=3",
    ),
    (
        "--train.total_steps=3",
        "--train.total_steps",
        "3",
        "takes key=value",
        "Write train.total_steps=3",
    ),
    ("run.name=a,b", "run.name", "a,b", "several values", "'run.name=\"a,b\"'"),
    ("model.path=/a b/c=d", "model.path", "/a b/c=d", "cannot parse", "'model.path=\"/a b/c=d\"'"),
    (
        "hydra.searchpath=[file:///nowhere]",
        "hydra.searchpath",
        "[file:///nowhere]",
        "no directory file:///now",
        "Write",
    ),
    (
        "hydra.searchpath=[/tmp]",
        "hydra.searchpath",
        "[/tmp]",
        "no directory /tmp",
        "[file:///DIRECTORY]",
    ),
    ("--package=algo", "--package", "algo", "takes key=value", "Loop"),
]

LIMITS = [
    ("optimizer.lr=-1e-4", "optimizer.lr", "-0.0001", "at least 0", "default 0.0003"),
    ("optimizer.lr=nan", "optimizer.lr", "nan", "finite", "default 0.0003"),
    ("optimizer.lr=inf", "optimizer.lr", "inf", "finite", "default 0.0003"),
    ("optimizer.beta2=1", "optimizer.beta2", "1", "less than 1", "default 0.95"),
    ("optimizer.decay=step", "optimizer.decay", "step", "constant, linear, cosine", "one of these"),
    ("optimizer.min_lr_ratio=2", "optimizer.min_lr_ratio", "2", "at most 1", "default 0.1"),
    ("rollout.temperature=0", "rollout.temperature", "0", "at least 0.01", "default 1.0"),
    ("rollout.temperature=1e300", "rollout.temperature", "1e+300", "at most 100", "default 1.0"),
    ("sync.bucket_mb=1e-9", "sync.bucket_mb", "1e-09", "at least 0.001", "default 256"),
    ("seed=4294967296", "seed", "4294967296", "at most 4294967295", "default 0"),
    ("rollout.max_new_tokens=0", "rollout.max_new_tokens", "0", "at least 1", "such a number"),
    ("eval.every=-1", "eval.every", "-1", "at least 0", "default 10"),
    ("eval.temperature=-1", "eval.temperature", "-1", "at least 0", "default"),
    ("data.on_bad_row=ignore", "data.on_bad_row", "ignore", "fail, skip", "one of these"),
    (
        "data.source=web",
        "data.source",
        "web",
        "jsonl, reasoning_gym, or your own package.module:Name",
        "one of these",
    ),
    (
        "environment.name=a:b:c",
        "environment.name",
        "a:b:c",
        "single_turn, worked, or your own",
        "one of these",
    ),
    ("algo.fractions=[0.2,2]", "algo.fractions[1]", "2", "at most 1", "such a number"),
    ("reward.answer=first", "reward.answer", "first", "last_number", "one of these"),
    ("model.dtype=float16", "model.dtype", "float16", "float32, bfloat16", "one of these"),
    ("sync.transport=ipc", "sync.transport", "ipc", "distributed, disk", "one of these"),
    ("engine.mode=remote", "engine.mode", "remote", "managed, external", "one of these"),
    ("parallel.ep=0", "parallel.ep", "0", "at least 1", "default 1"),
    ("seed=-1", "seed", "-1", "at least 0", "default 0"),
    ("data.num_eval=0", "data.num_eval", "0", "at least 1", "default 512"),
    ("parallel.timeout_s=1e300", "parallel.timeout_s", "1e+300", "at most 1000000", "default 600"),
    (
        "engine.start_timeout_s=1e9",
        "engine.start_timeout_s",
        "1000000000.0",
        "at most 1000000",
        "default 180",
    ),
    (
        "train.total_steps=100000000000000000000",
        "train.total_steps",
        "100000000000000000000",
        "at most 2147",
        "number",
    ),
    ("engine.count=5000", "engine.count", "5000", "at most 1024", "default 1"),
    (
        "rollout.samples_per_prompt=100000000",
        "rollout.samples_per_prompt",
        "100000000",
        "at most 10000000",
        "default",
    ),
    ("credit.shaping=0.6", "credit.shaping", "0.6", "at most 0.5", "default 0.5"),
    ("credit.shaping=-0.1", "credit.shaping", "-0.1", "at least 0", "default 0.5"),
    ("credit.tied_scale=0.2", "credit.tied_scale", "0.2", "at most 0.1", "default 0.1"),
    ("credit.zvp_alpha=nan", "credit.zvp_alpha", "nan", "finite", "default 0.1"),
    ("credit.length_excess=0.5", "credit.length_excess", "0.5", "at least 1", "default 1.5"),
    ("credit.repetition_ngram=1", "credit.repetition_ngram", "1", "at least 2", "default null"),
    ("credit.all_correct=shape", "credit.all_correct", "shape", "drop, zvp, keep", "one of these"),
    ("credit.tied_correct=zvp", "credit.tied_correct", "zvp", "drop, shape", "one of these"),
    (
        "algo.zero_variance=drop",
        "algo.zero_variance",
        "drop",
        "no such key",
        "keys of algo are name",
    ),
    ("algo.min_clip=1", "algo.min_clip", "1", "less than 1", "default 0.0003"),
    (
        "selection.name=best",
        "selection.name",
        "best",
        "uniform, oversample, belief",
        "one of these",
    ),
    ("selection.budget=0.5", "selection.budget", "0.5", "at least 1", "default 4.0"),
    (
        "selection.expert.min_acceptance=0",
        "selection.expert.min_acceptance",
        "0",
        "greater than 0",
        "default 0.1",
    ),
    (
        "selection.expert.acceptance_target=1.5",
        "selection.expert.acceptance_target",
        "1.5",
        "at most 1",
        "default 0.",
    ),
    (
        "selection.expert.acceptance_exponent=-1",
        "selection.expert.acceptance_exponent",
        "-1",
        "at least 0",
        "default",
    ),
    (
        "selection.expert.max_age_steps=0",
        "selection.expert.max_age_steps",
        "0",
        "at least 1",
        "default 100",
    ),
    (
        "selection.expert.min_filled=nan",
        "selection.expert.min_filled",
        "nan",
        "finite",
        "default 0.9",
    ),
]

COMBINATIONS = [
    (
        "parallel.ep=3",
        "parallel.ep",
        "3",
        "does not divide the 1 rank",
        "torchrun --nproc-per-node 3",
    ),
    ("parallel.ep=3", "parallel.ep", "3", "8 experts cannot be split", "divisor of 8"),
    ("parallel=tp2_ep2", "parallel.tp", "2", "does not divide the 1 rank", "--nproc-per-node 2"),
    (
        "parallel.sequence_parallel=true",
        "parallel.sequence_parallel",
        "true",
        "parallel.tp=1",
        "Use false",
    ),
    ("parallel.pp=2", "parallel.pp", "2", "does not divide the 1 rank", "--nproc-per-node 2"),
    (
        "parallel.pp=3",
        "parallel.pp",
        "3",
        "4 layers do not divide over 3 stage(s)",
        "first_stage_layers",
    ),
    ("parallel.vpp=2", "parallel.vpp", "2", "there is only one", "Leave it null"),
    (
        "parallel.first_stage_layers=2",
        "parallel.first_stage_layers",
        "2",
        "holds every layer",
        "Choose others",
    ),
    ("parallel.cp=2", "parallel.cp", "2", "does not divide the 1 rank", "--nproc-per-node 2"),
    (
        "parallel.timeout_s=180",
        "engine.start_timeout_s",
        "180.0",
        "parallel.timeout_s=180",
        "raise parallel.timeout_s",
    ),
    (
        "engine.start_timeout_s=601",
        "engine.start_timeout_s",
        "601.0",
        "wait in a collective",
        "Lower it",
    ),
    (
        "sync.timeout_s=600",
        "sync.timeout_s",
        "600.0",
        "wait in a collective",
        "raise parallel.timeout_s",
    ),
    (
        "engine.urls=[http://127.0.0.1:3]",
        "engine.urls",
        "['http://127.0.0.1:3']",
        "starts its own",
        "engine=external",
    ),
    ("engine=external", "engine.urls", "[]", "needs the addresses", "engine=managed"),
    ("engine.ep=2", "engine.ep", "2", "divide engine.tp=1", "divisor of engine.tp"),
    ("engine.device=cuda", "engine.device", "cuda", "No CUDA device", "engine.device=auto"),
    ("engine.quantization=fp8", "engine.quantization", "fp8", "sent unquantized", "Use null"),
    (
        "engine.extra_args=['--port=1']",
        "engine.extra_args",
        "['--port=1']",
        "--port",
        "use that one",
    ),
    (
        "engine.extra_args=['--dp-size=2']",
        "engine.extra_args",
        "['--dp-size=2']",
        "not supported",
        "Remove --dp-size",
    ),
    ("engine.max_total_tokens=32", "engine.max_total_tokens", "32", "66 slots", "at least 66"),
    ("data.max_prompt_tokens=300", "rollout.max_new_tokens", "32", "256 positions", "Lower one"),
    ("data=jsonl", "data.train_path", "null", "a file of questions", "data.train_path=train.jsonl"),
    ("model.path=???", "model.path", "???", "no default", "model.path=..."),
    (
        "data.source=jsonl",
        "data.train_path",
        "null",
        "a file of questions",
        "data.train_path=train.jsonl",
    ),
    ("data.train_path=a.jsonl", "data.train_path", "a.jsonl", "no meaning", "data=jsonl"),
    ("data.task=chain_sum", "data.task", "chain_sum", "no meaning", "data=reasoning_gym"),
    ("data.source=reasoning_gym", "data.task", "null", "generator's name", "data.task=chain_sum"),
    (
        "data.num_train=10",
        "rollout.prompts_per_step",
        "64",
        "data.num_train=10",
        "raise data.num_train",
    ),
    (
        "rollout.max_staleness=1",
        "rollout.max_staleness",
        "1",
        "later than",
        "rollout.max_staleness=0",
    ),
    ("algo.name=grpo", "algo.name", "grpo", "those of algo=espo", "algo=grpo|gspo|espo"),
    (
        "algo=gspo_wide algo.name=grpo",
        "algo.name",
        "grpo",
        "those of algo=gspo",
        "algo=grpo|gspo|espo",
    ),
    (
        "train.optimizer_steps_per_batch=513",
        "train.optimizer_steps_per_batch",
        "513",
        "512 samples",
        "Lower it",
    ),
    ("run.name=a..b", "run.name", "a..b", "no '..'", "run.root"),
    ("run.name=a/b", "run.name", "a/b", "letters, digits", "run.root"),
    ("run.name=''", "run.name", "''", "letters, digits", "run.root"),
    ("run.root=''", "run.root", "''", "names no directory", "run.root=runs"),
    (
        "engine.extra_args=['--quantization=fp8']",
        "engine.extra_args",
        "['--quantization=fp8']",
        "--quant",
        "use that",
    ),
    (
        "engine.extra_args=['--load-format=dummy']",
        "engine.extra_args",
        "['--load-format=dummy']",
        "not sup",
        "Remove",
    ),
    (
        "rollout.samples_per_prompt=1",
        "rollout.samples_per_prompt",
        "1",
        "a group needs two to compare",
        "advantages=one",
    ),
    (
        "algo.fractions=[0.6,0.6]",
        "algo.fractions",
        "[0.6, 0.6]",
        "add up to more than 1",
        "[0.2] for two groups",
    ),
    (
        "reward.options.weight=2",
        "reward.options",
        "{'weight': 2}",
        "reward.name=exact_match",
        "Remove",
    ),
    ("data.options.a=1", "data.options", "{'a': 1}", "class of your own", "Remove"),
    ("environment=demonstration", "algo.advantages", "group", "not compared", "algo=sft"),
    (
        "environment=demonstration",
        "train.replay",
        "rollout",
        "No engine chose",
        "train.replay=trainer or off",
    ),
    (
        "train.replay_measure_every=2 train.replay=off",
        "train.replay_measure_every",
        "2",
        "engines rec",
        "Use 0",
    ),
    (
        "engine.fake_quant=fp8",
        "engine.fake_quant",
        "fp8",
        "Must be one of off, bf16, fp8_blockwise",
        "one of these",
    ),
    (
        "mode=eval engine.fake_quant=bf16",
        "engine.fake_quant",
        "bf16",
        "sends no weights",
        "run.resume=runs/NAME",
    ),
    (
        "mode=profile data.pass_rates=r.jsonl engine.fake_quant=bf16",
        "engine.fake_quant",
        "bf16",
        "sends no weights",
        "run.resume=runs/NAME",
    ),
    (
        "model.dtype=bfloat16 engine.dtype=bfloat16 engine.fake_quant=bf16",
        "engine.fake_quant",
        "bf16",
        "anyway",
        "Use off",
    ),
    ("algo.correction=tis", "algo.correction", "tis", "a group of keys", "value of that type"),
    (
        "algo.correction.kind=yes",
        "algo.correction.kind",
        "yes",
        "Must be one of off, tis, icepop, mis",
        "one of these",
    ),
    (
        "algo.correction.cap=2",
        "algo.correction.cap",
        "2",
        "no such key",
        "of algo.correction are kind, level, low, high",
    ),
    (
        "algo.correction.low=1.5",
        "algo.correction.low",
        "1.5",
        "Must be less than 1",
        "such a number",
    ),
    (
        "algo.correction.high=0.5",
        "algo.correction.high",
        "0.5",
        "Must be greater than 1",
        "such a number",
    ),
    (
        "algo.correction.high=3",
        "algo.correction.high",
        "3.0",
        "no meaning with kind=off",
        "choose a kind",
    ),
    (
        "algo.correction.kind=tis algo.correction.low=0.5",
        "algo.correction.low",
        "0.5",
        "upper bound alone",
        "icepop",
    ),
    (
        "algo.correction.kind=icepop algo.correction.level=sequence",
        "algo.correction.level",
        "sequence",
        "single",
        "mis",
    ),
    (
        "algo.correction.kind=mis algo.correction.level=token",
        "algo.correction.level",
        "token",
        "whole",
        "kind=icepop",
    ),
    (
        "algo=sft algo.correction.kind=tis",
        "algo.correction.kind",
        "tis",
        "responses are shown",
        "Use off",
    ),
    ("algo=sft", "algo.name", "sft", "right or wrong", "environment=demonstration"),
    ("algo=sft algo.advantages=group", "algo.advantages", "group", "has no advantages", "Use one"),
    (
        "algo.advantages=one algo.permute_rewards=true",
        "algo.permute_rewards",
        "true",
        "no reward is used",
        "Remove",
    ),
    (
        "reward.name=json:X reward.answer=boxed",
        "reward.answer",
        "boxed",
        "Only exact_match reads it",
        "Remove",
    ),
    ("sync.when=evaluation", "sync.when", "evaluation", "every step's weights", "sync.when=step"),
    (
        "model.embedding_std=0.1",
        "model.embedding_std",
        "0.1",
        "start at random",
        "model.init=random",
    ),
    (
        "model.hidden_dropout=0.1",
        "model.hidden_dropout",
        "0.1",
        "another policy",
        "environment=demonstration",
    ),
    ("engine.extra_args=['']", "engine.extra_args", "['']", "an empty argument", "Remove it"),
    (
        "mode=train_only",
        "rollout.recording",
        "null",
        "mode=rollout_only recorded",
        "rollout.recording=runs/NAME",
    ),
    ("rollout.recording=x", "rollout.recording", "x", "mode=train draws", "mode=train_only"),
    ("mode=eval_only", "mode", "eval_only", "train, rollout_only, train_only", "one of these"),
    ("run.resume=auto", "run.name", "null", "never found again", "run.resume=runs/NAME"),
    ("credit.zvp_alpha=0.2", "credit.zvp_alpha", "0.2", "change nothing", "credit.all_correct=zvp"),
    (
        "credit.tied_scale=0.05",
        "credit.tied_scale",
        "0.05",
        "change nothing",
        "credit.tied_correct=shape",
    ),
    (
        "credit.length_buffer=4",
        "credit.length_buffer",
        "4",
        "change nothing",
        "credit.length=buffer",
    ),
    (
        "credit.length_excess=2",
        "credit.length_excess",
        "2.0",
        "change nothing",
        "credit.length=excess",
    ),
    (
        "credit.tied_correct=shape",
        "credit.tied_correct",
        "shape",
        "change nothing",
        "credit.length=buffer or excess",
    ),
    (
        "credit.tied_incorrect=shape",
        "credit.tied_incorrect",
        "shape",
        "change nothing",
        "credit.repetition_ngram=40",
    ),
    (
        "credit.length=excess credit.shaping=0",
        "credit.length",
        "excess",
        "change nothing",
        "credit.shaping above 0",
    ),
    (
        "credit.length=buffer credit.length_buffer=33",
        "credit.length_buffer",
        "33",
        "max_new_tokens=32",
        "Give fewer",
    ),
    (
        "credit.repetition_ngram=32",
        "credit.repetition_ngram",
        "32",
        "max_new_tokens=32",
        "Give fewer",
    ),
    (
        "algo.advantages=one credit.all_correct=zvp",
        "credit.all_correct",
        "zvp",
        "the advantage 1",
        "advantages=group",
    ),
    ("run.resume=nowhere", "run.resume", "nowhere", "no directory", "Give auto, never"),
    (
        "selection.probe_samples=2",
        "selection.probe_samples",
        "2",
        "selection.name=uniform does not read it",
        "selection=belief",
    ),
    (
        "selection.budget=2",
        "selection.budget",
        "2.0",
        "=uniform does not",
        "selection=oversample or selection=belief",
    ),
    (
        "selection.beliefs_from=.",
        "selection.beliefs_from",
        ".",
        "selection.name=uniform does not read it",
        "selection=belief",
    ),
    (
        "selection=oversample selection.beliefs_from=.",
        "selection.beliefs_from",
        ".",
        "=oversample does not",
        "=belief",
    ),
    (
        "selection=belief selection.beliefs_from=no",
        "selection.beliefs_from",
        "no",
        "no such directory",
        "directory of a run",
    ),
    (
        "selection=belief selection.probe_samples=8",
        "selection.probe_samples",
        "8",
        "less than a group of 8",
        "2 to 7, or 0",
    ),
    (
        "selection=belief selection.probe_samples=1",
        "selection.probe_samples",
        "1",
        "compared within itself",
        "2 to 7, or 0",
    ),
    (
        "selection=belief rollout.samples_per_prompt=2",
        "selection.probe_samples",
        "4",
        "less than a group of 2",
        "Use 0",
    ),
    (
        "selection=belief algo.advantages=one",
        "selection.name",
        "belief",
        "every judged rollout",
        "selection=uniform",
    ),
    (
        "selection=belief mode=eval",
        "selection.name",
        "belief",
        "mode=eval chooses no prompts",
        "mode=train",
    ),
]


OF_SEVERAL = {case[0]: case[0].split(" ") for case in COMBINATIONS}


@pytest.mark.parametrize(
    ("override", "key", "value", "rule", "remedy"),
    UNKNOWN_OR_WRONG_TYPE + LIMITS + COMBINATIONS,
    ids=[case[0] for case in UNKNOWN_OR_WRONG_TYPE + LIMITS + COMBINATIONS],
)
def test_refusal_names_key_value_rule_and_remedy(
    checkpoint: Path, override: str, key: str, value: str, rule: str, remedy: str
) -> None:
    lines = [
        str(refusal) for refusal in refusals(checkpoint, *OF_SEVERAL.get(override, [override]))
    ]
    assert any(
        line.startswith(f"{key}={value}: ") and rule in line and remedy in line for line in lines
    ), lines


@pytest.mark.parametrize(
    ("overrides", "key", "rule"),
    [
        (
            ("run.resume=auto", "run.name=a", "run.on_existing=overwrite_failed"),
            "run.on_existing",
            "It would remove",
        ),
        (
            ("mode=train_only", "rollout.recording=nowhere"),
            "rollout.recording",
            "no such directory",
        ),
        (("mode=train_only", "eval.stop_at=0.5"), "eval.stop_at", "mode=train_only has no steps"),
        (("mode=profile",), "data.pass_rates", "writes pass rates to a file"),
        (("mode=profile", "data.pass_rates=/dev/null"), "data.pass_rates", "it is there already"),
        (("mode=profile", "data.pass_rates=/dev/null/a"), "data.pass_rates", "/dev/null is a file"),
        (
            ("mode=profile", "data.pass_rates=a", "data.pass_rate_range=[0,1]"),
            "data.pass_rate_range",
            "are not known",
        ),
        (
            ("mode=profile", "data.pass_rates=a", "run.checkpoint_every=1"),
            "run.checkpoint_every",
            "changes no weights",
        ),
        (("data.pass_rates=nowhere",), "data.pass_rates", "There is no such file"),
        (("data.pass_rate_range=[0.1,0.9]",), "data.pass_rate_range", "are not known"),
        (
            ("data.pass_rates=/dev/null", "data.pass_rate_range=[0.9,0.1]"),
            "data.pass_rate_range",
            "low at most high",
        ),
        (
            ("data.pass_rates=/dev/null", "data.pass_rate_range=[0.9]"),
            "data.pass_rate_range",
            "low at most high",
        ),
        (
            ("data.pass_rates=/dev/null", "data.pass_rate_range=[0.9,2]"),
            "data.pass_rate_range[1]",
            "at most 1",
        ),
        (("mode=eval", "eval.stop_at=0.5"), "eval.stop_at", "mode=eval has no steps"),
        (("mode=eval", "run.checkpoint_every=2"), "run.checkpoint_every", "changes no weights"),
        (("mode=eval", "run.resume=auto", "run.name=a"), "run.resume", "goes on with nothing"),
        (("mode=eval", "eval.sets={a: nowhere}"), "eval.sets", "a: there is no such file"),
        (("mode=eval", "environment=demonstration"), "mode", "samples nothing"),
        (("eval.sets={a: x}",), "eval.sets", "Only mode=eval"),
        (
            ("mode=rollout_only", "run.checkpoint_every=2"),
            "run.checkpoint_every",
            "changes no weights",
        ),
        (
            ("mode=rollout_only", "run.resume=auto", "run.name=a"),
            "run.resume",
            "from the start checkpoint",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(
    checkpoint: Path, overrides: tuple[str, ...], key: str, rule: str
) -> None:
    assert any(r.key == key and rule in str(r) for r in refusals(checkpoint, *overrides))


def test_a_run_does_not_begin_from_itself(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    given = (
        f"run.root={tmp_path}",
        "run.name=a",
        f"run.resume={tmp_path}/a",
        "run.on_existing=overwrite_failed",
    )
    assert [r.key for r in refusals(checkpoint, *given)] == ["run.resume"]
    assert accept(checkpoint, *given[:2], "run.resume=auto").run.resume == "auto"


def test_jsonl_files(checkpoint: Path, tmp_path: Path) -> None:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    train.touch()
    paths = ("data=jsonl", f"data.train_path={train}")
    assert refusals(checkpoint, *paths, f"data.eval_path={held_out}")[0].key == "data.eval_path"
    assert "training file" in str(refusals(checkpoint, *paths, f"data.eval_path={train}")[0])
    assert accept(checkpoint, *paths).data.train_path == str(train)


@pytest.mark.parametrize(
    ("held_out", "override", "rule"),
    [
        (False, "data.num_train=100", "All rows of data.train_path are used"),
        (True, "data.num_train=100", "All rows of data.train_path are used"),
        (True, "data.num_eval=100", "All rows of data.eval_path are used"),
        (True, "++data.num_eval=100", "All rows of data.eval_path are used"),
        (False, "data.num_eval=100", None),
        (True, "data.num_eval=512", None),  # the default: nothing is asked for
        (True, "experiment=smoke", None),  # its counts belong to its own task
    ],
)
def test_count_that_a_file_decides(
    checkpoint: Path, tmp_path: Path, held_out: bool, override: str, rule: str | None
) -> None:
    overrides = ["data=jsonl", f"data.train_path={tmp_path}/train.jsonl", override]
    (tmp_path / "train.jsonl").touch()
    if held_out:
        (tmp_path / "eval.jsonl").touch()
        overrides.append(f"data.eval_path={tmp_path}/eval.jsonl")
    if rule is None:
        assert accept(checkpoint, *overrides).data.source == "jsonl"
        return
    (refusal,) = refusals(checkpoint, *overrides)
    assert str(refusal).startswith(f"{override.lstrip('+')}: {rule}")


def test_trainer_and_engine_are_on_the_same_kind_of_device(checkpoint: Path) -> None:
    (refusal,) = refusals(checkpoint, "engine.device=cpu", facts=NODE)
    assert str(refusal).startswith(
        "engine.device=cpu: The trainer sends weights from the 16 GPU(s) here with NCCL"
    )
    assert 'CUDA_VISIBLE_DEVICES=""' in refusal.remedy
    assert accept(checkpoint, "engine.device=cpu").engine.device == "cpu"
    assert accept(checkpoint, "engine.device=cuda", BF16, facts=NODE).engine.device == "cuda"


@pytest.mark.parametrize(
    ("overrides", "facts", "rule"),
    [
        (("parallel.tp=8", "parallel.sequence_parallel=true"), NODE, "4 attention heads"),
        (("parallel.tp=4", "parallel.sequence_parallel=true"), NODE, "2 key-value heads"),
        (("parallel.tp=2",), NODE, "come together, and parallel.tp=2. Use true"),
        (
            ("parallel.pp=2", "parallel.vpp=4"),
            NODE,
            "4 layers do not divide over 2 stage(s) of 4 chunks each",
        ),
        (
            ("parallel.pp=2", "parallel.last_stage_layers=4"),
            NODE,
            "the 0 layers that the first and last stage leave",
        ),
        (
            ("parallel.pp=2", "parallel.vpp=2", "parallel.first_stage_layers=3"),
            NODE,
            "parallel.first_stage_layers=3",
        ),
        (
            ("parallel.etp=2",),
            NODE,
            "Without parallel.ep Megatron reduces experts' gradients as those of layers over",
        ),
        (
            ("parallel.ep=2", "parallel.etp=2"),
            NODE,
            "parallel.etp=2: With parallel.tp=1 no whole step of such a grid",
        ),
        (
            ("parallel.ep=4", "parallel.etp=4"),
            NODE,
            "parallel.etp x ep = 16 does not divide the 8 rank",
        ),
    ],
)
def test_model_cannot_be_split(
    checkpoint: Path, overrides: tuple[str, ...], facts: LaunchFacts, rule: str
) -> None:
    assert any(rule in str(refusal) for refusal in refusals(checkpoint, *overrides, facts=facts))


@pytest.mark.parametrize(
    "parallel",
    sorted({file.stem for file in (HYDRA_CONF / "parallel").glob("*.yaml")} - ON_CLUSTERS),
)
def test_parallel_groups_fit_a_node(checkpoint: Path, parallel: str) -> None:
    assert accept(checkpoint, f"parallel={parallel}", BF16, facts=NODE).parallel.timeout_s == 600.0


def test_engine_dtype_follows_the_model_and_is_never_wider(checkpoint: Path) -> None:
    assert accept(checkpoint, "engine.dtype=bfloat16").engine.dtype == "bfloat16"
    for facts in (NODE, LaunchFacts()):
        assert accept(checkpoint, "model.dtype=bfloat16", facts=facts).engine.dtype == "bfloat16"
    refusal = refusals(checkpoint, "model.dtype=bfloat16", "engine.dtype=float32", facts=NODE)[-1]
    assert str(refusal).startswith("engine.dtype=float32: It is wider than model.dtype=bfloat16")
    assert "engine.dtype=bfloat16" in refusal.remedy


def test_all_refusals_are_reported_together(checkpoint: Path) -> None:
    found = refusals(checkpoint, "run.root=''", "data.train_path=x", "rollout.max_staleness=2")
    assert [refusal.key for refusal in found] == [
        "data.train_path",
        "rollout.max_staleness",
        "run.root",
    ]
    report = str(ConfigurationRefused(found)).splitlines()
    assert [line.partition("=")[0] for line in report[:3]] == [
        "data.train_path",
        "rollout.max_staleness",
        "run.root",
    ]
    assert report[3:] == ["3 settings are refused; nothing was started."]


@pytest.mark.parametrize("group", ["algo", "data", "environment", "reward"])
def test_own_class_without_a_module_is_refused_before_anything_is_imported(
    checkpoint: Path, group: str
) -> None:
    key = "source" if group == "data" else "name"
    (refusal,) = refusals(checkpoint, f"{group}=custom")
    assert refusal.key == f"{group}.{key}"
    assert f"Give it: {group}.{key}=..." in str(
        refusal
    ) or "or your own package.module:Name" in str(refusal)
    (refusal,) = refusals(
        checkpoint, f"{group}=custom", f"{group}.{key}=no_such_package.module:Mine"
    )
    assert str(refusal).startswith(
        f"{group}.{key}=no_such_package.module:Mine: There is no module no_such_package"
    )
    assert "PYTHONPATH" in refusal.remedy
    found = accept(
        checkpoint,
        f"{group}=custom",
        f"{group}.{key}=json.decoder:JSONDecoder",
        f"{group}.options.strict=true",
    )
    assert getattr(found, group).options == {"strict": True}


def test_worked_responses_need_a_source_that_has_them(checkpoint: Path) -> None:
    overrides = ["train.replay=off", "algo=sft"]
    refusal = refusals(checkpoint, *overrides, "data=reasoning_gym", "environment=demonstration")[
        -1
    ]
    assert str(refusal).startswith(
        "environment.name=demonstration: data.source=reasoning_gym has no worked responses"
    )
    own = ("environment=custom", "environment.name=json:JSONDecoder")
    assert accept(checkpoint, *overrides, *own).algo.advantages == "one"


def test_keys_of_another_algorithm_are_refused_in_a_file_too(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "algo").mkdir()
    file = tmp_path / "algo" / "mine.yaml"
    overrides = [f"hydra.searchpath=[file://{tmp_path}]", "algo=mine"]
    file.write_text("name: espo\nalpha: 0.1\n")
    assert accept(checkpoint, *overrides).algo.name == "espo"
    file.write_text("name: espo\nclip_low: 0.1\n")
    (refusal,) = refusals(checkpoint, *overrides)
    assert (
        str(refusal)
        == "algo.clip_low=0.1: There is no such key. It belongs to algo=grpo or algo=gspo."
    )


def test_run_name_taken_and_root_a_file(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").touch()
    assert "exists already" in str(refusals(checkpoint, f"run.root={tmp_path}", "run.name=mine")[0])
    assert "is a file" in str(refusals(checkpoint, f"run.root={tmp_path}/file/deeper")[0])
