"""A judge as reward: its file, its prompts, the number that its answer ends in, and what a run may spend."""

import json
import re
from dataclasses import replace

import pytest

import train_ppo
from nanorlhf.errors import InputError
from nanorlhf.rewards import endpoint as endpoint_module
from nanorlhf.rewards.judge import Judge, last_number
from tests.conftest import read_metrics
from tests.evals.test_judge import chat, reply, serve  # noqa: F401  (serve is a fixture)
from tests.rewards.letters import Letters, batch_of

RUBRIC = "Rate the summary.\n\nPost: {query}\n\nSummary: {response}\n\nEnd with a number from 1 to 10."


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("It is short.\nScore: 7", 7.0),
        ("**7**", 7.0),
        ("7/10", 7.0),
        ("Rating: **7.5 / 10**.\n", 7.5),
        ("-1", -1.0),
        ("Score: 7.", 7.0),
        ("between 3 and 5", 5.0),
        ("7 points", None),
        ("I can't say.", None),
        ("1.2.3", None),
        ("", None),
    ],
)
def test_the_number_that_an_answer_ends_in(answer, number):
    assert last_number(answer) == number


@pytest.fixture
def judge_file(tmp_path):
    """Write the file of a judge at a URL."""

    def write(url="http://127.0.0.1:1/v1", **fields):
        fields = {"url": url, "model": "judge-1", "rubric": RUBRIC, "cache": str(tmp_path / "answers.jsonl")} | fields
        path = tmp_path / "judge.toml"
        path.write_text(
            "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items() if value is not None)
        )
        return str(path)

    return write


def by_length(handler):
    """The number of letters of the summary; no number for one with a c."""
    summary = re.search("Summary: (.*)\n", handler.prompt)[1]
    reply(body=chat("I can't say." if "c" in summary else f"Fine.\nScore: **{len(summary)}/10**"))(handler)


# ------------------------------------------------------------------------------------------------------------- scores
def test_a_judges_numbers_are_the_scores_and_no_number_does_not_apply(serve, judge_file):  # noqa: F811
    server, endpoint = serve(by_length)
    judge = Judge(judge_file(endpoint.url, scale=0.5), Letters())
    found = judge.score(batch_of())
    assert found.scores.tolist() == [0.0, 0.5] and found.applies.tolist() == [False, True]
    assert not found.token_rewards.any() and judge.metrics() == {"reward/judge_no_score": 0.5}
    prompts = [body["messages"][-1]["content"] for _, _, body in server.seen]
    assert sorted(prompts) == [RUBRIC.format(query=q, response=r) for q, r in (("a", "abc"), ("ab", "a"))]
    judge.score(batch_of())
    assert len(server.seen) == 2  # from the cache


def test_equal_responses_are_asked_about_once_and_a_text_may_contain_the_fields(serve, judge_file):  # noqa: F811
    server, endpoint = serve(reply(body=chat("3")))
    judge = Judge(judge_file(endpoint.url), Letters())
    assert judge.prompt("{response}", " {query} ") == RUBRIC.replace("{response}", "{query}").replace(
        "Post: {query}", "Post: {response}"
    )
    batch = batch_of()
    batch.query[0], batch.response[0] = batch.query[1].clone(), batch.response[1].clone()
    assert judge.score(batch).scores.tolist() == [3.0, 3.0] and len(server.seen) == 1


def test_the_cap_on_calls_is_of_the_whole_run(serve, judge_file, tmp_path):  # noqa: F811
    server, endpoint = serve(reply(body=chat("3")))
    judge = Judge(judge_file(endpoint.url, max_calls=3), Letters())
    judge.score(batch_of())
    other = batch_of()
    other.response[:, 0] = 5
    sentence = f"judge.toml: max_calls = 3 is spent; answers are kept in {tmp_path}/answers.jsonl"
    with pytest.raises(InputError, match=sentence):
        judge.score(other)
    assert len(server.seen) == 3
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 3


def test_an_endpoint_that_refuses_ends_the_run_in_a_sentence(serve, judge_file):  # noqa: F811
    _, endpoint = serve(reply(401, b"no such key"))
    with pytest.raises(InputError, match="judge.toml: the endpoint refuses: HTTP 401 no such key; answers are kept"):
        Judge(judge_file(endpoint.url), Letters()).score(batch_of())


def test_a_judge_that_fails_ends_the_run_and_a_prompt_that_it_refuses_does_not(serve, judge_file, monkeypatch):  # noqa: F811
    """However few the prompts are: a run that went on without their scores would not be the same run."""
    monkeypatch.setattr(endpoint_module, "TRIES", 1)
    server, endpoint = serve(reply(400, b"too long"), reply(500, b"out of memory"), reply(body=chat("3")))
    judge = Judge(judge_file(endpoint.url, workers=1), Letters())
    with pytest.raises(
        InputError, match=r"judge.toml: 2 prompts got no answer \(HTTP 500 out of memory\); answers are"
    ):
        judge.score(batch_of())
    server.script[1:] = [reply(body=chat("3"))]
    del server.seen[:]
    assert judge.score(batch_of()).applies.tolist() == [False, True]


def test_the_key_is_sent_and_stands_in_no_file(serve, judge_file, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setenv("MY_JUDGE_KEY", "secret-123")
    server, endpoint = serve(reply(body=chat("Your key is secret-123.\n4")))
    judge = Judge(judge_file(endpoint.url, key_variable="MY_JUDGE_KEY"), Letters())
    assert judge.score(batch_of()).scores.tolist() == [4.0, 4.0]
    assert server.seen[0][1]["authorization"] == "Bearer secret-123"
    assert "secret" not in (tmp_path / "answers.jsonl").read_text()


# -------------------------------------------------------------------------------------------------- before training
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"rubric": None}, "judge.toml: the field 'rubric' is missing"),
        ({"model": 3}, "judge.toml: the field 'model' must be str"),
        ({"rubrik": "x"}, "has the unknown field 'rubrik': it may have url, model, rubric"),
        ({"rubric": "{query}"}, "the rubric in .*judge.toml lacks {response}"),
        ({"max_calls": 0}, "sets max_calls = 0: it must be above 0"),
        ({"workers": 501}, r"sets workers = 501: it must be above 0 \(workers: 500 at most\)"),
        ({"temperature": -1.0}, "sets temperature = -1.0: it must be at least 0"),
        ({"url": "localhost:8000"}, "url localhost:8000: write a URL"),
        ({"url": "http://me:secret@host/v1"}, "write the URL without password"),
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


def test_a_file_that_is_not_there_or_no_toml_is_a_sentence(tmp_path):
    with pytest.raises(InputError, match="nowhere.toml"):
        Judge(str(tmp_path / "nowhere.toml"), Letters())
    (tmp_path / "bad.toml").write_text("url = ")
    with pytest.raises(InputError, match="bad.toml is no TOML file"):
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
