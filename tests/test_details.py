"""docs/details.md is true: every tag has a row, every row a tag at its line and a living test; so is the glossary."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import eval as evaluation
import train_ppo
import train_rm
import train_sft
from nanorlhf import model
from nanorlhf.padding import right_pad
from nanorlhf.report.page import details_section
from nanorlhf.reward import load_rule
from nanorlhf.rlcf import train_discriminator
from nanorlhf.tokenizer import train_tokenizer
from tests.conftest import read_metrics
from tools.update_details import DETAILS, ROOT, ROW, read_sources, tagged_lines, tags_of, with_true_lines

PAGE = DETAILS.read_text()
ROWS = list(ROW.finditer(PAGE))
TAGGED = tagged_lines(read_sources())
N_PLUS = [f"N+ {number}" for number in range(1, 26)]


def test_every_detail_has_one_row_in_numerical_order() -> None:
    tags = [row["tag"] for row in ROWS]
    assert len(tags) == len(set(tags)) and [tag for tag in tags if tag.startswith("N+")] == N_PLUS
    assert len(ROWS) == len(re.findall(r"^\| (?:N\+|SO|RLCF|STR) ", PAGE, re.M)), "a row of another form"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["tag"])
def test_a_row_points_at_its_tag_and_at_a_test_that_exists(row) -> None:
    assert (row["link"], row["link_line"]) == (row["file"], row["line"])
    places = TAGGED.get(row["tag"], {})
    assert int(row["line"]) in places.get(row["file"], []), (
        f"docs/details.md: {row['tag']} stands at {places}, not at {row['file']}:{row['line']}: "
        "run `python -m tools.update_details`"
    )
    for test_file, test in re.findall(r"`(\S+)::(\w+)`", row["tests"]):
        assert re.search(rf"^def {test}\(", (ROOT / test_file).read_text(), re.M), (
            f"docs/details.md: {row['tag']}: {test_file} has no {test}"
        )


def test_every_tag_of_the_code_has_a_row() -> None:
    assert set(TAGGED) == {row["tag"] for row in ROWS}


def test_the_report_shows_the_index(tmp_path) -> None:
    section = details_section(tmp_path / "report.html")
    assert section.count("<li>") == 25 and f"{train_ppo.__name__}.py:" in section


# ------------------------------------------------------------------------------------- python -m tools.update_details
CODE = {"a.py": "x\n# [N+ 1]\ny\n# [N+ 1, 2]\n", "b.py": "# [SO alg 1]\n"}


def page_of(tag: str, file: str, line: int) -> str:
    return f"| {tag} | a claim | [`{file}:{line}`](../{file}#L{line}) | `tests/test_ppo.py::test_x` |\n"


@pytest.mark.parametrize(
    ("tag", "file", "line", "true"),
    [
        ("N+ 1", "a.py", 1, "a.py:2"),
        ("N+ 1", "a.py", 2, "a.py:2"),
        ("N+ 1", "a.py", 900, "a.py:4"),  # the nearest of two
        ("N+ 2", "a.py", 1, "a.py:4"),
        ("SO alg 1", "a.py", 7, "b.py:1"),  # moved to another file
    ],
)
def test_a_row_moves_to_the_nearest_line_with_its_tag(tag, file, line, true) -> None:
    page, problems = with_true_lines("above\n" + page_of(tag, file, line) + "below\n", tagged_lines(CODE))
    assert page == "above\n" + page_of(tag, *true.split(":")) + "below\n" and not problems


def test_a_tag_that_is_gone_or_in_several_files_is_named_and_its_row_stays() -> None:
    for tag, sources in (("N+ 3", CODE), ("N+ 1", {"b.py": "# [N+ 1]", "c.py": "# [N+ 1]"})):
        page, [problem] = with_true_lines(page_of(tag, "a.py", 2), tagged_lines(sources))
        assert page == page_of(tag, "a.py", 2) and tag in problem


def test_the_command_puts_the_page_right(tmp_path) -> None:
    for package in ("nanorlhf", "data"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("*.py"), ROOT / "tools" / "update_details.py", DETAILS):
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(file, copy)
    page = tmp_path / "docs" / "details.md"
    row = next(row for row in ROWS if len(TAGGED[row["tag"]][row["file"]]) == 1)  # the nearest line is the only one
    page.write_text(
        PAGE.replace(row[0], row[0].replace(f":{row['line']}`", ":9999`").replace(f"#L{row['line']}", "#L9999"))
    )
    assert page.read_text() != PAGE
    subprocess.run([sys.executable, "-m", "tools.update_details"], cwd=tmp_path, check=True)
    assert page.read_text() == PAGE


def test_one_line_may_carry_several_tags() -> None:
    assert tags_of("x = 1  # [N+ 24, 25] and [RLCF alg 1]") == {"N+ 24", "N+ 25", "RLCF alg 1"}


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
            {
                "warmup_steps": 3 * (1804 + 6872) // 8 // 100,
                "lr": 3e-5,
                "schedule": "linear",
                "batch_size": 8,
                "weight_decay": 1e-3,
                "trainable": "linear",
            },
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
            train_discriminator.RECIPES["rlcf"][1],
            {"num_triplet_epochs": 5, "triplet_lr": 1e-5, "triplet_margin": 0.5, "warmup_steps": 1000},
        ),
        (
            train_discriminator.RECIPES["rlcf"][1],
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


class Made(Exception):
    """Ends a run where its optimizer is made, or takes its first step."""


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo"])
def test_every_stage_trains_by_adamw_with_the_papers_eps(miniature, tmp_path, monkeypatch, stage) -> None:
    """eps 1e-5 where nothing else is said, and in the paper's recipe; PyTorch's own is 1e-8. [N+ 9, 10, 20]"""
    script = {"sft": train_sft, "rm": train_rm, "ppo": train_ppo}[stage]
    made = []

    def note(*_, **settings):
        made.append(settings)
        raise Made

    monkeypatch.setattr(torch.optim, "AdamW", note)
    args = replace(getattr(miniature, stage), out=tmp_path / "out")
    for settings in ({}, {"adam_eps": 3e-4}):
        with pytest.raises(Made):
            script.main(replace(args, **settings))
    assert [settings["eps"] for settings in made] == [1e-5, 3e-4]
    assert script.RECIPES["tldr"][1].adam_eps == 1e-5


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo"])
def test_bf16_is_the_dtype_of_products_and_of_no_weight(miniature, tmp_path, monkeypatch, stage) -> None:
    """Autocast: products in bfloat16; weights and gradients of the first step stay float32. [N+ 8]"""
    script = {"sft": train_sft, "rm": train_rm, "ppo": train_ppo}[stage]
    products, plain, stepped = set(), model.linear, []

    def noted(x, *others):
        y = plain(x, *others)
        products.add(y.dtype)
        return y

    def step(optimizer):
        stepped.extend(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        raise Made

    monkeypatch.setattr(model, "linear", noted)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    args = replace(getattr(miniature, stage), out=tmp_path / "out")
    for dtype in ("float32", "bfloat16"):
        products.clear()
        stepped.clear()
        with pytest.raises(Made):
            script.main(replace(args, dtype=dtype, out=tmp_path / dtype))
        assert products == {getattr(torch, dtype)}
        assert stepped and {p.dtype for p in stepped} == {p.grad.dtype for p in stepped} == {torch.float32}
    assert script.RECIPES["tldr"][1].dtype == "bfloat16"


# ----------------------------------------------------------------------------------------------- the README's rule
def test_the_readmes_rule_scores_texts(tmp_path) -> None:
    rule = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    (tmp_path / "my_rule.py").write_text(rule)
    tokenizer = train_tokenizer(["what i saw", "a long story"], 300)
    score = load_rule(f"{tmp_path / 'my_rule.py'}:score", tokenizer)
    responses = right_pad([tokenizer.encode(text) for text in (" what i saw", " a long long story")], tokenizer.pad_id)
    assert score(responses, responses).tolist() == pytest.approx([1 - 3 / 20, -4 / 20])


def test_the_glossary_explains_every_metric_that_ppo_logs(miniature) -> None:
    train_ppo.main(replace(miniature.ppo, out=miniature.root / "ppo_metrics"))
    glossary = (ROOT / "docs" / "metrics.md").read_text()
    logged = read_metrics(miniature.root / "ppo_metrics")[0].keys() - {"step"}
    assert logged <= set(re.findall(r"`([\w/]+)`", glossary))
