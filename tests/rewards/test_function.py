"""A user's reward function: its arguments, its return values, and the errors for invalid ones."""

import json
import os
import re

import numpy as np
import pytest

from nanorlhf.errors import InputError
from nanorlhf.rewards.function import Responses, RewardFunction, load_function, score_response
from nanorlhf.rewards.function_reward import FunctionReward
from tests.rewards.letters import EOS, RECORDS, Letters, make_batch

INPUTS = Responses(["a", "ab"], ["abc", "a"], [[1, 2, 3, EOS], [1]], RECORDS)


@pytest.fixture
def function(tmp_path):
    """Write a file and load the function `score` in it."""

    def load(text, records=RECORDS):
        path = tmp_path / "rule.py"
        path.write_text(text)
        return RewardFunction(f"{path}:score", records)

    return load


# ---------------------------------------------------------------------------------------------------- what it is given
def test_a_users_rule_gets_texts(tmp_path):
    path = tmp_path / "rule.py"
    path.write_text(
        "def score(queries, responses):\n    return [len(q) + 10 * len(r) for q, r in zip(queries, responses)]\n"
    )
    rule = FunctionReward(f"{path}:score", Letters(), 1)
    scores = rule.score(make_batch())
    assert scores.scores.tolist() == [31.0, 12.0] and rule.models == [] and rule.metrics() == {}
    assert scores.token_rewards.tolist() == [[0.0] * 4] * 2 and scores.applies.tolist() == [True, True]


@pytest.mark.parametrize("size", [1, 2])
def test_it_gets_what_it_names_whatever_the_size_of_a_call(tmp_path, size):
    """It gets fields of meta and of the row, the rows, and ids with EOS and without [PAD], for any order of rows."""
    seen = tmp_path / "seen.jsonl"
    path = tmp_path / "rule.py"
    path.write_text(
        "import json\n"
        "def score(queries, responses, answer, response_ids, tests, records, level=0):\n"
        f"    with open({str(seen)!r}, 'a') as file:\n"
        "        for row in zip(queries, responses, answer, response_ids, tests, records, level):\n"
        "            file.write(json.dumps(row) + '\\n')\n"
        "    return [0.0] * len(queries)\n"
    )
    FunctionReward(f"{path}:score", Letters(), size, RECORDS).score(make_batch())
    rows = sorted((json.loads(line) for line in seen.read_text().splitlines()), key=lambda row: row[0])
    assert rows == [
        ["a", "abc", "4", [1, 2, 3, EOS], None, RECORDS[0], 1],
        ["ab", "a", None, [1], "assert x", RECORDS[1], None],
    ]


def test_trls_function_gets_keywords_and_messages_where_a_row_is_a_chat(function):
    text = (
        "seen = []\n"
        "def score(prompts, completions, completion_ids, answer, **columns):\n"
        "    seen.append((prompts, completions, completion_ids, answer, columns))\n"
        "    return [None, 1.0]\n"
    )
    chat = {"query": "<user>ab", "response": "b", "chat": True, "meta": {"answer": "x"}}
    reward = function(text, [*RECORDS, chat])
    inputs = Responses(["a", "<user>ab"], ["abc", "a"], [[1, EOS], [1]], [RECORDS[0], chat])
    assert reward(inputs) == [None, 1.0]
    [(prompts, completions, ids, answer, columns)] = reward.function.__globals__["seen"]
    assert prompts == ["a", [{"role": "user", "content": "<user>ab"}]]
    assert completions == ["abc", [{"role": "assistant", "content": "a"}]] and ids == [[1, EOS], [1]]
    assert answer == ["4", "x"] and columns == {"level": [1, None], "tests": [None, None]}


def test_messages_that_a_row_keeps_are_the_prompt(function):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat = {"query": "<system>...", "response": "b", "chat": True, "meta": {"messages": messages}}
    reward = function("def score(prompts, completions): return [len(p) for p in prompts]\n", [chat])
    assert reward(Responses(["<system>..."], ["b"], [[2]], [chat])) == [2.0]


def test_an_async_function_is_awaited(function):
    assert function("async def score(completions, **kwargs): return [1] * len(completions)\n")(INPUTS) == [1.0, 1.0]


# adapted from three examples in TRL's documentation of GRPOTrainer
LENGTH = "def score(completions, **kwargs):\n    return [float(len(text)) for text in completions]\n"
FORMAT = (
    "import re\n"
    "def score(completions, **kwargs):\n"
    "    texts = [completion[0]['content'] for completion in completions]\n"
    "    return [float(bool(re.match(r'^<think>.*?</think><answer>.*?</answer>$', text))) for text in texts]\n"
)
ACCURACY = (
    "import re\n"
    "def score(completions, ground_truth, **kwargs):\n"
    "    found = [re.search(r'boxed\\{(.*?)\\}', text) for text in completions]\n"
    "    answers = [match[1] if match else '' for match in found]\n"
    "    return [1.0 if said == truth else 0.0 for said, truth in zip(answers, ground_truth)]\n"
)


def test_three_of_trls_functions_work_unchanged(function):
    assert function(LENGTH)(INPUTS) == [3.0, 1.0]
    chats = [{"query": "q", "response": "r", "chat": True}] * 2
    texts = ["<think>2 + 2</think><answer>4</answer>", "the answer is 4"]
    assert function(FORMAT, chats)(Responses(["q"] * 2, texts, [[1], [2]], chats)) == [1.0, 0.0]
    rows = [{"query": "q", "response": "r", "meta": {"ground_truth": truth}} for truth in ("4", "5")]
    inputs = Responses(["q"] * 2, [r"so \boxed{4}", r"so \boxed{4}"], [[1], [2]], rows)
    assert function(ACCURACY, rows)(inputs) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def score(queries): return []", r"rule.py:1 must take two lists of texts, queries and responses"),
        ("\n\ndef score(q, r, solution): return []", r"rule.py:3 has the parameter 'solution', but no row of the data "
         r"has this field in its meta \(fields: answer, level, tests\)"),
        ("def score(prompts, completions, trainer_state): return []", "has the parameter 'trainer_state'"),
        ("TIME_LIMIT = 0\ndef score(q, r): return []", "sets TIME_LIMIT = 0, expected"),
        ("TIME_LIMIT, TIMEOUT_SCORE = 1, 'low'\ndef score(q, r): return []", "sets TIMEOUT_SCORE = 'low', expected"),
    ],
)  # fmt: skip
def test_invalid_signatures_raise_input_error_before_training(function, text, sentence):
    with pytest.raises(InputError, match=sentence):
        function(text)


@pytest.mark.parametrize(
    ("where", "reason"),
    [("nowhere.py:score", "a file that exists"), ("{rule}", "FILE.py:FUNCTION"), ("{rule}:other", "a function other"),
     ("{rule}.txt:score", "a file that exists"), ("", "FILE.py:FUNCTION")],
)  # fmt: skip
def test_a_rule_that_can_not_be_loaded_raises_input_error(tmp_path, where, reason):
    path = tmp_path / "rule.py"
    path.write_text("def score(queries, responses): return [0.0]\n")
    with pytest.raises(InputError, match=reason):
        FunctionReward(where.format(rule=path), None, 8)


# --------------------------------------------------------------------------------------------------- what it returns
@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("[1, 2.5]", [1.0, 2.5]),
        ("(True, None)", [1.0, None]),
        ("[[0, 0, 0.5, 1], None]", [[0.0, 0.0, 0.5, 1.0], None]),
        ("np.array([1.0, 2.0], dtype=np.float32)", [1.0, 2.0]),
        ("torch.tensor([3, 4])", [3.0, 4.0]),
        ("[torch.ones(4), np.float32(2.0)]", [[1.0] * 4, 2.0]),
    ],
)
def test_numbers_lists_per_token_and_none_are_taken_from_python_numpy_and_pytorch(function, returned, expected):
    values = function(f"import numpy as np, torch\ndef score(q, r): return {returned}\n")(INPUTS)
    assert values == expected
    assert all(type(x) is float for value in values if value is not None for x in np.atleast_1d(value).tolist())


STRANGE = """
class Strange:
    def __repr__(self): raise ValueError("no")
class Listed:
    def tolist(self): return {}["no"]
class Itself:
    def tolist(self): return [self]
class Untold(Exception):
    def __str__(self): raise ValueError("no")
def strange(): raise Untold
"""


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("[1.0]", r"rule.py:2 returned 1 values for 2 responses\.$"),
        ("None", "rule.py:2 must return a list, one value per response, not None"),
        ("5", "must return a list, one value per response, not 5"),
        ("['good', 1]", "returned 'good' for the response 'abc': it must return a finite number"),
        ("[1, float('nan')]", "returned nan for the response 'a': it must return a finite number"),
        ("[1, [float('inf')]]", "returned inf for the response 'a'"),
        ("[1, {}]", "returned {} for the response 'a'"),
        ("[[1, 2, 3], 1]", "returned 3 rewards for the response 'abc', which has 4 tokens with its EOS"),
        ("[1, [[1]]]", r"returned \[1\] for the response 'a'"),
        ("[10**400, 1]", "returned 1000.* for the response 'abc'"),
        ("[10**5000, 1]", "returned a value of type int for the response 'abc'"),
        ("[1, [1j]]", "returned 1j for the response 'a'"),
        ("[True, 'no']", "returned 'no' for the response 'a'"),
        ("{1.0, 2.0}", "must return a list, one value per response, not {1.0, 2.0}"),
        ("{'a': 1}", "must return a list, one value per response, not {'a': 1}"),
        ("'ab'", "must return a list, one value per response, not 'ab'"),
        ("iter([1, 2])", "must return a list, one value per response, not <list_iterator"),
        ("(1 for _ in iter(int, 1))", "must return a list, one value per response, not <generator"),
        ("[[], 1]", "returned 0 rewards for the response 'abc'"),
        ("[q, 1]", "returned 'a' for the response 'abc'"),
        ("[Strange(), 1]", "returned a value of type Strange for the response 'abc'"),
        ("Strange()", "must return a list, one value per response, not a value of type Strange"),
        ("Listed()", "rule.py:[0-9]+ raises KeyError: 'no'"),
        ("Itself()", "raises RecursionError"),
        ("strange()", "raises Untold: \\(no message\\)"),
        ("score(q)", r"raises TypeError: score\(\) missing 1 required positional argument: 'r'"),
        ("score(q, r)", "raises RecursionError"),
        ("[0] * 2**62", "raises MemoryError|raises OverflowError"),
        ("exit(0)", "raises SystemExit: 0"),
        ("(q.clear(), r.clear(), ['x', 1])[2]", "returned 'x' for the response 'abc'"),
        ("[1, 1 / 0]", "rule.py:2 raises ZeroDivisionError: division by zero"),
        ("[q[5], 1]", "rule.py:2 raises IndexError: list index out of range"),
    ],
)
def test_invalid_values_raise_input_error_with_file_and_line(function, returned, sentence):
    reward = function(f"import math\ndef score(q, r): return {returned}\n{STRANGE}")
    with pytest.raises(InputError, match=sentence) as caught:
        reward(INPUTS)
    assert str(caught.value).startswith("--reward ") and "\n" not in str(caught.value)


def test_a_function_that_changes_what_it_is_given_changes_nothing(function):
    text = (
        "def score(q, r, records, response_ids):\n    q.clear(), r.clear(), records.clear(), response_ids[0].clear()\n"
    )
    reward = function(text + "    return [[1, 2, 3, 4], 5]\n")
    before = [*INPUTS.queries], [*INPUTS.responses], [[*ids] for ids in INPUTS.response_ids], [*INPUTS.records]
    assert reward(INPUTS) == [[1.0, 2.0, 3.0, 4.0], 5.0]
    assert (INPUTS.queries, INPUTS.responses, INPUTS.response_ids, INPUTS.records) == before


def test_rewards_per_token_stand_at_their_tokens_and_what_does_not_apply_is_marked(tmp_path):
    path = tmp_path / "rule.py"
    path.write_text("def score(q, r, response_ids): return [[10.0 * i for i in ids] if len(ids) > 1 else None "
                    "for ids in response_ids]\n")  # fmt: skip
    scores = FunctionReward(f"{path}:score", Letters(), 1).score(make_batch())
    assert scores.token_rewards.tolist() == [[10.0, 20.0, 30.0, 980.0], [0.0] * 4]
    assert scores.scores.tolist() == [0.0, 0.0] and scores.applies.tolist() == [True, False]


# ------------------------------------------------------------------------------------------- errors of a user's file
@pytest.mark.parametrize(
    "name", ["rule.py", "./rule.py", "rules/../rule.py", "link.py", "rules/deep.py", "{here}/rule.py"]
)
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("return [1 / 0]", ":3 raises ZeroDivisionError: division by zero"),
        ("return [json.loads('no')]", ":3 raises JSONDecodeError: "),
        ("return [of_helper()]", ":3 raises KeyError: 'no'"),
        ("os.chdir('rules'); return [1 / 0]", ":3 raises ZeroDivisionError"),
        ("return [)", ":3 raises SyntaxError: "),
    ],
)
def test_an_exception_names_the_last_line_of_the_users_file(tmp_path, monkeypatch, name, line, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rules").mkdir()
    (tmp_path / "helper_of_rule.py").write_text("\n\n\n\ndef of_helper(): return {}['no']\n")
    text = f"import json, os; from helper_of_rule import of_helper\ndef score(q, r):\n    {line}\n"
    for file in ("rule.py", "rules/deep.py"):
        (tmp_path / file).write_text(text)
    (tmp_path / "link.py").symlink_to("rule.py")
    name = name.format(here=tmp_path)
    with pytest.raises(InputError) as caught:
        FunctionReward(f"{name}:score", Letters(), 8).call(INPUTS)
    assert f": {name}{sentence}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("\nimport no_such_module\n", "rule.py:2 raises ModuleNotFoundError: No module named 'no_such_module'"),
        ("import broken_helper\n", "rule.py:1 raises SyntaxError: "),
        ("from other_file import score\n", "{here}/other_file.py:2 raises ZeroDivisionError"),
        ("score = divmod\n", "rule.py raises TypeError: "),
    ],
)
def test_an_exception_at_import_or_in_an_imported_function_names_a_line_too(tmp_path, monkeypatch, text, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_helper.py").write_text("\n\n)")
    (tmp_path / "other_file.py").write_text("def score(q, r):\n    return [1 / 0]\n")
    (tmp_path / "rule.py").write_text(text)
    with pytest.raises(InputError) as caught:
        FunctionReward("rule.py:score", Letters(), 8).call(INPUTS)
    assert f": {sentence.format(here=tmp_path)}" in str(caught.value)


EXITS = {
    "os._exit(0)": "os._exit(0)", "leave(0)": "os._exit(0)", "os.abort()": "os.abort()", "quit()": "None",
    "sys.exit(0)": "0", "os.kill(os.getpid(), 9)": f"os.kill({os.getpid()}, 9)", "os.kill(0, 15)": "os.kill(0, 15)",
}  # fmt: skip


@pytest.mark.parametrize("line", EXITS)
def test_a_function_that_exits_raises_input_error(tmp_path, line):
    """Both as a reward, as a gold function, and at import."""
    path = tmp_path / "rule.py"
    imports = "import os, sys; from os import _exit as leave"
    path.write_text(f"{imports}\ndef score(q, r):\n    {line}\n")
    sentence = re.escape(f"rule.py:3 raises SystemExit: {EXITS[line]}.")
    with pytest.raises(InputError, match=f"^--reward .*{sentence}"):
        FunctionReward(f"{path}:score", Letters(), 8).call(INPUTS)
    with pytest.raises(InputError, match=f"^--gold .*{sentence}"):
        score_response("--gold", f"{path}:score", load_function("--gold", f"{path}:score"), "q", "r")
    path.write_text(f"{imports}\n\n{line}\n")
    with pytest.raises(InputError, match=f"^--reward .*{sentence}"):
        FunctionReward(f"{path}:score", Letters(), 8)
    assert os._exit.__module__ == os.kill.__module__ == "posix"  # again


def test_a_process_that_a_function_forks_may_end_as_it_likes(tmp_path):
    path = tmp_path / "rule.py"
    path.write_text(
        "import os\ndef score(q, r):\n    if not (pid := os.fork()): os._exit(7)\n"
        "    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])] * len(q)\n"
    )
    assert FunctionReward(f"{path}:score", Letters(), 8).call(INPUTS) == [7.0] * len(INPUTS)
