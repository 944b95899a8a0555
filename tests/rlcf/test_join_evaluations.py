"""One table of evaluations with different tokenizers, from files written by hand."""

import json
import re
from pathlib import Path

import pytest

from nanorlhf.errors import InputError
from nanorlhf.rlcf.join_evaluations import Args, main

SETTINGS = {"ks": [1, 10], "temperatures": [0.2, 0.8], "num_samples": 10, "top_p": 0.95, "max_query_length": 500}


def at(k: int, share: float, temperature: float) -> dict:
    shares = {"pass": share, "exec": share + 0.1, "comp": share + 0.2}
    intervals = {f"{name}_ci": [value - 0.05, value + 0.05] for name, value in shares.items()}
    return {"k": k, "temperature": temperature} | shares | intervals


def write(path: Path, policies: dict, problems: str = "abc", **changes) -> Path:
    path.parent.mkdir()
    path.write_text(json.dumps({"policies": policies, "problems": problems, "args": SETTINGS | changes}))
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    policy = {"parameters": 356_700_000, "at_k": [at(1, 0.05, 0.2), at(10, 0.1, 0.8)], "temperatures": []}
    return write(tmp_path / "codegen/eval.json", {"rlcf": policy})


LARGE = {"sft": {"parameters": 1_557_600_000, "at_k": [at(1, 0.04, 0.2), at(10, 0.2, 0.2)], "temperatures": []}}


def test_each_policy_of_each_file_is_a_row_with_its_size_and_intervals(small, tmp_path, capsys):
    longer = write(tmp_path / "gpt2/eval.json", LARGE, max_query_length=900)  # counts tokens, so it may differ
    lines = main(Args(evals=(small, longer)))
    assert lines == [
        [
            "%", "million parameters", "pass@1", "pass@10", "exec@1", "exec@10", "comp@1", "comp@10", "temperature",
        ],
        [
            f"{tmp_path}/codegen: rlcf", "356.7", "5.00 [0.00, 10.00]", "10.00 [5.00, 15.00]", "15.00 [10.00, 20.00]",
            "20.00 [15.00, 25.00]", "25.00 [20.00, 30.00]", "30.00 [25.00, 35.00]", "0.2 / 0.8",
        ],
        [
            f"{tmp_path}/gpt2: sft", "1,557.6", "4.00 [-1.00, 9.00]", "20.00 [15.00, 25.00]", "14.00 [9.00, 19.00]",
            "30.00 [25.00, 35.00]", "24.00 [19.00, 29.00]", "40.00 [35.00, 45.00]", "0.2 / 0.2",
        ],
    ]  # fmt: skip
    assert re.search(r"codegen: rlcf +356\.7 +5\.00 \[0\.00, 10\.00\]", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"problems": "abd"}, "gpt2/eval.json and .*codegen/eval.json have different problems"),
        ({"ks": [1, 5]}, r"differ in --ks, \[1, 5\] and \[1, 10\]"),
        ({"temperatures": [0.2]}, r"differ in --temperatures, \[0.2\] and \[0.2, 0.8\]"),
        ({"num_samples": 20}, "differ in --num-samples, 20 and 10"),
        ({"top_p": 1.0}, "differ in --top-p, 1.0 and 0.95"),
    ],
)
def test_evaluations_of_different_questions_are_refused(small, tmp_path, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        main(Args(evals=(small, write(tmp_path / "gpt2/eval.json", LARGE, **changes))))


def test_files_of_other_evaluations_and_no_files_are_refused(small, tmp_path):
    other = tmp_path / "eval.json"
    other.write_text(json.dumps({"policies": {"sft": {"rouge1": 0.3}}}))
    with pytest.raises(InputError, match="eval.json wasn't written by this version's eval.py rlcf"):
        main(Args(evals=(small, other)))
    with pytest.raises(InputError, match="at least one eval.json"):
        main(Args(evals=()))
