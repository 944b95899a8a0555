"""Attack every entry point with malformed input, and report every failure that isn't a clean error message.

    python -m tools.fuzz --minutes 10 --seed 1
    python -m tools.fuzz --seed 1 --case 4711          # run this case again, with its full output

The fuzzer first makes a small world: data, checkpoints, runs and sources for every converter. Each case copies the
files that one command reads, damages one file or one flag, and runs the command's `main` like its script, in a forked
child. It passes if the command succeeds, or exits with code 2 and one line that starts with `error:`, and leaves
nothing half-written. It reports:

    traceback      any other exception or exit code, or an error of several lines
    hang           more than CPU_SECONDS of processor time, or IDLE_SECONDS without any
    memory         more than MAX_BYTES resident beyond this process's memory at the fork
    broken         an undamaged command that fails; these run first and don't count towards --minutes
    half-written   after an error, new files in the output directory, except for a run that had logged steps;
                   in any case, a temporary file

A case depends only on --seed and its number.
"""

import contextlib
import gzip
import io
import json
import os
import random
import resource
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch and huggingface_hub are imported
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import torch
import transformers
from safetensors.torch import load_file

import eval as evaluation
import train_dpo
import train_grpo
import train_ppo
import train_rlcf
import train_rm
import train_sft
from data import (
    best_of,
    chat,
    codenet,
    dialogue,
    gsm8k,
    hh,
    label,
    mxeval,
    programs,
    rank,
    rewardbench,
    self_rank,
    site,
    squad,
    stackoverflow,
    subset,
    sums,
    tiny,
    tldr,
    tokenizer,
    town,
)
from nanorlhf.checkpoint import save
from nanorlhf.cli import PositiveInt, check_ranges, command_line, run_module
from nanorlhf.dataset import iter_jsonl, write_jsonl
from nanorlhf.model import GPT
from nanorlhf.pretrained import gguf
from nanorlhf.report import compare_runs
from nanorlhf.rlcf import train_baselines, train_discriminator
from tests.pretrained import test_gguf

CPU_SECONDS, IDLE_SECONDS, MAX_BYTES = 60, 240, 2 * 2**30
ROOT = Path(__file__).resolve().parent.parent
PAGE = os.sysconf("SC_PAGE_SIZE")


# ------------------------------------------------------------------------------------------------------ 1. the commands
@dataclass(frozen=True)
class Entry:
    main: Callable
    args: Any  # the recipes of a script, or the Args of a module
    command: str  # the flags of a working run; `{root}` is the repository
    reads: str  # the files and directories of the world that it reads

    @property
    def words(self) -> list[str]:
        return [word.replace("{root}", str(ROOT)) for word in shlex.split(self.command)]

    @property
    def flags(self) -> list[str]:
        """The flags that take a value."""
        args = self.args
        if isinstance(args, dict):
            first = self.words[0]
            args = type(args[first][1] if first in args else next(iter(args.values()))[1])
        return [f"--{field.name.replace('_', '-')}" for field in fields(args) if field.type not in (bool, "bool")]

    def run(self) -> None:
        sys.argv = [self.main.__module__, *self.words]
        if isinstance(self.args, dict):
            command_line(self.main, self.args)
        else:
            run_module(self.main, self.args)


SHAPE = "--n-layer 1 --n-head 2 --d-model 16 --device cpu"
LENGTHS = "--max-query-length 600 --max-response-length 300"
SFT = f"tiny --data data --out out/run {SHAPE} {LENGTHS} --batch-size 4 --num-epochs 0.5 --num-samples 1"
RM = f"tiny --data data --sft sft --out out/run --device cpu {LENGTHS} --batch-size 4 --num-epochs 0.5"
PPO = (
    "tiny --data data --sft sft --reward-model rm --out {out} --device cpu --max-query-length 600 --response-length 8 "
    "--total-episodes 8 --batch-size 4 --micro-batch-size 4 --num-ppo-epochs 1 --gold {root}/data/tiny.py:gold_score"
)
CODE = "--data code --sft sft --out out/run --device cpu --max-query-length 600 --response-length 16"
EVAL = "--device cpu --max-query-length 600 --out out/eval --response-length 8 --num-queries 2"
CONVERT = "--out out/data --tokenizer data"


def script(program: Any, command: str, reads: str) -> Entry:
    return Entry(program.main, program.RECIPES, command, reads)


def module(program: Any, command: str, reads: str) -> Entry:
    return Entry(program.main, program.Args, command, reads)


ENTRIES = {
    "train_sft": script(train_sft, f"{SFT} --warmup-steps 0", "data"),
    "train_sft from a model": script(train_sft, f"{SFT} --warmup-steps 0 --model sft", "data sft"),
    "train_sft from pickles": script(train_sft, f"{SFT} --warmup-steps 0 --model bin", "data bin"),
    "train_sft of a Llama": script(
        train_sft, f"{SFT} --warmup-steps 0 --model llama".replace("600", "900"), "data llama"
    ),
    "gguf": module(gguf, "llama.gguf --out out/llama", "llama.gguf"),
    "train_sft of programs": script(
        train_sft,
        f"{SFT.replace('data data', 'data code').replace('0.5', '2')} --rows code --warmup-steps 0 "
        "--max-query-length 600 --max-response-length 300 --tokenizer data",
        "code data",
    ),
    "train_rm": script(train_rm, f"{RM} --warmup-steps 0", "data sft"),
    "train_rm by scores": script(train_rm, f"{RM} --loss regression --warmup-steps 0", "data sft"),
    "train_dpo": script(train_dpo, f"{RM} --warmup-steps 0", "data sft"),
    "train_dpo by labels": script(train_dpo, f"{RM} --warmup-steps 0 --loss kto_unpaired", "data sft"),
    "train_ppo": script(train_ppo, PPO.replace("{out}", "out/run"), "data sft rm"),
    "train_ppo --resume": script(train_ppo, f"{PPO.replace('{out}', 'ppo')} --resume", "data sft rm ppo"),
    "train_grpo": script(
        train_grpo,
        PPO.replace("{out}", "out/run").replace("--num-ppo-epochs 1", "--num-epochs 1 --samples-per-query 2"),
        "data sft rm",
    ),
    "train_rlcf": script(
        train_rlcf,
        f"rlcf-tiny {CODE} --total-episodes 4 --batch-size 4 --micro-batch-size 4 --discriminator disc",
        "code sft disc",
    ),
    "train_discriminator": script(
        train_discriminator,
        f"rlcf-tiny {CODE} {SHAPE} --max-response-length 300 --batch-size 4 --triplet-batch-size 4 --warmup-steps 0 "
        "--num-triplet-epochs 1 --num-pair-epochs 0 --sft sft",
        "code sft",
    ),
    "train_baselines": script(
        train_baselines,
        f"bipolar_ramp-tiny {CODE} --total-episodes 4 --batch-size 4 --micro-batch-size 4",
        "code sft",
    ),
    "eval tiny": script(
        evaluation,
        f"tiny --data data --policies sft sft ppo ppo --reward-model rm {EVAL} --judge-file verdicts.jsonl "
        "--max-response-length 300 --gold {root}/data/tiny.py:gold_score",
        "data sft ppo rm verdicts.jsonl",
    ),
    "eval tiny-rm": script(
        evaluation,
        "tiny-rm --data data --reward-models rm rm dpo sft --ref-policy sft --device cpu --out out/eval "
        f"--gold {{root}}/data/tiny.py:gold_score {LENGTHS}",
        "data sft rm",
    ),
    "eval rewards": script(
        evaluation,
        f"rewards --data bench --reward-models rm rm dpo sft --ref-policy sft --device cpu --out out/eval {LENGTHS}",
        "bench sft rm",
    ),
    "eval stackoverflow": script(
        evaluation,
        f"stackoverflow-tiny --data data --policies sft sft ppo ppo --regression-model rm {EVAL} "
        "--contrastive-model None "
        "--num-samples 2 --num-resamples 20 --encoder encoder --max-response-length 300 --gold None --useful-from None",
        "data sft ppo rm encoder",
    ),
    "eval rlcf": script(
        evaluation,
        f"rlcf-tiny --data code --policies sft sft ppo ppo {EVAL} --num-samples 1 --ks 1 --temperatures 0.6 "
        "--workers 1 --num-resamples 20 --curves ppo --num-queries 1",
        "code sft ppo",
    ),
    "eval str": script(
        evaluation,
        f"str-tiny --data data --policies sft sft ppo ppo --reward-model rm --rankings rankings.jsonl {EVAL} "
        "--gold None --self-rank ranked/self_rank.train.jsonl --encoder encoder --num-resamples 20 "
        "--max-response-length 300",
        "data sft ppo rm encoder rankings.jsonl ranked",
    ),
    "eval sums": script(
        evaluation,
        f"sums --data sums/long --policies sft sft ppo ppo {EVAL} --num-samples 4 "
        "--rewards {root}/data/sums.py:solved --max-response-length 300",
        "sums sft ppo",
    ),
    "compare_runs": module(
        compare_runs,
        "--runs ppo ppo rm rm sft sft --evals evaluated --out out/compared",
        "ppo rm sft evaluated",
    ),
    "tldr": module(tldr, f"--source tldr.jsonl {CONVERT}", "tldr.jsonl data"),
    "tldr .gz": module(tldr, f"--source tldr.jsonl.gz {CONVERT}", "tldr.jsonl.gz data"),
    "tldr array": module(tldr, f"--source tldr.json {CONVERT}", "tldr.json data"),
    "tldr parquet": module(tldr, f"--source tldr.parquet {CONVERT}", "tldr.parquet data"),
    "hh": module(hh, f"--source hh.jsonl.gz {CONVERT} --max-query-length 60", "hh.jsonl.gz data"),
    "rewardbench": module(rewardbench, f"--source styles.json {CONVERT}", "styles.json data"),
    "rewardbench by chat": module(
        rewardbench, "--source best_of_4.jsonl --out out/data --tokenizer chatty", "best_of_4.jsonl chatty"
    ),
    "chat": module(
        chat,
        "--source chats.jsonl --out out/data --tokenizer chatty --turns all --max-query-length 90",
        "chats.jsonl chatty",
    ),
    "chat in pairs": module(
        chat,
        "--source pairs.parquet --out out/data --tokenizer data --template chatty/chat_template.jinja",
        "pairs.parquet data chatty",
    ),
    "dialogue": module(dialogue, f"--source dialogues_text.txt {CONVERT} --history 600", "dialogues_text.txt data"),
    "dialogue of Cornell": module(dialogue, "--source cornell --out out/data --vocab-size 300", "cornell"),
    "gsm8k": module(gsm8k, "--source gsm8k/train.jsonl --out out/data --shots 2", "gsm8k"),
    "squad": module(squad, f"--source squad.json {CONVERT}", "squad.json data"),
    "stackoverflow": module(
        stackoverflow,
        f"--source site/Posts.xml {CONVERT} --question-filter all --generated-by sft --max-length 100 --device cpu",
        "site data sft",
    ),
    "stackoverflow .csv": module(
        stackoverflow, f"--source Posts.csv {CONVERT} --question-filter all", "Posts.csv data"
    ),
    "codenet": module(codenet, f"--source sources --language python {CONVERT} --validation-share 0.5", "sources data"),
    "codenet in Java": module(codenet, f"--source java --language java {CONVERT}", "java data"),
    "mxeval": module(mxeval, "--source mbjp.jsonl --out out/data --test-share 0.5", "mbjp.jsonl"),
    "programs": module(programs, "--out out/programs --language python --num-problems 2 --num-bench 1 1 1", ""),
    "tiny": module(
        tiny,
        "--out out/data --num-demonstrations 8 --num-comparisons 8 --num-validation 4 --vocab-size 300",
        "",
    ),
    "site": module(site, "--out out/site --num-questions 10", ""),
    "town": module(town, "--out out/town --num-train 4 --num-validation 2", ""),
    "sums": module(
        sums,
        "--out out/sums --num-demonstrations 8 --num-queries 8 --num-comparisons 8 --num-validation 4",
        "",
    ),
    "subset": module(subset, "--data data --out out/data --half first --num-validation 2", "data"),
    "tokenizer": module(tokenizer, "--data data/sft.train.jsonl --vocab-size 320 --out out/data", "data"),
    "chat by a Llama": module(
        chat,
        "--source chats.jsonl --out out/data --tokenizer llama --turns all --template chatty/chat_template.jinja",
        "chats.jsonl llama chatty",
    ),
    "label": module(label, "--samples samples.jsonl --out labels.jsonl", "samples.jsonl labels.jsonl"),
    "rank": module(
        rank,
        "--source questions.jsonl --out out/r.jsonl --annotator ana --simulate rule.py:score",
        "questions.jsonl rule.py",
    ),
    "rank again": module(
        rank, "--source questions.jsonl --out rankings.jsonl --annotator ana", "questions.jsonl rankings.jsonl"
    ),
    "self_rank": module(
        self_rank,
        "--policy sft --encoder encoder --data data --out out/data --num-queries 2 --num-samples 8 --device cpu "
        "--response-length 24",
        "data sft encoder",
    ),
    "best_of": module(
        best_of,
        "--policy sft --reward-model rm --data data --out out/data --num-queries 2 --num-samples 2 --device cpu "
        "--response-length 24",
        "data sft rm",
    ),
}


# --------------------------------------------------------------------------------------------------------- 2. the world
def make_world() -> None:
    """Write everything that the commands read to the working directory."""
    make_models()
    make_sources()
    again("eval tiny", "out/eval", "evaluated")


def make_models() -> None:
    """Write the inputs of the commands that train, sample and evaluate."""
    tiny.main(tiny.Args(out=Path("data"), num_demonstrations=12, num_comparisons=12, num_validation=4, vocab_size=320))
    for split in ("train", "validation"):
        rows = [row for _, row in iter_jsonl(f"data/sft.{split}.jsonl")]
        scored = [{"query": row["query"], "response": row["response"], "score": 0.5} for row in rows]
        write_jsonl(f"data/scored.{split}.jsonl", scored)
        labelled = [
            {"query": row["query"], "response": row["response"], "label": i % 2 == 0} for i, row in enumerate(rows)
        ]
        write_jsonl(f"data/unpaired.{split}.jsonl", labelled)
    again("train_sft", "out/run", "sft", "--num-epochs 30 --lr 3e-3")  # until it writes mostly letters
    again("train_rm", "out/run", "rm")
    again("train_ppo", "out/run", "ppo")
    Path("ppo", "summary.json").unlink()  # so that it can be resumed
    shutil.copytree("sft", "bin", ignore=shutil.ignore_patterns("*.safetensors", "state", "best", "events*"))
    write_shards(Path("sft/model.safetensors"), Path("bin"))
    write_encoder(Path("encoder"))
    write_gguf(Path("llama.gguf"))
    gguf.convert(Path("llama.gguf"), Path("llama"))

    programs.main(programs.Args(out=Path("made"), language="python", num_problems=4, num_bench=(4, 2, 2)))
    os.rename("made/bench", "code")
    again("train_discriminator", "out/run", "disc")
    write_benchmarks()
    site.main(site.Args(out=Path("site"), num_questions=12))
    sums.main(sums.Args(out=Path("sums"), num_demonstrations=8, num_queries=8, num_comparisons=8, num_validation=4))
    questions = [
        {"query": f"q{i}", "answers": ["a", "b", "c", "d", "e"], "weights": [5, 4, 3, 2, 1.0]} for i in range(4)
    ]
    write_jsonl("questions.jsonl", questions)
    Path("rule.py").write_text("def score(query, answer):\n    return len(answer)\n")
    again("rank", "out/r.jsonl", "rankings.jsonl")
    again("self_rank", "out/data", "ranked")
    write_jsonl("verdicts.jsonl", [{"query": "q", "ours": "a", "theirs": "b", "preferred": "ours"}])


def make_sources() -> None:
    """Write the inputs of the converters."""
    os.rename("made/sources", "sources")
    Path("sources/metadata").mkdir()
    Path("sources/metadata/p00001.csv").write_text("submission_id,status\ns1,Accepted\ns2,Wrong Answer\n")
    programs.main(programs.Args(out=Path("made2"), language="java", num_problems=2, num_bench=(1, 1, 1)))
    os.rename("made2/sources", "java")
    write_tldr()
    turns = "".join(f"\n\nHuman: question {i}\n\nAssistant: answer {i}" for i in range(9))
    rows = [{"chosen": turns + f" yes {i}", "rejected": turns + f" no {i}"} for i in range(4)]
    Path("hh.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    write_chats()
    Path("dialogues_text.txt").write_text("Hi . __eou__ How are you ? __eou__ Fine , thanks . __eou__\n" * 8)
    Path("cornell").mkdir()
    lines = [f"L{i} +++$+++ u0 +++$+++ m0 +++$+++ BIANCA +++$+++ Line number {i}.\n" for i in range(12)]
    Path("cornell/movie_lines.txt").write_text("".join(lines))
    talks = [f"u0 +++$+++ u2 +++$+++ m0 +++$+++ ['L{i}', 'L{i + 1}', 'L{i + 2}']\n" for i in range(0, 12, 3)]
    Path("cornell/movie_conversations.txt").write_text("".join(talks))
    question = {
        "id": "1",
        "question": "Where?",
        "answers": [{"answer_start": 3, "text": "Rome"}],
        "is_impossible": False,
    }
    paragraphs = [{"context": "In Rome. In Paris.", "qas": [question]}]
    articles = [{"title": f"Rome {i}", "paragraphs": paragraphs} for i in range(6)]
    Path("squad.json").write_text(json.dumps({"version": "v2.0", "data": articles}))
    write_jsonl(
        "gsm8k/train.jsonl", [{"question": f"{i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(6)]
    )
    posts = [row for _, row in stackoverflow.read_posts(Path("site/Posts.xml"))]
    write_csv(Path("Posts.csv"), posts)
    problem = {
        "task_id": "MBJP/1", "language": "java", "prompt": "class A {\n  static int f() {\n", "entry_point": "f",
        "test": "class Main {}", "canonical_solution": "    return 1;\n  }\n}",
    }  # fmt: skip
    write_jsonl("mbjp.jsonl", [problem | {"task_id": f"MBJP/{i}"} for i in range(6)])

    answers = {"sft": [{"response": "one"}, {"response": "two"}]}
    write_jsonl("samples.jsonl", [{"query": f"q{i}", "policies": answers} for i in range(3)])
    about = {"query": "q0", "policy": "sft", "index": 0, "response": "one", "useful": True}
    write_jsonl("labels.jsonl", [about])


def write_benchmarks() -> None:
    """Write RM-Bench and RewardBench 2 with its ties, and convert the former."""
    styles = {side: [f"{side} {style}" for style in ("short", "long", "marked")] for side in ("chosen", "rejected")}
    about = ({"id": domain, "prompt": f"a question of {domain}", "domain": domain} for domain in ("chat", "code"))
    Path("styles.json").write_text(json.dumps([row | styles for row in about]))
    answers = {"prompt": "what is it?", "chosen": ["a cat"], "rejected": ["a mat", "no", "yes"], "subset": "Math"}
    ties = [answers | {"id": f"{kind}:1", "subset": "Ties", "chosen": ["a cat", "my cat"]} for kind in ("ref", "tied")]
    write_jsonl("best_of_4.jsonl", [answers | {"id": "0"}, *ties])
    again("rewardbench", "out/data", "bench")


def again(entry: str, made: str, name: str, flags: str = "") -> None:
    """Run a command with extra flags and rename its output."""
    with contextlib.suppress(SystemExit):
        replace(ENTRIES[entry], command=f"{ENTRIES[entry].command} {flags}").run()
    os.rename(made, name)


def write_shards(weights: Path, directory: Path) -> None:
    """Write the same weights as two pickles and an index."""
    tensors = load_file(weights)
    names = sorted(tensors)
    halves = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for file, half in halves.items():
        torch.save({name: tensors[name] for name in half}, directory / file)
    index = {name: file for file, half in halves.items() for name in half}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def write_gguf(path: Path) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        save(GPT(replace(test_gguf.CONFIGS["llama"], n_ctx=1500)), directory)
        settings = json.loads(Path(directory, "config.json").read_text())
        test_gguf.write(path, "llama", load_file(f"{directory}/model.safetensors"), settings)


def write_encoder(directory: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(i) for i in range(33, 127)), "##a", "the"]
    directory.mkdir()
    (directory / "vocab.txt").write_text("\n".join(words))
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(directory)
    transformers.BertTokenizerFast(vocab=str(directory / "vocab.txt"), model_max_length=64).save_pretrained(directory)
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
               for i, (path, kind) in enumerate((("", "Transformer"), ("1_Pooling", "Pooling")))]  # fmt: skip
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling/config.json").write_text(
        json.dumps({"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True})
    )
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32}))


def write_tldr() -> None:
    """Write comparisons in the published format: as JSON Lines, .gz, a JSON array, and parquet."""
    import pyarrow
    import pyarrow.parquet

    info = {"id": "t3", "subreddit": "x", "title": "A title", "post": "A post. It has two sentences.", "article": None}
    summaries = [{"text": f" summary {i}", "policy": f"sup{i}", "note": None} for i in range(2)]
    about = {"choice": 0, "worker": "w", "batch": "batch3", "split": "train", "extra": {"confidence": 8}}
    rows = [{"info": info | {"id": f"t{i}"}, "summaries": summaries, **about} for i in range(6)]
    write_jsonl("tldr.jsonl", rows)
    Path("tldr.jsonl.gz").write_bytes(gzip.compress(Path("tldr.jsonl").read_bytes()))
    Path("tldr.json").write_text(json.dumps(rows, indent=1))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "tldr.parquet")


def write_chats() -> None:
    """Write demonstrations, pairs in parquet, and a tokenizer with a chat template file."""
    import pyarrow
    import pyarrow.parquet

    shutil.copytree("data", "chatty", ignore=shutil.ignore_patterns("*.jsonl", ".tokens"))
    Path("chatty/chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] | trim + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i}"} for i in range(6)]
    rows = [{"messages": [{"role": "system", "content": f"number {i}"}, *turns]} for i in range(6)]
    write_jsonl("chats.jsonl", rows)
    pairs = [{"chosen": [*turns[:i], turns[1]], "rejected": [*turns[:i], turns[3]]} for i in (1, 3, 5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), "pairs.parquet")


def write_csv(path: Path, rows: list[dict]) -> None:
    import csv

    names = [*stackoverflow.NEEDED, *stackoverflow.OPTIONAL]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


# ----------------------------------------------------------------------------------------------------- 3. the attacks
HUGE = "9" * 5000
VALUES: tuple[tuple[str, Any], ...] = (  # replacements for a JSON value; `raw:` ones are inserted unquoted
    ("nested 100,000 deep", "raw:" + "[" * 100_000 + "]" * 100_000),
    ("nested 500 deep", "raw:" + '{"a":' * 500 + "1" + "}" * 500),
    ("an integer of 5,000 digits", f"raw:{HUGE}"),
    ("an integer of 400 digits", f"raw:{HUGE[:400]}"),
    ("2^62", 2**62),
    ("a billion", 10**9),
    ("a million", 10**6),
    ("-1", -1),
    ("0", 0),
    ("1e308", 1e308),
    ("0.5", 0.5),
    ("1e999", "raw:1e999"),
    ("NaN", "raw:NaN"),
    ("-Infinity", "raw:-Infinity"),
    ("null", None),
    ("true", True),
    ("an empty text", ""),
    ("a blank", " \n"),
    ("half a surrogate pair", 'raw:"\\ud800"'),
    ("NUL", "\0"),
    ("mathematics", "$\\bad$"),
    ("markup", "<b>&<script>"),
    ("a path", "../../../etc/passwd"),
    ("a format", "{0} %s {x}"),
    ("a text of a million letters", "a" * 10**6),
    ("a text of a million words", "a b\n" * 250_000),
    ("a text of two million", "x y " * 500_000),
    ("control characters", "\x1a\x1b[2J\u0007\u202e"),
    ("an empty list", []),
    ("an empty object", {}),
    ("a list of texts", ["a", "b"]),
    ("a list of all", [1, None, "a", {}]),
    ("100,000 empty lists", [[]] * 100_000),
    ("an object", {"a": 1}),
)


def json_paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the paths to all values in parsed JSON, at most 40 per level."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for count, (key, child) in enumerate(inner):
        if count < 40:
            yield from json_paths(child, (*path, key))


def with_value(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_value(value[path[0]], path[1:], new)
    return copy


def attack_json(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Change a value, or drop, repeat or rename a key, in JSON or in one line of JSON Lines."""
    lines = data.split(b"\n")
    try:
        number, value = -1, json.loads(data)
    except ValueError:
        number = rng.randrange(max(1, len(lines) - 1))
        value = json.loads(lines[number])
    path = rng.choice(list(json_paths(value)))
    how = rng.choice(("value", "value", "value", "value", "delete", "repeat"))
    if how == "value" or not path:
        what, new = rng.choice(VALUES)
        marker = "\ue000here\ue000"
        is_raw = isinstance(new, str) and new.startswith("raw:")
        text = json.dumps(with_value(value, path, marker if is_raw else new))
        if is_raw:
            text = text.replace(json.dumps(marker), new.removeprefix("raw:"))
    else:
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        what, last = how, path[-1]
        if how == "delete":
            del parent[last]
        elif isinstance(parent, list):
            parent.extend([parent[last]] * 3000)
        else:
            parent[str(last) + "2"] = parent.pop(last)
        text = json.dumps(value)
    name = "/".join(map(str, path))
    if number < 0:
        return f"{name} becomes {what}", text.encode()
    lines[number] = text.encode()
    return f"line {number + 1}: {name} becomes {what}", b"\n".join(lines)


def attack_bytes(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Change bytes of any file."""
    at = rng.randrange(len(data) + 1)
    attacks: dict[str, Callable[[], bytes]] = {
        "cut": lambda: data[:at],
        "cut before its last byte": lambda: data[:-1],
        "empty": lambda: b"",
        "a byte flipped": lambda: data[:at] + bytes([data[at : at + 1][0] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
        "a byte flipped near the start": lambda: flip(data, rng.randrange(min(len(data), 400)), rng),
        "a byte flipped near the end": lambda: flip(data, -rng.randrange(1, min(len(data), 1000)), rng),
        "random bytes inserted": lambda: data[:at] + rng.randbytes(rng.choice((1, 4, 100))) + data[at:],
        "a line of 20 MB inserted": lambda: data[:at] + b"a" * 20_000_000 + data[at:],
        "a line of words, 20 MB, inserted": lambda: data[:at] + b"a = 1; " * 3_000_000 + data[at:],
        "200,000 lines inserted": lambda: data[:at] + b"\n" * 200_000 + data[at:],
        "a million brackets inserted": lambda: data[:at] + rng.choice((b"[", b"{", b"(", b"<b>")) * 10**6 + data[at:],
        "another number near the start": lambda: with_number(data, rng.randrange(min(len(data), 4000)), rng),
        "NULs inserted": lambda: data[:at] + b"\0" * 50 + data[at:],
        "in Latin-1": lambda: data[:at] + b"\xe4\xf6\xfc" + data[at:],
        "in UTF-16": lambda: data.decode("latin-1").encode("utf-16"),
        "with CRLF": lambda: data.replace(b"\n", b"\r\n"),
        "repeated": lambda: data * 3,
        "another kind of file": lambda: rng.choice((b"PK\3\4" + data, b"\x80\x04.", b"\x1f\x8b\x08" + data, b"PAR1")),
        "lines shuffled": lambda: b"\n".join(rng.sample(lines := data.split(b"\n"), len(lines))),
    }  # fmt: skip
    what = rng.choice(list(attacks))
    try:
        return what, attacks[what]()
    except (IndexError, ValueError):  # of an empty file
        return "empty", b""


def flip(data: bytes, at: int, rng: random.Random) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def with_number(data: bytes, at: int, rng: random.Random) -> bytes:
    """Overwrite 8 bytes with a number, to damage lengths, counts and offsets in a binary header."""
    return data[:at] + rng.choice((0, 1, 2**31, 2**40, 2**62, 2**64 - 1)).to_bytes(8, "little") + data[at + 8 :]


def attack_kind(path: Path, rng: random.Random) -> str:
    """Replace a file by something that isn't a regular file."""
    kinds = ("a pipe", "a socket", "a directory", "missing", "a device", "a link in a circle", "a link to nothing")
    what = rng.choice(kinds)
    path.unlink()
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a socket":
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif what == "a directory":
        path.mkdir()
    elif what == "a device":
        path.symlink_to("/dev/zero")
    elif what == "a link in a circle":
        path.symlink_to(path.name)
    elif what == "a link to nothing":
        path.symlink_to("nothing")
    return what


def attack_format(path: Path, data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Damage a file in a way specific to its format."""
    name = path.name
    if name.endswith(".gz"):
        unpacked = gzip.decompress(data)
        row = unpacked.split(b"\n")[0] + b"\n"
        bombs = {
            "a bomb of one line": lambda: gzip.compress(b"a" * 2**28, 1),
            "a bomb of rows": lambda: gzip.compress(row, 9) + gzip.compress(row * (2**27 // len(row)), 1) * 8,
            "a bomb of blank lines": lambda: gzip.compress(b"\n" * 2**26, 1) * 20,
            "another member, cut": lambda: data + data[:-9],
            "an attack inside": lambda: gzip.compress(attack_json(unpacked, rng)[1]),
        }
        what = rng.choice(list(bombs))
        return what, bombs[what]()
    if name.endswith(".bin"):
        with zipfile.ZipFile(io.BytesIO(data)) as members, io.BytesIO() as out:
            with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
                for member in members.namelist():
                    content = members.read(member)
                    if member.endswith("data.pkl") and rng.random() < 0.7:
                        content = flip(content, rng.randrange(len(content)), rng)
                    packed.writestr(member, content, rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
            return "a flip in the pickle, or compressed", out.getvalue()
    if name.endswith(".xml"):
        xml = {
            "nested elements": data.replace(b"<row", b"<x>" * 500_000 + b"<row", 1),
            "an attribute of 30 MB": data.replace(b'Body="', b'Body="' + b"a" * 30_000_000, 1),
            "a body of a million tags": data.replace(b'Body="', b'Body="' + b"&lt;b&gt;" * 100_000, 1),
            "a body of a million blanks": data.replace(b'Body="', b'Body="' + b" " * 900_000 + b"x", 1),
            "a billion laughs": b'<!DOCTYPE l [<!ENTITY a "' + b"ha" * 999 + b'">' + b"".join(
                f'<!ENTITY {b} "{f"&{a};" * 20}">'.encode() for a, b in zip("abcdef", "bcdefg", strict=True)
            ) + b"]><posts><row Id='1' PostTypeId='1' Body='&g;'/></posts>",
            "an unknown encoding": data.replace(b"utf-8", b"utf-99"),
            "a strange number": data.replace(b' Score="', b' Score="' + rng.choice((b"1e9", b"999999999999", b"-")), 3),
            "a strange date": data.replace(b'Date="', b'Date="' + rng.choice((b"9999-12-31", b"0", b"+1")), 3),
        }  # fmt: skip
        what = rng.choice(list(xml))
        return what, xml[what]
    if name.endswith((".py", ".java")):
        nests = {
            "a line of 10 MB": data + b"x = 1; " * 1_400_000,
            "a line of 100 KB": data + b"x = 1; " * 14_000,
            "10,000 brackets": data + b"(" * 10_000 + b")" * 10_000,
            "10,000 blocks": data + b"{" * 10_000 + b"}" * 10_000,
            "an expression of 20,000 terms": data + b"x = 1" + b" + 1" * 20_000 + b";",
            "a surrogate": data + b"\xed\xa0\x80",
        }
        what = rng.choice(list(nests))
        return what, nests[what]
    if name.endswith(".txt"):
        texts = {
            "100,000 turns": b"a __eou__ " * 100_000 + b"\n",
            "900 turns": b"how are you ? __eou__ " * 900 + b"\n",
            "a nested list": data.replace(b"['", b"[" * 100_000 + b"['"),
            "a list of 100,000": data.replace(b"['", b"['L1', " * 1 + b"'L1', " * 100_000 + b"'", 1),
            "a call": data.replace(b"['", b"__import__('os').system('true') + ['", 1),
        }
        what = rng.choice(list(texts))
        return what, texts[what]
    if name.endswith("index.json"):
        index = json.loads(data)
        key = rng.choice(list(index["weight_map"]))
        outside = ("../sft/model.safetensors", "/etc/passwd", "", ".", "..", "a\0b", "x" * 5000, "pytorch_model-2.bin")
        index["weight_map"][key] = rng.choice(outside)
        return f"{key} is in {index['weight_map'][key]!r:.40}", json.dumps(index).encode()
    if name.endswith((".json", ".jsonl")):
        return attack_json(data, rng)
    return attack_bytes(data, rng)


BAD_NUMBERS = ("-1", "0", "1e308", "-1e308", "nan", "inf", str(10**13), str(10**30), HUGE, "1e-308", "0.5", "True")
BAD_TEXTS = (
    "",
    " ",
    "x" * 300,
    "x" * 5000,
    "$\\bad$",
    "\udcff",
    "a/../../b",
    "/dev/zero",
    "/dev/stdin",
    "/proc/self/mem",
    "None",
    "data",
    "missing",
    "a\nb",
    "--",
    "rule.py:score",
    "/dev/null/x",
    "😀" * 100,
)
WRITTEN = ("--out", "--judge-cache")
SIZES = ("--n-layer", "--d-model", "--n-head", "--max-query-length", "--max-response-length", "--response-length")


def bad_texts(flag: str) -> tuple[str, ...]:
    """Return bad values for a flag. Output flags get no absolute paths: a bug must not overwrite /dev/zero."""
    return BAD_TEXTS if flag not in WRITTEN else tuple(text for text in BAD_TEXTS if not text.startswith("/"))


def attack_flag(entry: Entry, rng: random.Random) -> tuple[str, Entry]:
    """Replace a word of the command, or add a flag with a bad value."""
    words = entry.words
    if rng.random() < 0.35 and len(words) > 2:  # replace an existing word
        at = rng.randrange(1, len(words))
        value = rng.choice((*bad_texts(words[at - 1]), *BAD_NUMBERS))
        changed = f"{words[at]} becomes {value!r:.60}"
        words[at] = value
    else:
        flag = rng.choice(entry.flags)
        big = ("100000000", "1000000000000", "100000") if flag in SIZES else ()
        value = rng.choice((*BAD_NUMBERS, *bad_texts(flag), *big * 5))
        changed = f"{flag} {value!r:.60}"
        words += [flag, value]
    return changed, replace(entry, command=shlex.join(words))


def attack(entry: Entry, rng: random.Random) -> tuple[str, Entry]:
    """Damage one of the entry's input files in the working directory, or one of its flags."""
    files = [
        path
        for name in entry.reads.split()
        for path in sorted([Path(name)] if Path(name).is_file() else Path(name).rglob("*"))
        if path.is_file() and "tfevents" not in path.name
    ]
    if not files or rng.random() < 0.2:
        return attack_flag(entry, rng)
    # a single file is as likely as a whole directory
    name = rng.choice(entry.reads.split())
    path = rng.choice([path for path in files if path.parts[0] == name] or files)
    if rng.random() < 0.1:
        return f"{path} is {attack_kind(path, rng)}", entry
    data, choice = path.read_bytes(), rng.random()
    what, changed = attack_bytes(data, rng) if choice < 0.3 else attack_format(path, data, rng)
    path.write_bytes(changed)
    return f"{path}: {what}", entry


# ------------------------------------------------------------------------------------------------------- 4. the cases
@dataclass(frozen=True)
class Outcome:
    kind: str  # fine, refused, or the kind of failure
    name: str
    change: str
    output: str
    seconds: float
    peak: int  # resident bytes beyond those at the fork


def contents(directory: Path) -> set[str]:
    """List everything in a directory except token caches, which are rebuilt if they are invalid."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if ".tokens" not in path.parts}


def run_case(number: int, seed: int, world: Path) -> Outcome:
    """Run a case in a new directory; a negative number runs an undamaged command."""
    rng = random.Random(f"{seed}:{number}")
    name = rng.choice(list(ENTRIES)) if number >= 0 else list(ENTRIES)[-number - 1]
    entry = ENTRIES[name]
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=world.parent) as scratch:
        case, log = Path(scratch, "case"), Path(scratch, "log")
        case.mkdir()
        log.touch()
        for read in entry.reads.split():
            source = world / read
            shutil.copytree(source, case / read) if source.is_dir() else shutil.copy(source, case / read)
        os.chdir(case)
        change, entry = attack(entry, rng) if number >= 0 else ("nothing", entry)
        before = contents(case)
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            in_child(entry, log)
        status, peak, stopped = wait_for(child)
        seconds = time.monotonic() - began
        os.chdir("/")
        output, new = log.read_text(errors="replace"), contents(case) - before
        code = os.waitstatus_to_exitcode(status)
        last = (output.strip().splitlines() or [""])[-1]
        left = sorted(path for path in new if any(mark in path for mark in (".tmp", ".partial")))
        logged = any(path.endswith("metrics.jsonl") for path in new)  # an interrupted run may be resumed
        if stopped or code in (-signal.SIGXCPU, -signal.SIGKILL):
            kind = stopped or "hang"
        elif code not in (0, 2) or "Traceback" in output or (code == 2 and not last.startswith("error: ")):
            kind = "traceback"
        elif left or (code == 2 and new and not logged):
            kind, output = "half-written", f"{output}\nleft: {left or sorted(new)}"
        else:
            kind = "fine" if code == 0 else "refused" if number >= 0 else "broken"
        return Outcome(kind, name, change, output, seconds, peak)


def in_child(entry: Entry, log: Path) -> None:
    """Run the command with its output in a file. Never returns."""
    code = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        out = os.open(log, os.O_WRONLY | os.O_CREAT)
        null = os.open("/dev/null", os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(n, "w", closefd=False), write_through=True) for n in (1, 2)
        )
        sys.stderr.reconfigure(errors="backslashreplace")
        sys.stdin = io.TextIOWrapper(io.FileIO(0))
        entry.run()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def resident(process: int | str) -> int:
    """Return resident bytes without mapped files, because a fork maps those again when it reads them."""
    _, total, mapped, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    return (total - mapped) * PAGE


def wait_for(child: int) -> tuple[int, int, str]:
    """Return the exit status, the peak growth of resident memory in bytes, and why it was stopped ("" if it wasn't)."""
    peak, stopped, busy, worked = 0, "", [""], time.monotonic()
    inherited = resident("self")
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        with contextlib.suppress(OSError, IndexError):
            peak = max(peak, resident(child) - inherited)
            if busy != (busy := Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split(maxsplit=13)[11:13]):
                worked = time.monotonic()  # its processor time has increased
        if peak > MAX_BYTES or time.monotonic() - worked > IDLE_SECONDS:
            stopped = "memory" if peak > MAX_BYTES else "hang"
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(0.03)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # its children
        os.killpg(child, signal.SIGKILL)
    return status, peak, stopped


@dataclass(frozen=True, kw_only=True)
class Args:
    minutes: float = 10.0
    """duration, minutes"""
    seed: PositiveInt = 1
    """seed of all cases"""
    case: int | None = None
    """run only this case and print its output"""
    first: int = 0
    """number of the first case"""
    world: Path | None = None
    """directory of the undamaged files, made if it doesn't exist and kept; None: a temporary one"""
    undamaged: bool = True
    """first run each command undamaged; doesn't count towards --minutes"""


def main(args: Args) -> None:
    check_ranges(args)
    with tempfile.TemporaryDirectory(prefix="nanorlhf-fuzz-") as top:
        world = (args.world or Path(top, "world")).resolve()
        if not world.exists():
            world.mkdir()
            child = os.fork()
            if child == 0:
                os.chdir(world)
                in_world(Path(top, "log"))
            if os.waitpid(child, 0)[1]:
                shutil.rmtree(world)
                sys.exit("making the world failed: " + Path(top, "log").read_text()[-3000:])
            for extra in ("out", "made", "made2"):
                shutil.rmtree(world / extra, ignore_errors=True)
        counts: Counter[str] = Counter()
        largest = slowest = 0.0
        number, end = args.case, None
        if number is None:
            number = -len(ENTRIES) if args.undamaged else 0
        while end is None or time.monotonic() < end:
            if number == 0 and args.case is None:
                number, end = args.first, time.monotonic() + 60 * args.minutes
            outcome = run_case(number, args.seed, world)
            counts[outcome.kind] += 1
            largest, slowest = max(largest, outcome.peak), max(slowest, outcome.seconds)
            if outcome.kind not in ("fine", "refused") or args.case is not None:
                shown = outcome.output if args.case is not None else "\n".join(outcome.output.strip().splitlines()[-4:])
                cost = f"{outcome.seconds:.0f} s, {outcome.peak / 2**30:.2f} GB"
                print(f"{number}: {outcome.kind} in {outcome.name} ({cost}): {outcome.change}")
                print("    " + shown.replace("\n", "\n    "), flush=True)
            if args.case is not None:
                break
            number += 1
        print(
            f"{counts.total()} cases of seed {args.seed}: "
            + ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
        )
        print(f"largest {largest / 2**30:.2f} GB, slowest {slowest:.0f} s")
    sys.exit(any(kind not in ("fine", "refused") for kind in counts))


def in_world(log_file: Path) -> None:
    """Make the world in this process, with its output in a log file. Never returns."""
    code = 1
    with log_file.open("w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            make_world()
            code = 0
        except BaseException:
            traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_module(main, Args)
