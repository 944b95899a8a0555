"""docs/details.md matches the code: every tag has a row, every row a tag in its file and a test; and so does the
glossary.
"""

import dataclasses
import re
from dataclasses import replace
from importlib import import_module
from operator import attrgetter

import pytest
import torch

import train_dpo
import train_grpo
import train_ppo
import train_rlcf
import train_rm
import train_sft
from nanorlhf import checkpoint, layers
from nanorlhf.evals import benchmarks, checked, reward_models, summaries
from nanorlhf.recipes import PAGES
from nanorlhf.report.details_index import INDEX, ROOT, ROW, line_of, tags_of
from nanorlhf.report.summary_report import details_section
from nanorlhf.rewards.function import load_function
from nanorlhf.rlcf import evaluate_programs as programs
from nanorlhf.rlcf import train_baselines, train_discriminator
from nanorlhf.selfrank import evaluate_replies as replies
from nanorlhf.stackoverflow import evaluate_answers as answers
from nanorlhf.training.settings import AdamSettings
from tests.conftest import read_metrics

PAGE = INDEX.read_text()
ROWS = list(ROW.finditer(PAGE))
N_PLUS = [f"N+ {number}" for number in range(1, 26)]


def test_every_detail_has_one_row_in_numerical_order() -> None:
    tags = [row["tag"] for row in ROWS]
    assert len(tags) == len(set(tags)) and [tag for tag in tags if tag.startswith("N+")] == N_PLUS
    assert len(ROWS) == len(re.findall(r"^\| (?:N\+|SO|RLCF|STR) ", PAGE, re.M)), "a row of another form"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["tag"])
def test_a_row_names_a_file_with_its_tag_and_a_test_that_exists(row) -> None:
    assert row["link"] == row["file"]
    assert line_of(row["tag"], (ROOT / row["file"]).read_text()), f"{row['file']} has no [{row['tag']}]"
    for test_file, test in re.findall(r"`(\S+)::(\w+)`", row["tests"]):
        assert re.search(rf"^def {test}\(", (ROOT / test_file).read_text(), re.M), (
            f"docs/details.md: {row['tag']}: {test_file} has no {test}"
        )


def test_the_errata_name_tests_that_exist() -> None:
    named = re.findall(r"`(tests/\S+)::(\w+)`", (ROOT / "docs/errata.md").read_text())
    assert len(named) > 15
    for test_file, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / test_file).read_text(), re.M), f"{test_file} has no {test}"


def test_every_finding_has_a_verdict_and_a_command_or_a_link() -> None:
    page = (ROOT / "docs/findings.md").read_text()
    verdicts = [name for line in re.findall(r"^- (\*.+?):", page, re.M) for name in line.split(", ")]
    rows = [line.strip("| ").split(" | ") for line in re.findall(r"^\| .+", page, re.M)]
    rows = [cells for cells in rows if cells[0] != "finding"]
    assert len(verdicts) == 7 and len(rows) > 30
    for finding, verdict, ours, command, why in rows:
        assert verdict in verdicts, finding
        assert re.search(r"`.+`|\]\(.+\)", command) and why.endswith("."), finding
        assert "one seed" in ours or "at one seed" not in verdict, finding
        assert verdict not in ("*reproduced*", "*contradicted*", "*mixed*") or re.search(r"seed|worlds", ours), finding


def test_the_twenty_tests_to_read_first_are_rows_of_the_index() -> None:
    named = re.findall(r"^\| ([^|]+?) \| [^|]+ \| `(\S+)` \|$", (ROOT / "tests/README.md").read_text(), re.M)
    tests = {row["tag"]: row["tests"] for row in ROWS}
    assert len(named) == 20 and all(f"`{test}`" in tests[tag] for tag, test in named)


def test_every_tag_of_the_code_has_a_row() -> None:
    files = [*ROOT.glob("train_*.py"), ROOT / "eval.py"]
    files += [file for room in ("nanorlhf", "data") for file in (ROOT / room).rglob("*.py")]
    files.remove(ROOT / "nanorlhf" / "report" / "details_index.py")  # its docstrings show tags
    tags = {tag for file in files for line in file.read_text().splitlines() for tag in tags_of(line)}
    assert tags == {row["tag"] for row in ROWS}


def test_the_report_shows_the_index(tmp_path) -> None:
    section = details_section(tmp_path / "report.html")
    assert section.count("<li>") == 25 and f"{train_ppo.__name__}.py:" in section


# -------------------------------------------------------------------------------- the papers' tables, typed separately
STAGES = {
    "sft": train_sft.Args, "rm": train_rm.Args, "dpo": train_dpo.Args, "ppo": train_ppo.Args,
    "grpo": train_grpo.Args, "rlcf": train_rlcf.Args, "discriminator": train_discriminator.Args,
    "baselines": train_baselines.Args, "summaries": summaries.Args, "reward_models": reward_models.Args,
    "reward_benchmark": benchmarks.Args,
    "answers": answers.Args, "programs": programs.Args, "replies": replies.Args, "checked": checked.Args,
}  # fmt: skip
PAPERS = {page: import_module(f"nanorlhf.recipes.{page}").RECIPES for page in PAGES}
RECIPES = {name: recipe for recipes in PAPERS.values() for name, recipe in recipes.items()}
TABLES = [(name, stage) for name, recipe in RECIPES.items() for stage in recipe if stage != "help"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_recipes_is_listed_with_its_stages(page) -> None:
    assert {*PAGES[page], "help"} == {name for recipe in PAPERS[page].values() for name in recipe}


@pytest.mark.parametrize(("recipe", "stage"), TABLES)
def test_a_recipe_states_only_what_differs_from_the_defaults(recipe, stage) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(STAGES[stage])}
    repeated = {name: value for name, value in RECIPES[recipe][stage].items() if value == defaults[name]}
    assert not repeated


N_PLUS_ADAMW = {"lr": 3e-6, "adam.eps": 1e-5, "dtype": "bfloat16"}
N_PLUS_LENGTHS = {"max_query_length": 512, "max_response_length": 169}


@pytest.mark.parametrize(
    ("recipe", "stage", "table"),
    [
        # N+ Tables 3, 4, 6 and 7, sections 4.1 to 4.5
        ("tldr", "sft", N_PLUS_ADAMW | {"num_epochs": 1, "batch_size": 128, "schedule": "cosine", "warmup_steps": 0}),
        ("tldr", "sft", {"model": "EleutherAI/pythia-1b-deduped", "max_query_length": 512, "max_response_length": 53}),
        ("tldr", "rm", N_PLUS_ADAMW | {"num_epochs": 1, "batch_size": 64, "schedule": "cosine", "warmup_steps": 0}),
        ("tldr", "rm", N_PLUS_LENGTHS),
        ("tldr", "dpo", N_PLUS_ADAMW | {"num_epochs": 1, "batch_size": 64, "schedule": "cosine", "warmup_steps": 0}),
        ("tldr", "dpo", N_PLUS_LENGTHS | {"beta": 0.05, "loss": "sigmoid", "labels.smoothing": 0.0}),
        ("tldr", "ppo", N_PLUS_ADAMW | {"total_episodes": 1_000_000, "batch_size": 512, "schedule": "linear"}),
        ("tldr", "ppo", {"num_minibatches": 1, "num_ppo_epochs": 4, "clip_range": 0.2, "value_clip_range": 0.2}),
        ("tldr", "ppo", {"value_coef": 0.1, "kl_coef": 0.05, "kl_target": None, "gamma": 1.0, "lam": 0.95}),
        ("tldr", "ppo", {"temperature": 0.7, "max_query_length": 512, "response_length": 53}),
        ("tldr", "ppo", {"missing_eos_score": -1.0, "score_at": "after_eos"}),
        ("tldr", "ppo", {"whiten_rewards": False, "whiten_advantages": True}),
        ("tldr", "summaries", {"temperature": 0.01, "kl_temperature": 0.7, "response_length": 53}),
        # SO, section 4 and the table of hyper-parameters
        ("stackoverflow", "sft", {"lr": 2e-5, "schedule": "linear", "batch_size": 12, "adam.weight_decay": 1e-3}),
        ("stackoverflow", "sft", {"adam.eps": 1e-8, "max_grad_norm": 1.0, "decay_vectors": False}),
        ("stackoverflow", "sft", {"loss_on": "response"}),
        ("stackoverflow", "rm", {"lr": 3e-5, "schedule": "linear", "batch_size": 8, "adam.weight_decay": 1e-3}),
        ("stackoverflow", "rm", {"warmup_steps": 3 * (1804 + 6872) // 8 // 100, "trainable": "linear"}),
        ("stackoverflow", "ppo", {"lr": 1.41e-5, "schedule": "constant", "batch_size": 64, "num_minibatches": 4}),
        ("stackoverflow", "ppo", {"num_ppo_epochs": 4, "adam.betas": (0.9, 0.95), "adam.eps": 1e-8}),
        ("stackoverflow", "ppo", {"adam.weight_decay": 0.0, "clip_range": 0.2, "value_coef": 0.1, "kl_coef": 0.2}),
        ("stackoverflow", "ppo", {"kl_target": 6.0, "score_at": "last_token", "whiten_rewards": False}),
        ("stackoverflow", "ppo", {"temperature": 1.0, "gamma": 1.0, "lam": 0.95, "response_length": 256}),
        ("stackoverflow", "answers", {"num_samples": 10, "temperature": 1.0, "top_k": 50, "top_p": 0.9}),
        ("stackoverflow", "answers", {"no_repeat_ngram_size": 2, "ranks": "within"}),
        # RLCF, appendix: bootstrapping, discriminator, PPO, fine-tuning, evaluation
        ("rlcf", "sft", {"num_epochs": 5, "lr": 5e-5, "batch_size": 128}),
        ("rlcf", "sft", {"max_query_length": 500, "max_response_length": 384}),
        ("rlcf-bench", "sft", {"num_epochs": 20, "lr": 5e-5, "batch_size": 64, "warmup_steps": 200}),
        ("rlcf-bench", "sft", {"max_response_length": 256}),
        ("rlcf", "discriminator", {"num_triplet_epochs": 5, "triplet_lr": 1e-5, "triplet_margin": 0.5}),
        ("rlcf", "discriminator", {"warmup_steps": 1000, "num_pair_epochs": 5, "lr": 1e-5, "batch_size": 32}),
        ("rlcf", "discriminator", {"temperature": 0.6, "top_p": 0.95}),
        ("rlcf", "rlcf", {"total_episodes": 150_000, "batch_size": 8, "lr": 1e-6, "schedule": "linear"}),
        ("rlcf", "rlcf", {"adam.betas": (0.9, 0.99), "adam.eps": 1e-8, "clip_range": 0.2, "gamma": 0.99}),
        ("rlcf", "rlcf", {"lam": 0.95, "kl_coef": 0.1, "kl_target": 6.0, "temperature": 1.0, "value_coef": 1.0}),
        ("rlcf", "rlcf", {"value_clip_range": None, "discriminator_lr": 5e-7, "compiler": True, "localise": True}),
        ("rlcf", "rlcf", {"max_query_length": 500, "response_length": 384}),
        ("rlcf-codet5", "sft", {"model": "Salesforce/codet5-large", "batch_size": 32 * 8}),
        ("rlcf-codet5", "rlcf", {"total_episodes": 150_000, "batch_size": 8, "lr": 1e-6, "kl_coef": 0.1}),
        (
            "rlcf-gpt2-xl",
            "sft",
            {"model": "openai-community/gpt2-xl", "num_epochs": 5, "batch_size": 4 * 8, "lr": 5e-5},
        ),
        ("rlcf-gpt2-xl", "rlcf", {"value_model": "runs/gpt2_xl/critic", "batch_size": 8, "lr": 1e-6, "kl_coef": 0.1}),
        ("rlcf-gpt2-xl", "programs", {"num_samples": 100, "ks": (1, 10, 100), "response_length": 256}),
        ("bipolar_ramp", "baselines", {"objective": "bipolar_ramp", "localise": True, "lr": 1e-6, "batch_size": 8}),
        ("coderl", "baselines", {"objective": "coderl", "localise": False, "lr": 1e-6, "batch_size": 8}),
        ("rlcf", "programs", {"num_samples": 100, "ks": (1, 10, 100), "temperatures": (0.2, 0.6, 0.8), "top_p": 0.95}),
        # STR, section 4
        ("str", "ppo", {"kl_coef": 0.5, "lr": 3e-5, "batch_size": 16, "temperature": 0.8, "gamma": 1.0, "lam": 0.95}),
        ("str", "replies", {"temperature": 0.8, "top_p": 0.95}),
    ],
)
def test_defaults_and_recipe_add_up_to_the_papers_table(recipe, stage, table) -> None:
    args = STAGES[stage](**RECIPES[recipe][stage])
    assert {name: attrgetter(name)(args) for name in table} == table


class Made(Exception):
    """Raised to end a run when its optimizer is created or takes its first step."""


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo"])
def test_every_stage_trains_by_adamw_with_the_papers_eps(miniature, tmp_path, monkeypatch, stage) -> None:
    """eps is 1e-5 by default and in the paper's recipe; PyTorch's default is 1e-8. [N+ 9, 10, 20]"""
    script = {"sft": train_sft, "rm": train_rm, "ppo": train_ppo}[stage]
    made = []

    def note(*_, **settings):
        made.append(settings)
        raise Made

    monkeypatch.setattr(torch.optim, "AdamW", note)
    args = replace(getattr(miniature, stage), out=tmp_path / "out")
    for settings in ({}, {"adam": AdamSettings(eps=3e-4)}):
        with pytest.raises(Made):
            script.main(replace(args, **settings))
    assert [settings["eps"] for settings in made] == [1e-5, 3e-4]
    assert script.RECIPES["tldr"][1].adam.eps == 1e-5


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo"])
def test_bf16_is_the_dtype_of_matmuls_and_of_no_weight(miniature, tmp_path, monkeypatch, stage) -> None:
    """Autocast runs matmuls in bfloat16; weights and gradients of the first step stay float32. [N+ 8]"""
    script = {"sft": train_sft, "rm": train_rm, "ppo": train_ppo}[stage]
    matmul_dtypes, plain, stepped = set(), layers.linear, []

    def noted(x, *rest):
        y = plain(x, *rest)
        matmul_dtypes.add(y.dtype)
        return y

    def step(optimizer):
        stepped.extend(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        raise Made

    monkeypatch.setattr(checkpoint, "check_output", lambda *_: None)  # it runs a new model in the dtype of its weights
    monkeypatch.setattr(layers, "linear", noted)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    args = replace(getattr(miniature, stage), out=tmp_path / "out")
    for dtype in ("float32", "bfloat16"):
        matmul_dtypes.clear()
        stepped.clear()
        with pytest.raises(Made):
            script.main(replace(args, dtype=dtype, out=tmp_path / dtype))
        assert matmul_dtypes == {getattr(torch, dtype)}
        assert stepped and {p.dtype for p in stepped} == {p.grad.dtype for p in stepped} == {torch.float32}
    assert script.RECIPES["tldr"][1].dtype == "bfloat16"


# ----------------------------------------------------------------------------------------------- the README's rule
def test_the_readmes_rule_scores_texts(tmp_path) -> None:
    rule = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    (tmp_path / "my_rule.py").write_text(rule)
    score = load_function("--reward", f"{tmp_path / 'my_rule.py'}:score")
    responses = [" my boss in Paris", " a long long story"]
    assert score(responses, responses, ["Paris", "Oslo"]) == pytest.approx([1 - 4 / 20, -4 / 20])


def test_the_glossary_explains_every_metric_that_ppo_logs(miniature) -> None:
    train_ppo.main(replace(miniature.ppo, out=miniature.root / "ppo_metrics"))
    glossary = (ROOT / "docs" / "metrics.md").read_text()
    logged = read_metrics(miniature.root / "ppo_metrics")[0].keys() - {"step"}
    assert logged <= set(re.findall(r"`([\w/]+)`", glossary))
