"""The judge reward: its file, its prompts, the grade at the end of an answer, and the cap on calls."""

import json
import re
from dataclasses import replace

import pytest

import train_ppo
from nanorlhf.errors import InputError
from nanorlhf.rewards import endpoint as endpoint_module
from nanorlhf.rewards.judge import Judge, last_grade
from tests.conftest import read_metrics
from tests.evals.test_judge import chat, reply, serve  # noqa: F401  (serve is a fixture)
from tests.rewards.letters import Letters, make_batch

RUBRIC = "Rate the summary.\n\nPost: {query}\n\nSummary: {response}\n\nEnd with a number from 1 to 10."


GRADES = {
    7.0: [
        "It is short.\nScore: 7", "7", "**7**", "Score: 7.", "__Rating__ = `7`", "Rating: [[7]]", "(7)", "Score: <7>",
        "<score>7</score>", r"\boxed{7}", "Score:\n\n7\n---", "The final score is 7.", "Score 7", "> Quality: 7",
        "7/10", "**7 / 10**", "7 out of 10", "Score: 7 of 10", "I'd give it 7 out of 10.", "Fine. I would rate it a 7",
        "7/10 (70%)", "Score: 7 (out of 10)", "Score: 7 (good)", "Score (1-10): 7", "2. Score: 7",
        "It has 2 of 3 facts. Score: 7", '{"score": 7}', '```json\n{\n  "why": "2 of 3",\n  "score": 7\n}\n```',
        '{"why": "too long: 2 lines", "score": "7"}',
    ],
    2.0: ["2 out of 10", "Score: 2/10"], 4.0: ["4 of 5"], 10.0: ["10", "10/10"], 0.0: ["0/10"],
    7.5: ["Rating: **7.5 / 10**.\n", "7,5"], 3.0: ["3.0/5"], 0.5: [".5"],
    -1.0: ["-1", "\N{MINUS SIGN}1", "Score: -1"],
    None: [
        "", "I can't say.", "seven", "nan", "inf", "7 points", "Score: 7 out of ten", "7\nI hope this helps.",
        "between 6 and 7", "7 - 8", "6-7", "6\N{EN DASH}7", "Score: 6 or 7", "Score: 7 (or 8)", "8 7", "Score: 8, 7",
        "Clarity: 3, accuracy: 7", "Score: 3, rating: 7", "Score: 8 (80/100) 7", '{"score": 2, "max": 10}',
        "This does not deserve a 10", "It is not 10/10", "I wouldn't give it 10", "I'd give it less than 10",
        "The maximum score is 10", "Maximum score: 10", "Score: 2\nOut of: 10", "on a scale of 1 to 10",
        "70%", "Score: 70 %", "7/10 (20%)", "11/10", "0/0", "7/10/10", "10/7", "7/0",
        "1,000", "Score: 1,000", "1e3", "1.2.3", "1 000", "1/2/2024", "12:30", "10\N{SUPERSCRIPT TWO}",
        "7\N{VULGAR FRACTION ONE HALF}",
        "x7", "7th", "7+", "~7", ">7", "Score: - 7", "Score: \N{PLUS-MINUS SIGN}1", "Score: " + "9" * 400,
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "grade"), [(answer, grade) for grade, answers in GRADES.items() for answer in answers]
)
def test_the_grade_is_the_last_line_or_none(answer, grade):
    assert last_grade(answer) == grade


@pytest.fixture
def judge_file(tmp_path):
    """Write a judge's file for a URL."""

    def write(url="http://127.0.0.1:1/v1", **fields):
        fields = {"url": url, "model": "judge-1", "rubric": RUBRIC, "cache": str(tmp_path / "answers.jsonl")} | fields
        path = tmp_path / "judge.toml"
        path.write_text(
            "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items() if value is not None)
        )
        return str(path)

    return write


def by_length(handler):
    """Grade a summary by its number of letters; no grade if it has a c."""
    summary = re.search("Summary: (.*)\n", handler.prompt)[1]
    reply(body=chat("I can't say." if "c" in summary else f"Fine.\nScore: **{len(summary)}/100**"))(handler)


# ------------------------------------------------------------------------------------------------------------- scores
def test_a_judges_numbers_are_the_scores_and_no_number_does_not_apply(serve, judge_file):  # noqa: F811
    server, endpoint = serve(by_length)
    judge = Judge(judge_file(endpoint.url, scale=0.5), Letters())
    result = judge.score(make_batch())
    assert result.scores.tolist() == [0.0, 0.5] and result.applies.tolist() == [False, True]
    assert not result.token_rewards.any() and judge.metrics() == {"reward/judge_no_score": 0.5}
    prompts = [body["messages"][-1]["content"] for _, _, body in server.seen]
    assert sorted(prompts) == [RUBRIC.format(query=q, response=r) for q, r in (("a", "abc"), ("ab", "a"))]
    judge.score(make_batch())
    assert len(server.seen) == 2  # from the cache


def test_equal_responses_are_asked_about_once_and_a_text_may_contain_the_fields(serve, judge_file):  # noqa: F811
    server, endpoint = serve(reply(body=chat("3")))
    judge = Judge(judge_file(endpoint.url), Letters())
    assert judge.prompt("{response}", " {query} ") == RUBRIC.replace("{response}", "{query}").replace(
        "Post: {query}", "Post: {response}"
    )
    batch = make_batch()
    batch.query[0], batch.response[0] = batch.query[1].clone(), batch.response[1].clone()
    assert judge.score(batch).scores.tolist() == [3.0, 3.0] and len(server.seen) == 1


def test_the_cap_on_calls_is_of_the_whole_run(serve, judge_file, tmp_path):  # noqa: F811
    server, endpoint = serve(reply(body=chat("3")))
    judge = Judge(judge_file(endpoint.url, max_calls=3), Letters())
    judge.score(make_batch())
    other = make_batch()
    other.response[:, 0] = 5
    sentence = f"judge.toml: max_calls = 3 is used up; answers are kept in {tmp_path}/answers.jsonl"
    with pytest.raises(InputError, match=sentence):
        judge.score(other)
    assert len(server.seen) == 3
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 3


def test_an_endpoint_that_rejects_requests_stops_the_run(serve, judge_file):  # noqa: F811
    _, endpoint = serve(reply(401, b"no such key"))
    with pytest.raises(InputError, match="judge.toml: the endpoint refuses: HTTP 401 no such key; answers are kept"):
        Judge(judge_file(endpoint.url), Letters()).score(make_batch())


def test_a_judge_that_fails_ends_the_run_and_a_prompt_that_it_refuses_does_not(serve, judge_file, monkeypatch):  # noqa: F811
    """Even a few failures end the run, because it would no longer be the same run without these scores."""
    monkeypatch.setattr(endpoint_module, "TRIES", 1)
    server, endpoint = serve(reply(400, b"too long"), reply(500, b"out of memory"), reply(body=chat("3")))
    judge = Judge(judge_file(endpoint.url, workers=1), Letters())
    with pytest.raises(
        InputError, match=r"judge.toml: 2 prompts got no answer \(HTTP 500 out of memory\); answers are"
    ):
        judge.score(make_batch())
    server.script[1:] = [reply(body=chat("3"))]
    del server.seen[:]
    assert judge.score(make_batch()).applies.tolist() == [False, True]


def test_the_key_is_sent_but_not_written_to_disk(serve, judge_file, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setenv("MY_JUDGE_KEY", "secret-123")
    server, endpoint = serve(reply(body=chat("Your key is secret-123.\n4")))
    judge = Judge(judge_file(endpoint.url, key_variable="MY_JUDGE_KEY"), Letters())
    assert judge.score(make_batch()).scores.tolist() == [4.0, 4.0]
    assert server.seen[0][1]["authorization"] == "Bearer secret-123"
    assert "secret" not in (tmp_path / "answers.jsonl").read_text()


# -------------------------------------------------------------------------------------------------- before training
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"rubric": None}, "judge.toml: the field 'rubric' is missing"),
        ({"model": 3}, "judge.toml: the field 'model' must be str"),
        ({"rubrik": "x"}, "has the unknown field 'rubrik'; known fields: url, model, rubric"),
        ({"rubric": "{query}"}, "the rubric in .*judge.toml lacks {response}"),
        ({"max_calls": 0}, "sets max_calls = 0: must be above 0"),
        ({"workers": 501}, r"sets workers = 501: must be above 0 \(workers: 500 at most\)"),
        ({"temperature": -1.0}, "sets temperature = -1.0: must be at least 0"),
        ({"url": "localhost:8000"}, "url localhost:8000: write a URL"),
        ({"url": "http://me:secret@host/v1"}, "the URL is logged, so it can.t contain a password"),
        ({"cache": "/proc/x/answers"}, "judge.toml: cache /proc/x: /proc is not a writable directory"),
        ({"cache": "."}, ". is a directory, not a file"),
        ({"key_variable": "NO_SUCH_VARIABLE"}, "key_variable NO_SUCH_VARIABLE: this environment variable is not set"),
    ],
)
def test_a_judges_file_is_checked_before_training(miniature, judge_file, tmp_path, fields, sentence):
    args = replace(miniature.ppo, out=tmp_path / "ppo", reward="judge:" + judge_file(**{"url": "http://x/v1"} | fields))
    with pytest.raises(InputError, match=sentence) as caught:
        train_ppo.main(args)
    assert not args.out.exists() and "secret" not in str(caught.value)


def test_a_missing_or_invalid_toml_file_raises_input_error(tmp_path):
    with pytest.raises(InputError, match="nowhere.toml"):
        Judge(str(tmp_path / "nowhere.toml"), Letters())
    (tmp_path / "bad.toml").write_text("url = ")
    with pytest.raises(InputError, match="bad.toml isn't a TOML file"):
        Judge(str(tmp_path / "bad.toml"), Letters())


# ------------------------------------------------------------------------------------------------------------- in a run
def test_a_run_is_rewarded_by_a_judge(serve, judge_file, miniature, tmp_path):  # noqa: F811
    server, endpoint = serve(by_length)
    args = replace(miniature.ppo, out=tmp_path / "ppo", total_episodes=8, num_ppo_epochs=1, lr=0.0)
    train_ppo.main(replace(args, reward="judge:" + judge_file(endpoint.url), missing_eos_score=None))
    (metrics,) = read_metrics(args.out)
    summaries = [re.search("(?s)Summary: (.*)\n\nEnd", body["messages"][-1]["content"])[1] for *_, body in server.seen]
    assert len(server.seen) == 8 and 0 <= metrics["reward/judge_no_score"] < 1
    scores = [len(text.split("\n")[0]) for text in summaries if "c" not in text.split("\n")[0]]
    assert metrics["reward/judge"] == pytest.approx(sum(scores) / len(scores))
    assert metrics["objective/score"] == pytest.approx(sum(scores) / 8)
