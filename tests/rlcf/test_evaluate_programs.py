"""Evaluation that compiles and runs programs: responses whose verdicts are known, and numbers typed by hand."""

import json
import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from matplotlib.colors import to_hex
from safetensors.torch import load_file

import eval as evaluation
from data import mxeval
from nanorlhf.checkpoint import save
from nanorlhf.config import GPTConfig
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.model import GPT, Transformer
from nanorlhf.padding import right_pad
from nanorlhf.report.page import text
from nanorlhf.rlcf import evaluate_programs as programs
from nanorlhf.rlcf import join_evaluations, program_report
from nanorlhf.rlcf.discriminator import Discriminator, load_discriminator, save_discriminator
from nanorlhf.rlcf.error_profile import CATEGORIES
from nanorlhf.rlcf.figures import at_k_figures, error_figure, problem_figures, temperature_figures, training_figures
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from tests.data.test_mxeval import PROBLEM, PYTHON
from tests.helpers.jsonl import read_jsonl

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs run on Linux only")
needs_jdk = pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK on this machine")

# what becomes of a response -> the response; {n} is the right answer
RESPONSES = {
    "python": {
        "right": "    return {n}\n",
        "wrong": "    return 1\n",
        "crash": "    return n // 0\n",
        "endless": "    while True:\n        pass\n",
        "syntax": "    return {n} *\n",
        "undefined": "    return m\n",
        "unused": "    m = n\n    return {n}\n",
    },
    "java": {
        "right": "        return {n};\n    }\n",
        "wrong": "        return 1;\n    }\n",
        "crash": "        return n / 0;\n    }\n",
        "endless": "        while (true) { }\n    }\n",
        "syntax": "        return {n} * ;\n    }\n",
        "undefined": "        return m;\n    }\n",
        "unused": "        int m = n;\n        return {n};\n    }\n",
    },
}
# (layers of the policy, temperature) -> the four responses to the square, and the four to twice a number
SCRIPT = {
    (1, 0.2): ("wrong crash undefined endless", "syntax syntax wrong wrong"),
    (1, 0.8): ("wrong crash undefined endless", "syntax syntax wrong wrong"),
    (2, 0.2): ("right right right right", "syntax syntax syntax syntax"),
    (2, 0.8): ("right wrong crash unused", "right right crash syntax"),
}


def problem(language: str, name: str, right: str) -> dict:
    """A problem; the square has a written program, twice a number doesn't."""
    written = RESPONSES[language]["right"].replace("{n}", right) if name == "square" else ""
    if language == "python":
        comment, prefix, suffix = f"# {name} a number\n", f"def {name}(n):\n", "\nready = True\n"
        tests = "\nassert ready\n" + "".join(f"n = {n}\nassert {name}(n) == {right}\n" for n in (3, 5))
    else:
        comment, suffix = f"/** {name} a number */\n", "}\n"
        prefix = f"class Solution {{\n    static int {name}(int n) {{\n"
        wrong = 'throw new java.lang.Exception("Exception -- test case 0 did not pass.");'
        loop = f"for (int n = 3; n < 6; n += 2) if (Solution.{name}(n) != {right}) {wrong}"
        tests = f"\nclass Main {{ public static void main(String[] args) throws Exception {{\n{loop}\n}} }}\n"
    return {
        "query": comment + prefix, "response": written, "language": language, "prefix": prefix,
        "suffix": suffix, "tests": tests, "meta": {"task_id": f"test/{name}"},
    }  # fmt: skip


@dataclass(frozen=True)
class World:
    root: Path
    args: programs.Args
    result: dict
    samples: list[dict]
    calls: list[tuple]


def scripted(language: str, calls: list[tuple]):
    """Replaces sample_answers: returns SCRIPT's responses instead of a random policy's."""

    def sample_answers(policy, queries, tokenizer, num_samples, max_new_tokens, batch_size, seed, temperature, top_p):
        calls.append((policy.config.n_layer, num_samples, max_new_tokens, seed, temperature, top_p))
        rows = []
        for right, names in zip(("n * n", "n + n"), SCRIPT[policy.config.n_layer, temperature], strict=True):
            texts = [RESPONSES[language][name].replace("{n}", right) for name in names.split()[:num_samples]]
            rows += [tokenizer.encode(text) + [tokenizer.eos_id] for text in texts]
        response = right_pad(rows, tokenizer.pad_id)
        return None, F.pad(response, (0, max_new_tokens - response.size(1)), value=tokenizer.pad_id)

    return sample_answers


def evaluate(language: str, root: Path) -> World:
    rows = [problem(language, "square", "n * n"), problem(language, "twice", "n + n")]
    write_jsonl(root / "code.test.jsonl", rows)
    tokenizer = train_tokenizer([row["query"] for row in rows], 280)
    for name, n_layer in (("sft", 1), ("ppo", 2)):
        torch.manual_seed(n_layer)
        config = GPTConfig(
            vocab_size=280, n_ctx=256, d_model=16, n_layer=n_layer, n_head=2, d_mlp=32, rotary_dim=4,
            positions="rotary_half",
        )  # fmt: skip
        save(GPT(config), root / name, tokenizer)
    shape = GPTConfig(vocab_size=280, n_ctx=128, d_model=16, n_layer=1, n_head=2, d_mlp=32, rotary_dim=4, causal=False)
    discriminator = Discriminator(Transformer(shape), tokenizer, 128)
    with torch.no_grad():
        for parameter in discriminator.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    save_discriminator(discriminator, root / "discriminator")
    args = replace(
        evaluation.RECIPES["rlcf-tiny"][1],
        data=root, out=root / "eval", discriminator=str(root / "discriminator"),
        policies=("sft", str(root / "sft"), "rlcf", str(root / "ppo")), curves=(),
        device="cpu", num_samples=4, ks=(1, 2, 4), temperatures=(0.2, 0.8), timeout=3.0, num_resamples=200,
        response_length=80, batch_size=3,
    )  # fmt: skip
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "sample_answers", scripted(language, calls))
        result = evaluation.main(args)
    return World(root, args, result, read_jsonl(args.out / "samples.jsonl", {}), calls)


@pytest.fixture(scope="module")
def python_world(tmp_path_factory) -> World:
    return evaluate("python", tmp_path_factory.mktemp("python"))


@pytest.fixture(scope="module")
def java_world(tmp_path_factory) -> World:
    return evaluate("java", tmp_path_factory.mktemp("java"))


@pytest.fixture(params=["python", pytest.param("java", marks=needs_jdk)])
def world(request) -> World:
    return request.getfixturevalue(f"{request.param}_world")


# ---------------------------------------------------------------------------------------------------- 1. the numbers
@pytest.mark.slow
def test_each_response_has_the_verdict_that_was_built_into_it(world):
    compiled_alike = "compile_error" if world.result["language"] == "java" else "exception"
    reasons = {
        "right": "passed", "unused": "passed", "wrong": "wrong_answer", "crash": "exception", "endless": "timeout",
        "syntax": "compile_error", "undefined": compiled_alike,
    }  # fmt: skip
    names = [name for script in SCRIPT.values() for problem in script for name in problem.split()]
    assert [row["reason"] for row in world.samples] == [reasons[name] for name in names]
    for row in world.samples:
        assert row["compiled"] == (row["reason"] != "compile_error")
        assert row["executed"] == (row["reason"] in ("passed", "wrong_answer"))
        assert row["passed"] == (row["reason"] == "passed")


def test_an_evaluation_states_its_problems_and_sizes_so_that_others_can_be_joined(world):
    tokenizer = load_tokenizer(world.root / "sft")
    rows = programs.load_problems(world.args, tokenizer)
    assert world.result["problems"] == programs.digest(rows) != programs.digest(rows[:1])
    other_tests = [replace(row, record=row.record | {"tests": "\nassert True\n"}) for row in rows]
    assert programs.digest(other_tests) != programs.digest(rows)
    path = world.args.out / "eval.json"
    head, _, rlcf = join_evaluations.main(join_evaluations.Args(evals=(path,)))
    assert head[2:-1] == [f"{success}@{k}" for success in ("pass", "exec", "comp") for k in (1, 2, 4)]
    assert rlcf[0] == f"{path.parent}: rlcf" and rlcf[2] == "50.00 [0.00, 100.00]"
    for name, directory in (("sft", "sft"), ("rlcf", "ppo")):
        weights = load_file(world.root / directory / "model.safetensors")
        assert world.result["policies"][name]["parameters"] == sum(tensor.numel() for tensor in weights.values())


def test_samples_come_by_policy_temperature_and_problem(world):
    groups = [(row["policy"], row["temperature"], row["task"]) for row in world.samples[::4]]
    tasks = "test/square", "test/twice"
    assert groups == [(p, t, task) for p in ("sft", "rlcf") for t in (0.2, 0.8) for task in tasks]
    assert world.calls == [(layers, 4, 80, 1, t, 0.95) for layers in (1, 2) for t in (0.2, 0.8)]


def test_the_temperature_is_that_of_the_best_pass_for_each_k_and_the_lower_one_of_equals(world):
    # at 0.2 all of one problem pass and none of the other; at 0.8 two of the four of each
    low, high = world.result["policies"]["rlcf"]["temperatures"]
    assert low["pass_at_k"] == pytest.approx([1 / 2, 1 / 2, 1 / 2])
    assert high["pass_at_k"] == pytest.approx([1 / 2, 5 / 6, 1])
    assert high["exec_at_k"] == pytest.approx([5 / 8, 11 / 12, 1])  # three and two of four
    assert high["comp_at_k"] == pytest.approx([7 / 8, 1, 1])  # four and three of four
    best = world.result["policies"]["rlcf"]["at_k"]
    assert [(row["k"], row["temperature"]) for row in best] == [(1, 0.2), (2, 0.8), (4, 0.8)]
    assert [row["pass"] for row in best] == pytest.approx([1 / 2, 5 / 6, 1])
    # at the same temperature, though exec@1 and comp@1 are better at 0.8
    assert [row["exec"] for row in best] == pytest.approx([1 / 2, 11 / 12, 1])
    assert [row["comp"] for row in best] == pytest.approx([1 / 2, 1, 1])
    assert {row["temperature"] for row in world.result["policies"]["sft"]["at_k"]} == {0.2}  # never passes: all equal


def test_what_compiles_runs_and_passes_are_three_numbers(world):
    first = world.result["policies"]["sft"]["at_k"][0]
    comp = {"python": (4 + 2) / 8, "java": (3 + 2) / 8}[world.result["language"]]  # Python finds m when it is read
    assert (first["pass"], first["exec"], first["comp"]) == pytest.approx((0, (1 + 2) / 8, comp))


def test_intervals_are_over_problems(world):
    first, _, last = world.result["policies"]["rlcf"]["at_k"]
    assert first["pass_ci"] == (0, 1)  # two problems, one always solved: a resample has either twice in 1 of 4
    assert last["pass_ci"] == last["comp_ci"] == (1, 1)


def test_differences_are_paired_by_problem_and_the_report_begins_with_them_in_words(world):
    gains = world.result["differences"]["rlcf"]
    comp = {"python": -2 / 8, "java": -1 / 8}[world.result["language"]]  # four of eight against six or five
    assert {name: gain["mean"] for name, gain in gains.items()} == pytest.approx(
        {"pass": 4 / 8, "exec": 1 / 8, "comp": comp}
    )
    assert gains["pass"]["ci"] == (0, 1)  # one problem gained all, the other nothing
    first, *_ = re.findall(r"<p.*?</p>", read_page(world.args.out), re.S)
    assert 'class="happened warn"' in first
    assert "rlcf solves 50% of problems with 1 sample (sft: 0%). It did not learn: its pass@1 did not change" in first
    assert "(+50.00 [+0.00, +100.00] points)" in first


def test_the_error_profile_and_endings_match_a_manual_count(world):
    sft, rlcf = (row["temperatures"] for row in world.result["policies"].values())
    none = dict.fromkeys(CATEGORIES, 0.0)
    assert sft[0]["errors"] == none | {"cannot_find_symbol": 1 / 8, "syntax": 2 / 8}
    assert rlcf[0]["errors"] == none | {"syntax": 4 / 8}
    assert rlcf[1]["errors"] == none | {"syntax": 1 / 8, "unused": 1 / 8}
    assert [row["compile_rate"] for row in (*sft, *rlcf)] == [5 / 8, 5 / 8, 4 / 8, 6 / 8]
    of_undefined = {"java": {"exception": 1, "compile_error": 3}, "python": {"exception": 2, "compile_error": 2}}
    expected = {"wrong_answer": 3, "timeout": 1} | of_undefined[world.result["language"]]
    assert sft[0]["reasons"] == expected
    assert rlcf[1]["reasons"] == {"passed": 4, "wrong_answer": 1, "exception": 2, "compile_error": 1}


def test_the_blamed_text_is_a_part_of_the_response(world):
    rows = {row["response"].strip(): row for row in world.samples if row["error"]}
    blamed = {row["response"][row["error"]["start"] : row["error"]["end"]] for row in rows.values()}
    assert blamed == ({"m", ";"} if world.result["language"] == "java" else {"m", "\n"})
    unused = next(row for row in rows.values() if row["error"]["category"] == "unused")
    assert unused["passed"] and "m" in unused["error"]["message"]


def test_the_discriminator_compares_each_sample_with_the_written_program(world):
    model = load_discriminator(world.root / "discriminator")
    (record,) = (row for row in read_jsonl(world.root / "code.test.jsonl", {}) if row["response"])
    for row in world.samples:
        if row["task"] == "test/twice":
            assert row["discriminator"] is None
        else:
            with torch.no_grad():
                alone = model.compare([record["query"]], [row["response"]], [record["response"]]).item()
            assert row["discriminator"] == pytest.approx(alone, abs=1e-5)
    scores = [row["discriminator"] for row in world.samples if row["policy"] == "rlcf" and row["task"] == "test/square"]
    assert (
        scores[:4] == pytest.approx([0.0] * 4, abs=1e-6) and max(map(abs, scores)) > 0.01
    )  # the written program itself
    low, high = world.result["policies"]["rlcf"]["temperatures"]
    assert low["discriminator"] == pytest.approx(0, abs=1e-6) and high["discriminator"] == pytest.approx(
        sum(scores[4:7]) / 3
    )  # not the unused
    table, page = text(program_report.page(world.result, {}, [])), read_page(world.args.out)
    first = next(row["discriminator"] for row in world.samples)  # of sft, wrong
    assert f"D {first:+.2f}" in page and page.count("<small> D ") == 2
    of_sft = world.result["policies"]["sft"]["temperatures"][0]["discriminator"]
    assert re.search(rf"^discriminator, mean of those\s+{re.escape(f'{of_sft:+.3f}')}\s+[+-]0\.000$", table, re.M)


def test_equal_programs_are_checked_and_run_once(world):
    # by problem: square has five kinds and right, wrong, crash, unused of the other policy; twice has four
    assert world.result["num_programs"] == len({(row["task"], row["response"]) for row in world.samples}) == 6 + 4


def test_lengths_count_eos(world):
    tokenizer = load_tokenizer(world.root / "sft")
    lengths = [len(tokenizer.encode(row["response"])) + 1 for row in world.samples[:8]]
    at = world.result["policies"]["sft"]["temperatures"][0]
    assert at["response_length"] == pytest.approx(sum(lengths) / 8) and at["eos_rate"] == 1


# (completion of a problem, by its method) -> whether it is right
HUMANEVAL = {
    "python": {"    return n * n\n": True, "    return n\n": False},
    "java": {"        return n * n;\n    }\n}\n": True, "        return n;\n    }\n}\n": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("language", ["python", pytest.param("java", marks=needs_jdk)])
def test_humaneval_is_evaluated_with_policies_that_never_trained_on_it(language, tmp_path, monkeypatch):
    """Two problems in mxeval's format, without a written solution; the first is always solved, the second never."""
    of_language = {"java": PROBLEM | {"canonical_solution": None}, "python": PYTHON}[language]
    prefix = {"java": "HumanEval_java", "python": "HumanEval"}[language]
    write_jsonl(tmp_path / "problems.jsonl", [of_language | {"task_id": f"{prefix}/{i}"} for i in range(2)])
    tokenizer = train_tokenizer([of_language["prompt"]], 280)
    config = GPTConfig(vocab_size=280, n_ctx=256, d_model=16, n_layer=1, n_head=2, d_mlp=32, rotary_dim=4)
    save(GPT(config), tmp_path / "sft", tokenizer)
    mxeval.main(mxeval.Args(source=str(tmp_path / "problems.jsonl"), out=tmp_path / "data"))
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["code.test.jsonl"]

    def sample_answers(policy, queries, tokenizer, num_samples, max_new_tokens, *_, **__):
        ids = [tokenizer.encode(text) + [tokenizer.eos_id] for text in HUMANEVAL[language]]
        return None, right_pad([ids[0]] * num_samples + [ids[1]] * num_samples, tokenizer.pad_id)

    monkeypatch.setattr(programs, "sample_answers", sample_answers)
    args = replace(
        evaluation.RECIPES["rlcf"][1],
        data=tmp_path / "data", out=tmp_path / "eval", policies=("sft", str(tmp_path / "sft")), curves=(),
        device="cpu", num_samples=2, ks=(1, 2), temperatures=(0.2,), response_length=80, workers=1, num_resamples=20,
    )  # fmt: skip
    result = evaluation.main(args)
    assert [row["pass"] for row in result["policies"]["sft"]["at_k"]] == [0.5, 0.5]
    samples = read_jsonl(args.out / "samples.jsonl", {})
    assert [(row["task"], row["passed"]) for row in samples[::2]] == [(f"{prefix}/0", True), (f"{prefix}/1", False)]


def test_long_queries_are_refused_or_cut_on_the_left_but_never_in_the_program(python_world):
    tokenizer = load_tokenizer(python_world.root / "sft")
    args = python_world.args
    rows = programs.load_problems(args, tokenizer)
    assert all(len(row.query) > 5 for row in rows)
    with pytest.raises(InputError, match="--max-query-length"):
        programs.load_problems(replace(args, max_query_length=5), tokenizer)
    cut = programs.load_problems(replace(args, max_query_length=5, cut_queries=True), tokenizer)
    assert [row.query for row in cut] == [row.query[-5:] for row in rows]
    assert [row.record for row in cut] == [row.record for row in rows] and programs.digest(cut) == programs.digest(rows)
    kept = programs.load_problems(replace(args, cut_queries=True), tokenizer)
    assert [row.query for row in kept] == [row.query for row in rows]


# ------------------------------------------------------------------------------------------------ 2. written files
def test_eval_json_is_the_result_and_the_table_shows_it_in_percent(world):
    assert json.loads((world.args.out / "eval.json").read_text()) == json.loads(json.dumps(world.result))
    table = text(program_report.page(world.result, {}, []))
    assert re.search(r"^%\s+pass@1\s+pass@2\s+pass@4\s+exec@1\s+comp@1\s+temperature$", table, re.M)
    numbers = r"50\.00 \[0\.00, 100\.00\]\s+83\.33\s+100\.00\s+50\.00\s+50\.00 \[0\.00, 100\.00\]\s+0\.2 / 0\.8 / 0\.8"
    assert re.search(rf"^rlcf\s+{numbers}$", table, re.M)
    assert re.search(r"^syntax\s+0\.250\s+0\.500$", table, re.M) and "missing return" not in table
    assert re.search(r"^responses without any, %\s+62\.50\s+50\.00$", table, re.M)
    assert re.search(r"^timeout\s+1\s+0$", table, re.M)


def read_page(out: Path) -> str:
    return (out / "report.html").read_text()


def test_all_can_read_the_report(python_world, unreadable):
    assert not unreadable(python_world.args.out / "report.html")


def test_the_page_is_one_file_without_external_requests(world):
    page = read_page(world.args.out)
    assert set(re.findall(r'src="([^:]+):', page)) == {"data"} and not re.findall(r"<(script\s|link[^>]+sheet)", page)
    assert not re.search(r"(src|href|url)\W{1,3}https?:", page)
    assert page.count("<img ") == 4 + 3 and "In training" not in page  # one per k over the temperature
    assert "<mark>m</mark>" not in page and page.count('class="sample"') == 2
    assert '<span class="verdict wrong_answer">wrong answer</span>' in page  # the first response of sft to the square
    blamed = "<mark>;</mark>" if world.result["language"] == "java" else "<mark>(here)</mark>\n"
    assert page.count(blamed) == 2  # the first responses of both policies to twice a number


def test_markup_in_a_response_stays_text():
    def code(response: str, start: int | None, end: int | None = None) -> str:
        error = None if start is None else {"start": start, "end": end, "message": "no"}
        row = {"response": response, "error": error, "reason": "compile_error", "discriminator": None, "output": ""}
        return re.search("<pre>(.*)</pre>", program_report.program("sft", row))[1]

    assert code("a < b & c", 4, 5) == "a &lt; <mark>b</mark> &amp; c"
    assert code("<b>", 3, 3) == "&lt;b&gt;<mark>(here)</mark>"
    assert code("<i>", None) == "&lt;i&gt;"


# -------------------------------------------------------------------------------------------------- 3. the figures
def row(k: int, share: float) -> dict:
    names = ("pass", "exec", "comp")
    return {"k": k} | {name: share for name in names} | {f"{name}_ci": (share - 0.1, share + 0.2) for name in names}


def test_the_bars_are_the_numbers_in_percent_with_their_intervals():
    passes, other_figure = at_k_figures({"sft": [row(1, 0.2), row(10, 0.4)], "rlcf": [row(1, 0.3), row(10, 0.5)]})
    axes = passes.axes[0]
    assert [bar.get_height() for bars in axes.containers[1::2] for bar in bars] == pytest.approx([20, 40, 30, 50])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["pass@1", "pass@10"]
    assert [label.get_text() for label in other_figure.axes[0].get_xticklabels()] == ["exec@1", "comp@1"]
    segment = axes.containers[0].lines[2][0].get_segments()[0]
    assert [y for _, y in segment] == pytest.approx([10, 40])


def test_the_area_under_the_sorted_problems_is_pass_at_1_and_what_is_above_0_is_pass_at_n(world):
    for policy in world.result["policies"].values():
        for at in policy["temperatures"]:
            [figure] = problem_figures({"policy": at["num_passed"]}, 4, world.result["query_lengths"], 1)
            heights, edges, _ = figure.axes[0].patches[0].get_data()
            assert list(heights) == sorted(heights, reverse=True) and list(edges) == [0, 50, 100]
            assert (heights * [50, 50]).sum() / 1e4 == pytest.approx(at["pass_at_k"][0])
            assert (heights > 0).mean() == pytest.approx(at["pass_at_k"][-1])


def test_problems_are_grouped_by_the_length_of_their_query():
    lengths, passed = [40, 10, 30, 20, 41, 11, 31, 21], [4, 0, 2, 1, 2, 0, 2, 1]
    _, figure = problem_figures({"sft": passed, "rlcf": [4] * 8}, 4, lengths, 1)
    sft, rlcf = (container.lines for container in figure.axes[0].containers)
    assert list(sft[0].get_xdata()) == [10.5, 20.5, 30.5, 40.5] and list(sft[0].get_ydata()) == [0, 25, 50, 75]
    assert [y for _, y in sft[2][0].get_segments()[3]] == [50, 100] and list(rlcf[0].get_ydata()) == [100] * 4
    assert len(problem_figures({"sft": passed[1:]}, 4, lengths[1:], 1)) == 1


def test_the_error_figure_omits_categories_without_errors():
    none = dict.fromkeys(CATEGORIES, 0.0)
    axes = error_figure({"sft": none | {"type": 0.5}, "rlcf": none | {"unused": 0.25}}).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["type", "unused"]
    assert [bar.get_width() for bars in axes.containers for bar in bars] == [0.5, 0, 0, 0.25]
    assert error_figure({"sft": none}).axes[0].get_yticklabels() == []


def test_a_panel_for_each_metric_that_some_run_has_and_a_line_for_each_run_that_has_it():
    runs = {
        "full": [
            {"step": 0, "compile_rate": 0.5, "discriminator/accuracy": 0.9, "errors/type": 0.0, "objective/kl": -0.1}
        ],
        "no discriminator": [{"step": 0, "compile_rate": 0.5, "errors/type": 1.0, "errors/unused": 0.0}],
        "sft": [{"step": 0, "loss": 1.0}],
    }
    figures = training_figures(runs, ["sft", "full"])
    labels = [[text.get_text() for text in figure.axes[0].get_legend().get_texts()] for figure in figures]
    assert labels == [["full", "no discriminator"], ["full"], ["full", "no discriminator"], ["full"]]
    assert training_figures({"sft": runs["sft"]}) == []
    # the policy of the same name has the same colour in the bars
    bars = at_k_figures({name: [row(1, 0.5)] for name in ("sft", "full")})[0].axes[0]
    colors = [line.get_color() for line in figures[0].axes[0].get_lines() if line.get_label() == "full"]
    assert colors == [to_hex(bars.containers[3][0].get_facecolor())]


def test_each_policy_has_its_curve_over_the_temperature():
    rows = [{"temperature": 0.2, "pass_at_k": [0.5, 0.6]}, {"temperature": 0.8, "pass_at_k": [0.3, 0.9]}]
    first, second = temperature_figures({"sft": rows, "rlcf": rows[::-1]}, (1, 4))
    assert [figure.axes[0].get_title("left") for figure in (first, second)] == [
        "pass@1 over temperature", "pass@4 over temperature",
    ]  # fmt: skip
    line = second.axes[0].get_lines()[0]
    assert list(line.get_xdata()) == [0.2, 0.8] and list(line.get_ydata()) == pytest.approx([60, 90])
    assert temperature_figures({"sft": rows[:1]}, (1, 4)) == []


# ----------------------------------------------------------------------------- 4. without a script, and bad input
@pytest.fixture(scope="module")
def unscripted(python_world) -> SimpleNamespace:
    world = python_world
    args = replace(
        world.args, out=world.root / "sampled", policies=("sft", str(world.root / "sft")), num_samples=3, ks=(1, 3),
        temperatures=(0.0, 0.8), response_length=12, discriminator=None,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_report, "page", lambda *_: [])
        result = evaluation.main(args)
    return SimpleNamespace(args=args, result=result, samples=read_jsonl(args.out / "samples.jsonl", {}))


def test_only_temperature_0_is_deterministic_across_seeds(unscripted):
    for temperature, num_different in ((0.0, 1), (0.8, 3)):
        texts = [row["response"] for row in unscripted.samples if row["temperature"] == temperature]
        assert [len(set(texts[i : i + 3])) for i in (0, 3)] == [num_different] * 2
    assert {row["discriminator"] for row in unscripted.samples} == {None}
    assert "discriminator" not in text(program_report.page(unscripted.result, {}, []))


@pytest.mark.slow
def test_two_runs_write_the_same_and_the_curves_of_training_come_with_their_metrics(unscripted):
    """Whatever the batch size; runs that share a name go by their directories."""
    root = unscripted.args.out.parent
    rows = [
        {"step": step, "compile_rate": 0.5 + step / 10, "errors/type": 0.5 - step / 10, "errors/unused": 0.0}
        for step in range(3)
    ]
    directories = [root / name / "ablation" for name in ("one", "two")]
    for directory in directories:
        directory.mkdir(parents=True)
        write_jsonl(directory / "metrics.jsonl", [row | {"loss": 1.0, "validation_loss": 1.0} for row in rows])
    again = replace(
        unscripted.args,
        out=root / "again",
        curves=tuple(map(str, directories)),
        num_report_samples=1,
        batch_size=64,
        workers=1,
    )
    result = evaluation.main(again)
    assert (again.out / "samples.jsonl").read_bytes() == (unscripted.args.out / "samples.jsonl").read_bytes()
    assert result["policies"] == unscripted.result["policies"]
    page = read_page(again.out)
    assert "In training" in page and page.count("<img ") == 4 + 2 + 2 + 2 and page.count('class="sample"') == 1


def test_samples_depend_on_the_seed(unscripted, monkeypatch):
    monkeypatch.setattr(program_report, "page", lambda *_: [])
    args = replace(unscripted.args, out=unscripted.args.out.parent / "other_seed", seed=2, temperatures=(0.8,))
    evaluation.main(args)
    responses = [row["response"] for row in read_jsonl(args.out / "samples.jsonl", {})]
    assert responses != [row["response"] for row in unscripted.samples if row["temperature"] == 0.8]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ks": (1, 5)}, "^--ks 5 exceeds --num-samples 4"),
        ({"ks": (2, 1)}, "^--ks 2 1: expected at least one value, distinct and ascending"),
        ({"ks": (1, 1)}, "^--ks 1 1: "),
        ({"ks": ()}, "^--ks : expected at least one value"),
        ({"ks": (0, 1)}, "^--ks 0: must be at least 1"),
        ({"temperatures": (0.8, 0.2)}, "^--temperatures 0.8 0.2: "),
        ({"temperatures": (-0.1,)}, "^--temperatures -0.1: must be 0 or from 10"),
        ({"timeout": 0.0}, "^--timeout 0.0: "),
        ({"workers": 0}, "^--workers 0: "),
        ({"policies": ("sft",)}, "^--policies sft: expected pairs"),
        ({"data": Path("/nowhere")}, "/nowhere/code.test.jsonl does not exist"),
        ({"response_length": 5000}, "--response-length"),
        ({"max_query_length": 3}, r"code.test.jsonl:1: .*--max-query-length is 3"),
    ],
)
def test_bad_settings_are_reported_in_one_sentence_and_nothing_is_written(python_world, tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence):
        evaluation.main(replace(python_world.args, out=tmp_path / "out", **change))
    assert not (tmp_path / "out").exists()


def test_a_problem_without_tests_names_its_line(python_world, tmp_path):
    args = python_world.args
    rows = read_jsonl(args.data / "code.test.jsonl", {})
    write_jsonl(tmp_path / "code.test.jsonl", [rows[0], rows[1] | {"tests": " \n"}])
    with pytest.raises(InputError, match=r"code.test.jsonl:2: the field 'tests' is empty"):
        evaluation.main(replace(args, data=tmp_path, out=tmp_path / "out"))


def test_the_recipe_has_the_papers_numbers():
    args = evaluation.RECIPES["rlcf"][1]
    assert (args.num_samples, args.ks, args.temperatures, args.top_p) == (100, (1, 10, 100), (0.2, 0.6, 0.8), 0.95)
    assert args.response_length == 256  # of 500 in training; no query of the test is left out
