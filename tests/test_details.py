"""The README's details index is true: every tag has a row, every row a tag at its line and a living test."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import eval as evaluation
import train_ppo
import train_rm
import train_sft
from nanorlhf.padding import right_pad
from nanorlhf.reward import load_rule
from nanorlhf.tokenizer import train_tokenizer
from tests.conftest import read_metrics

ROOT = Path(__file__).resolve().parent.parent
DETAILS = {f"N+ {number}" for number in range(1, 26)}
ROW = re.compile(
    r"^\| ((?:N\+|SO|RLCF|STR) [^|]+) \| .+ \| \[`(\S+):(\d+)`\]\((\S+)#L(\d+)\) \| `(tests/[\w/]+\.py)::(\w+)` \|$",
    re.M,
)
ROWS = ROW.findall((ROOT / "README.md").read_text())


def tags_of(line: str) -> set[str]:
    """What a line is tagged with: `[N+ 24, 25]` are two details."""
    return {
        f"{paper} {part.strip()}"
        for paper, tag in re.findall(r"\[(N\+|SO|RLCF|STR) ([^\]]+)\]", line)
        for part in tag.split(",")
    }


def test_every_detail_has_one_row() -> None:
    tags = [row[0] for row in ROWS]
    assert len(tags) == len(set(tags)) and {tag for tag in tags if tag.startswith("N+")} == DETAILS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_points_at_its_tag_and_at_a_test_that_exists(row) -> None:
    detail, file, line, link, link_line, test_file, test = row
    assert (link, link_line) == (file, line)
    text = (ROOT / file).read_text().splitlines()
    tagged = [number for number, content in enumerate(text, start=1) if detail in tags_of(content)]
    assert int(line) in tagged, f"README: {detail} stands at {file}:{tagged}, not at {line}"
    assert re.search(rf"^def {test}\(", (ROOT / test_file).read_text(), re.M), f"{test_file} has no {test}"


def test_every_tag_of_the_code_has_a_row() -> None:
    files = [*ROOT.glob("*.py"), *(ROOT / "nanorlhf").rglob("*.py"), *(ROOT / "data").glob("*.py")]
    tags = set().union(*(tags_of(line) for file in files for line in file.read_text().splitlines()))
    assert tags == {row[0] for row in ROWS}


# --------------------------------------------------------------------------------- the papers' tables, typed once more
@pytest.mark.parametrize(
    ("recipe", "table"),
    [
        # N+ Tables 3, 4 and 7, sections 4.1 to 4.5
        (
            train_sft.RECIPES["tldr"][1],
            {"num_epochs": 1, "batch_size": 128, "lr": 3e-6, "schedule": "cosine", "warmup_steps": 0},
        ),
        (train_sft.RECIPES["tldr"][1], {"max_query_length": 512, "max_response_length": 53}),
        (
            train_rm.RECIPES["tldr"][1],
            {"num_epochs": 1, "batch_size": 64, "lr": 3e-6, "schedule": "cosine", "warmup_steps": 0},
        ),
        (train_rm.RECIPES["tldr"][1], {"max_query_length": 512, "max_response_length": 169}),
        (train_rm.RECIPES["tldr"][1], {"dpo_beta": 0.05}),  # N+ Table 6, the rest is the reward model's
        (
            train_ppo.RECIPES["tldr"][1],
            {"total_episodes": 1_000_000, "batch_size": 512, "lr": 3e-6, "schedule": "linear", "temperature": 0.7},
        ),
        (
            train_ppo.RECIPES["tldr"][1],
            {"num_minibatches": 1, "num_ppo_epochs": 4, "clip_range": 0.2, "value_clip_range": 0.2, "value_coef": 0.1},
        ),
        (train_ppo.RECIPES["tldr"][1], {"kl_coef": 0.05, "gamma": 1.0, "lam": 0.95, "response_length": 53}),
        (
            train_ppo.RECIPES["tldr"][1],
            {"missing_eos_score": -1.0, "whiten_rewards": False, "whiten_advantages": True, "score_at": "after_eos"},
        ),
        # SO, section 4 and the table of hyper-parameters
        (
            train_sft.RECIPES["stackoverflow"][1],
            {"lr": 2e-5, "schedule": "linear", "batch_size": 12, "weight_decay": 1e-3, "adam_eps": 1e-8},
        ),
        (train_sft.RECIPES["stackoverflow"][1], {"max_grad_norm": 1.0, "decay_vectors": False, "loss_on": "response"}),
        (
            train_rm.RECIPES["stackoverflow"][1],
            {"lr": 3e-5, "schedule": "linear", "batch_size": 8, "weight_decay": 1e-3, "trainable": "linear"},
        ),
        (
            train_ppo.RECIPES["stackoverflow"][1],
            {"lr": 1.41e-5, "schedule": "constant", "batch_size": 64, "num_minibatches": 4, "num_ppo_epochs": 4},
        ),
        (
            train_ppo.RECIPES["stackoverflow"][1],
            {"adam_betas": (0.9, 0.95), "adam_eps": 1e-8, "weight_decay": 0.0, "clip_range": 0.2, "value_coef": 0.1},
        ),
        (
            train_ppo.RECIPES["stackoverflow"][1],
            {"kl_coef": 0.2, "kl_target": 6.0, "score_at": "last_token", "whiten_rewards": False, "temperature": 1.0},
        ),
        (train_ppo.RECIPES["stackoverflow"][1], {"gamma": 1.0, "lam": 0.95, "response_length": 256}),
        (
            evaluation.RECIPES["stackoverflow"][1],
            {"num_samples": 10, "top_k": 50, "top_p": 0.9, "no_repeat_ngram_size": 2, "ranks": "within"},
        ),
        # RLCF, appendix: bootstrapping, discriminator, PPO, fine-tuning, evaluation
        (
            train_sft.RECIPES["rlcf"][1],
            {"num_epochs": 5, "lr": 5e-5, "batch_size": 128, "max_query_length": 500, "max_response_length": 384},
        ),
        (
            train_sft.RECIPES["rlcf-bench"][1],
            {"num_epochs": 20, "lr": 5e-5, "batch_size": 64, "warmup_steps": 200, "max_response_length": 256},
        ),
        (
            train_rm.RECIPES["rlcf"][1],
            {"num_triplet_epochs": 5, "triplet_lr": 1e-5, "triplet_margin": 0.5, "warmup_steps": 1000},
        ),
        (
            train_rm.RECIPES["rlcf"][1],
            {"num_pair_epochs": 5, "lr": 1e-5, "batch_size": 32, "temperature": 0.6, "top_p": 0.95},
        ),
        (
            train_ppo.RECIPES["rlcf"][1],
            {"total_episodes": 150_000, "batch_size": 8, "lr": 1e-6, "schedule": "linear", "adam_betas": (0.9, 0.99)},
        ),
        (
            train_ppo.RECIPES["rlcf"][1],
            {"adam_eps": 1e-8, "clip_range": 0.2, "gamma": 0.99, "lam": 0.95, "kl_coef": 0.1, "temperature": 1.0},
        ),
        (
            train_ppo.RECIPES["rlcf"][1],
            {"discriminator_lr": 5e-7, "score_at": "last_token", "missing_eos_score": None, "value_clip_range": None},
        ),
        (
            evaluation.RECIPES["rlcf"][1],
            {"num_samples": 100, "ks": (1, 10, 100), "temperatures": (0.2, 0.6, 0.8), "top_p": 0.95},
        ),
        # STR, section 4
        (
            train_ppo.RECIPES["str"][1],
            {"kl_coef": 0.5, "lr": 3e-5, "batch_size": 16, "temperature": 0.8, "gamma": 1.0, "lam": 0.95},
        ),
        (
            evaluation.RECIPES["str"][1],
            {"temperature": 0.8, "top_p": 0.95},
        ),
    ],
)
def test_the_recipe_holds_the_papers_table(recipe, table) -> None:
    assert {name: getattr(recipe, name) for name in table} == table


# ----------------------------------------------------------------------------------------------- the README's rule
def test_the_readmes_rule_scores_texts(tmp_path) -> None:
    rule = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    (tmp_path / "my_rule.py").write_text(rule)
    tokenizer = train_tokenizer(["what i saw", "a long story"], 300)
    score = load_rule(f"{tmp_path / 'my_rule.py'}:score", tokenizer)
    responses = right_pad([tokenizer.encode(text) for text in (" what i saw", " a long long story")], tokenizer.pad_id)
    assert score(responses, responses).tolist() == pytest.approx([1 - 3 / 20, -4 / 20])


def test_the_readme_explains_every_metric_that_ppo_logs(miniature) -> None:
    train_ppo.main(replace(miniature.ppo, out=miniature.root / "ppo_metrics"))
    glossary = re.search(r"## Metrics\n(.*?)\n## ", (ROOT / "README.md").read_text(), re.S)[1]
    logged = read_metrics(miniature.root / "ppo_metrics")[0].keys() - {"step"}
    assert logged <= set(re.findall(r"`([\w/]+)`", glossary))
