"""The judge: its prompt, its parser, and its behaviour with a misbehaving server on loopback."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorlhf.errors import InputError
from nanorlhf.evals import judge
from nanorlhf.evals.judge import Pair, judge_pairs, load_verdicts, make_prompt, orders, parse
from nanorlhf.rewards import endpoint as endpoint_module
from nanorlhf.rewards.endpoint import Endpoint, ask_all, completions_url, key_from, read_cache

PAIR = Pair("POST: I lost my keys.\n\nTL;DR:", " keys lost", " no keys")


# ---------------------------------------------------------------------------------------------------------- the parser
@pytest.mark.parametrize("mark", ["{}", '"{}"', "**{}**", "Summary {}", '**"{}"**', "**Summary {}**", '"Summary {}"'])
@pytest.mark.parametrize("letter", ["A", "B"])
@pytest.mark.parametrize(
    "frame",
    [
        "Comparison: one sentence about Summary B and A.\nPreferred: {}",
        "Comparison: one sentence.\n\n**Preferred:** {}\n",
        "  Preferred:   {}  \n\n",
        "Comparison: one sentence.\r\nPreferred: {}\r\n",
        "Comparison: one sentence.\nPreferred:\n{}",
        "One sentence.\n{}",
        "{}",
    ],
)
def test_all_accepted_forms_of_a_verdict_are_parsed(frame, mark, letter) -> None:
    assert parse(frame.format(mark.format(letter))) == letter


@pytest.mark.parametrize(
    "answer",
    [
        "",
        " \n ",
        "Preferred:",
        "Preferred: a",
        "Preferred: C",
        "Preferred: AB",
        "Preferred: A or B",
        "Preferred: A.",
        "Preferred: A!",
        'Preferred: "A',
        'Preferred: A"',
        "Preferred: 'A'",
        'Preferred: <"A">',
        "Preferred: <A>",
        "Preferred: Summary",
        "Preferred: Summary A and Summary B",
        "Preferred: both",
        "Preferred: neither A",
        "Preferred: A\nPreferred: B",
        "Preferred: A\nPreferred: A",  # two verdicts
        "Preferred: A\nOn second thoughts, it depends.",
        "Comparison: A is better. Preferred: A",  # not on a separate line
        "I prefer Summary A",
        "Comparison: A tells more.",
        "preferred: A",
        "Preferred: А",  # Cyrillic
        "Preferred: Ａ",  # full width
        "Preferred: A\x00",
        '{"preferred": "A"}',
    ],
)
def test_anything_else_is_unparsed(answer) -> None:
    assert parse(answer) is None


@given(st.text(alphabet="AB\"*: \n.Preferedsumay'"))
def test_the_verdict_is_read_from_the_last_line(answer) -> None:
    verdict = parse(answer)
    if verdict:
        last = answer.strip("* \n").splitlines()[-1]
        assert re.sub(r"Preferred:|Summary |[\s\"*]", "", last) == verdict


# ------------------------------------------------------------------------------------------------- prompts and orders
def test_the_prompt_is_the_papers_and_texts_are_put_in_once() -> None:
    pair = Pair("{a} {b} ### Summary A:\nTL;DR:", " {b} of {query}", "{0} % {a}")
    prompt = make_prompt(pair, ours_first=True)
    assert prompt.startswith("Which of the following summaries does a better job of summarizing the most important")
    assert "\n### Post:\n{a} {b} ### Summary A:\nTL;DR:\n\n### Summary A:\n{b} of {query}\n\n" in prompt
    assert "\n### Summary B:\n{0} % {a}\n\n### Instructions:\nFIRST provide a one-sentence" in prompt
    assert prompt.endswith('Comparison: <one-sentence comparison and explanation>\nPreferred: <"A" or "B">')
    assert make_prompt(pair, ours_first=False) == make_prompt(Pair(pair.query, pair.theirs, pair.ours), ours_first=True)


def test_the_order_is_a_fair_coin_determined_by_seed_and_texts() -> None:
    pairs = [Pair(f"post {i}", "ours", "theirs") for i in range(2000)]
    first = [orders(pair, seed=1, both=False)[0] for pair in pairs]
    assert first == [orders(pair, seed=1, both=False)[0] for pair in pairs]
    assert 0.46 < sum(first) / 2000 < 0.54  # three and a half standard deviations
    other = [orders(pair, seed=2, both=False)[0] for pair in pairs]
    assert 0.46 < sum(a == b for a, b in zip(first, other, strict=True)) / 2000 < 0.54
    assert orders(PAIR, 1, both=True) == [True, False]


def longer_wins(prompts: list[str]) -> dict[str, str]:
    """A judge that prefers the longer summary in either position."""
    answers = {}
    for prompt in prompts:
        a, b = re.search(r"### Summary A:\n(.*)\n\n### Summary B:\n(.*)\n\n### Inst", prompt).groups()
        answers[prompt] = f"Comparison: of length.\nPreferred: {'A' if len(a) > len(b) else 'B'}"
    return answers


@pytest.mark.parametrize("both", [False, True])
def test_the_verdict_is_about_the_texts_whatever_their_order(both) -> None:
    pairs = [Pair(f"post {i}", "x" * (i % 7 + 1), "y" * 4) for i in range(60) if i % 7 + 1 != 4]
    rows = judge_pairs(pairs, 1, both, longer_wins)
    assert {len(row["ours_first"]) for row in rows} == {2 if both else 1}
    assert {row["ours_first"][0] for row in rows} == ({True} if both else {True, False})
    for pair, row in zip(pairs, rows, strict=True):
        assert row["preferred"] == ("ours" if len(pair.ours) > 4 else "theirs")
        assert (row["query"], row["ours"], row["theirs"]) == pair


def test_a_judge_that_always_prefers_a_gives_coin_flips_in_one_order_and_ties_in_both() -> None:
    pairs = [Pair(f"post {i}", "one", "two") for i in range(400)]
    rows = judge_pairs(pairs, 3, False, lambda prompts: dict.fromkeys(prompts, "Preferred: A"))
    assert {row["preferred"] for row in rows} == {"ours", "theirs"}
    assert [row["preferred"] == "ours" for row in rows] == [row["ours_first"][0] for row in rows]
    rows = judge_pairs(pairs, 3, True, lambda prompts: dict.fromkeys(prompts, "Preferred: A"))
    assert {row["preferred"] for row in rows} == {"tie"}


def test_missing_verdicts_and_missing_answers_are_distinguished() -> None:
    def first_only(prompts: list[str]) -> dict[str, str]:
        return {prompts[0]: "Preferred: A", prompts[1]: "I cannot say."}

    assert judge_pairs([PAIR], 1, True, first_only)[0]["preferred"] == "unparsed"
    assert judge_pairs([PAIR], 1, True, lambda p: {p[0]: "Preferred: A"})[0]["preferred"] == "unanswered"
    assert judge_pairs([PAIR], 1, False, lambda p: {})[0] | {"ours_first": []} == {
        **PAIR._asdict(), "ours_first": [], "answers": [None], "preferred": "unanswered",
    }  # fmt: skip


def test_equal_texts_are_a_tie_and_equal_prompts_are_asked_once() -> None:
    asked = []

    def ask(prompts: list[str]) -> dict[str, str]:
        asked.extend(prompts)
        return dict.fromkeys(prompts, "Preferred: A")

    rows = judge_pairs([PAIR, Pair("q", " same", "same "), PAIR], 1, False, ask)
    assert [row["preferred"] for row in rows] == [rows[0]["preferred"], "tie", rows[0]["preferred"]]
    assert len(asked) == 1 and rows[1]["answers"] == []


# -------------------------------------------------------------------------------------------------------- verdict files
def test_verdicts_come_back_from_the_file_that_they_were_written_to(tmp_path) -> None:
    pairs = [PAIR, Pair("q", "a\nb", "c"), Pair("q", "same", "same"), Pair("r", "a", "é")]
    rows = judge_pairs(pairs, 1, False, lambda p: {p[0]: "Preferred: A", p[1]: "?"})
    judge.dataset.write_jsonl(tmp_path / "verdicts.jsonl", rows)
    verdicts = load_verdicts(tmp_path / "verdicts.jsonl")
    assert [verdicts[Pair(*(text.strip() for text in pair))] for pair in pairs] == [row["preferred"] for row in rows]
    assert [row["preferred"] for row in rows][1:] == ["unparsed", "tie", "unanswered"]


ROW = {**PAIR._asdict(), "preferred": "ours"}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({**ROW, "preferred": "A"}, r":2: the field 'preferred' is 'A'; expected one of ours, tie, theirs"),
        ({**ROW, "preferred": None}, r":2: the field 'preferred' must be str"),
        ({"query": "q", "ours": "a", "preferred": "ours"}, r":2: the field 'theirs' is missing"),
        ({**ROW, "preferred": "theirs"}, r":2: an earlier line has the same pair with 'preferred' 'ours'"),
    ],
)
def test_a_bad_row_of_a_verdict_file_is_named(tmp_path, row, sentence) -> None:
    path = tmp_path / "verdicts.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(InputError, match=sentence):
        load_verdicts(path)


# --------------------------------------------------------------------------------------------------- the HTTP endpoint
Reply = Callable[[BaseHTTPRequestHandler], None]


def chat(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps({"id": "1", "object": "chat.completion", "choices": [{"index": 0, "message": message}]}).encode()


def reply(status: int = 200, body: bytes = b"", **headers: str) -> Reply:
    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Connection", "close")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return send


def fine(letter: str = "A") -> Reply:
    return reply(body=chat(f"Comparison: so.\nPreferred: {letter}"))


def drop(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def drop_midway(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + chat("Preferred: A")[:-3])
    drop(handler)


def not_http(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")
    drop(handler)


class Server:
    """Answer the n-th request with the n-th entry of `script`, and later requests with the last one."""

    def __init__(self, script: list[Reply]):
        self.script, self.seen, self.lock = script, [], threading.Lock()
        self.released = threading.Event()  # ends the wait of slow replies
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.prompt = body["messages"][-1]["content"]
                with outer.lock:
                    number = len(outer.seen)
                    outer.seen.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                self.close_connection = True
                try:
                    outer.script[min(number, len(outer.script) - 1)](self)
                except OSError:
                    pass  # the client has disconnected

            def do_GET(self) -> None:  # sent if a redirect is followed
                with outer.lock:
                    outer.seen.append((self.path, dict(self.headers), None))
                fine()(self)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def slow(self, handler: BaseHTTPRequestHandler) -> None:
        self.released.wait(60)

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def serve(monkeypatch) -> Iterator[Callable[..., tuple[Server, Endpoint]]]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    servers = []

    def start(*script: Reply, **settings: object) -> tuple[Server, Endpoint]:
        servers.append(Server(list(script)))
        url = completions_url("--judge-url", f"http://127.0.0.1:{servers[-1].http.server_port}/v1")
        settings = {"workers": 1, "timeout": 30.0} | settings
        return servers[-1], Endpoint(url=url, model="judge-1", **settings)

    yield start
    for server in servers:
        server.close()


def test_a_request_is_a_chat_completion_with_the_prompt_and_the_key(serve, tmp_path) -> None:
    server, endpoint = serve(fine("B"), key="sk-secret", temperature=0.0, max_tokens=99)
    answers, account = ask_all(["which one? é"], endpoint, tmp_path / "deep" / "cache.jsonl")
    assert answers == {"which one? é": "Comparison: so.\nPreferred: B"}
    assert account == {"num_calls": 1, "stopped": "", "last_error": "", "failure": ""}
    ((path, headers, body),) = server.seen
    assert path == "/v1/chat/completions" and headers["authorization"] == "Bearer sk-secret"
    assert body == {
        "model": "judge-1", "temperature": 0.0, "max_tokens": 99,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "which one? é"},
        ],
    }  # fmt: skip


def test_settings_that_are_none_and_a_key_that_is_none_are_not_sent(serve, tmp_path, monkeypatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):  # the library would read the key from here
        monkeypatch.setenv(name, "sk-of-another-endpoint")
    server, endpoint = serve(fine(), temperature=None, max_tokens=None)
    ask_all(["p"], endpoint, tmp_path / "cache.jsonl")
    _, headers, body = server.seen[0]
    assert body.keys() == {"model", "messages"} and "sk-of" not in str(headers)
    assert "authorization" not in headers


@pytest.mark.parametrize(
    "bad",
    [
        reply(429, b"slow down", Retry_After="0.01"),
        reply(429, b"slow down", Retry_After="soon"),
        reply(500, b"oops"),
        reply(503),
        reply(408),
        drop,
        drop_midway,
        not_http,
    ],
)
def test_temporary_errors_are_retried(serve, tmp_path, bad) -> None:
    server, endpoint = serve(bad, bad, fine())
    answers, account = ask_all(["p"], endpoint, tmp_path / "cache.jsonl")
    assert parse(answers["p"]) == "A" and len(server.seen) == 3
    assert account == {"num_calls": 3, "stopped": "", "last_error": "", "failure": ""}


@pytest.mark.parametrize(
    "garbage",
    [
        b"<html>garbage</html>",
        b"\xff\xfe\x00",
        b"",
        b"[]",
        b"7",
        b'{"choices": []}',
        b'{"choices": [{"message": {"content": null}}]}',
        b'{"choices": [{"message": {"content": ["A"]}}]}',
        b'{"choices": [{"message": "A"}]}',
        b'{"error": "overloaded"}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"choices": [{"message": {"content": "Preferred: \\ud800 A"}}]}',
        b'{"choices": ' + b"9" * 5000 + b"}",
        chat("Preferred: A")[:-2],
        chat("Preferred: A") + b"}",
    ],
)
def test_an_answer_that_is_not_a_chat_completion_is_skipped(serve, tmp_path, garbage) -> None:
    _, endpoint = serve(reply(200, garbage), fine())
    answers, account = ask_all(["p", "q"], endpoint, tmp_path / "cache.jsonl")
    assert answers.keys() == {"q"} and "not a chat completion (" in account["last_error"]
    assert len(read_cache((tmp_path / "cache.jsonl").read_bytes())) == 1


def drip(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999999\r\n\r\n")
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.05)


def drip_an_error(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 500 Oops\r\nContent-Length: 999999\r\n\r\n")
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.05)


def drip_headers(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for _ in range(100):
        handler.wfile.write(b"a")
        time.sleep(0.05)


@pytest.mark.parametrize("slow", [drip, drip_an_error, drip_headers])
def test_an_endless_slow_answer_is_aborted(serve, tmp_path, monkeypatch, slow) -> None:
    monkeypatch.setattr(endpoint_module, "TRIES", 2)
    monkeypatch.setattr(endpoint_module, "LONGEST", 1)
    server, endpoint = serve(slow, slow, fine(), timeout=0.3)
    start = time.monotonic()
    answers, account = ask_all(["p", "q"], endpoint, tmp_path / "cache.jsonl")
    assert answers.keys() == {"q"} and len(server.seen) == 3 and time.monotonic() - start < 3
    assert "never ends" in account["last_error"]


@pytest.mark.parametrize("status", [200, 400, 500])
def test_an_answer_that_is_too_long_is_skipped_without_retry(serve, tmp_path, monkeypatch, status) -> None:
    monkeypatch.setattr(endpoint_module, "MAX_ANSWER", 9000)
    server, endpoint = serve(reply(status, b" " * 10_000), fine())
    answers, account = ask_all(["p", "q"], endpoint, tmp_path / "cache.jsonl")
    assert answers.keys() == {"q"} and len(server.seen) == 2
    assert account["last_error"] == "an answer of more than 9,000 bytes"


def test_a_request_to_a_hanging_server_is_retried(serve, tmp_path) -> None:
    server, endpoint = serve(lambda h: server.slow(h), fine(), timeout=1.0)
    answers, account = ask_all(["p"], endpoint, tmp_path / "cache.jsonl")
    assert parse(answers["p"]) == "A" and account["num_calls"] == 2


def test_a_prompt_without_an_answer_is_skipped(serve, tmp_path) -> None:
    server, endpoint = serve(fine(), *[reply(500, b"broken")] * endpoint_module.TRIES, fine("B"))
    answers, account = ask_all(["p", "q", "r"], endpoint, tmp_path / "cache.jsonl")
    assert answers.keys() == {"p", "r"} and len(server.seen) == endpoint_module.TRIES + 2
    errors = dict.fromkeys(("last_error", "failure"), "HTTP 500 broken")
    assert account == {"num_calls": endpoint_module.TRIES + 2, "stopped": "", **errors}


def test_a_rejected_prompt_costs_one_call(serve, tmp_path) -> None:
    server, endpoint = serve(reply(400, b'{"error": "content filter"}'), fine())
    answers, account = ask_all(["p", "q"], endpoint, tmp_path / "cache.jsonl")
    assert answers.keys() == {"q"} and len(server.seen) == 2 and "content filter" in account["last_error"]
    assert account["failure"] == ""  # rejects the prompt, not the client


@pytest.mark.parametrize("status", [301, 302, 307, 401, 403, 404])
def test_a_rejecting_endpoint_stops_at_once_and_redirects_are_not_followed(serve, tmp_path, status) -> None:
    elsewhere, _ = serve(fine())
    target = f"http://127.0.0.1:{elsewhere.http.server_port}/v1/chat/completions"
    server, endpoint = serve(fine(), reply(status, b"no", Location=target), key="sk-secret")
    answers, account = ask_all([f"p{i}" for i in range(9)], endpoint, tmp_path / "cache.jsonl")
    assert len(answers) == 1 and len(server.seen) == 2 and elsewhere.seen == []
    assert account["stopped"] == f"the endpoint refuses: HTTP {status} no"


def test_ten_unanswered_prompts_in_a_row_stop_the_judge(serve, tmp_path) -> None:
    server, endpoint = serve(reply(400, b"temperature is not supported"))
    answers, account = ask_all([f"p{i}" for i in range(50)], endpoint, tmp_path / "cache.jsonl")
    assert answers == {} and len(server.seen) == 10
    assert account["stopped"] == "10 prompts in a row got no answer (HTTP 400 temperature is not supported)"


def test_a_missing_server_is_reported_without_an_exception(serve, tmp_path) -> None:
    with socket.socket() as free:  # bound but not listening: connections are refused
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1/chat/completions"
        endpoint = Endpoint(url=url, model="m")
        answers, account = ask_all([f"p{i}" for i in range(20)], endpoint, tmp_path / "cache.jsonl")
    assert answers == {} and "10 prompts in a row got no answer" in account["stopped"]
    assert "refused" in account["last_error"]


def test_the_cap_stops_requests_and_keeps_verdicts(serve, tmp_path) -> None:
    server, endpoint = serve(reply(500), fine(), max_calls=4, workers=3)
    cache = tmp_path / "cache.jsonl"
    prompts = [f"p{i}" for i in range(10)]
    answers, account = ask_all(prompts, endpoint, cache)
    assert len(server.seen) == account["num_calls"] == 4 and len(answers) == 3  # a failed attempt counts as a call
    assert account["stopped"] == "the cap of 4 calls is reached"
    more, account = ask_all(prompts, endpoint, cache)
    assert len(more) == 7 and answers.items() <= more.items() and len(server.seen) == 8
    everything, account = ask_all(prompts, replace(endpoint, max_calls=3), cache)
    assert len(everything) == 10 and account == {"num_calls": 3, "stopped": "", "last_error": "", "failure": ""}
    assert ask_all(prompts, replace(endpoint, max_calls=0), cache)[0] == everything and len(server.seen) == 11


def test_requests_run_side_by_side_and_answers_find_their_prompts(serve, tmp_path) -> None:
    together = threading.Barrier(4)  # breaks, and fails the test, unless four requests arrive at once

    def echo(handler: BaseHTTPRequestHandler) -> None:
        together.wait(30)
        reply(body=chat(f"echo {handler.prompt}"))(handler)

    _, endpoint = serve(echo, workers=4)
    answers, _ = ask_all([f"p{i}" for i in range(8)], endpoint, tmp_path / "cache.jsonl")
    assert answers == {f"p{i}": f"echo p{i}" for i in range(8)}


# ----------------------------------------------------------------------------------------------------------- the cache
def test_another_model_prompt_url_or_temperature_is_another_entry(serve, tmp_path) -> None:
    server, endpoint = serve(fine())
    cache = tmp_path / "cache.jsonl"
    for changed in (endpoint, replace(endpoint, model="judge-2"), replace(endpoint, temperature=1.0), endpoint):
        ask_all(["p"], changed, cache)
    assert len(server.seen) == 3
    ask_all(["q"], endpoint, cache)
    other, elsewhere = serve(fine())
    ask_all(["p"], elsewhere, cache)
    assert len(server.seen) == 4 and len(other.seen) == 1
    ask_all(["p"], replace(endpoint, key="k", workers=3, timeout=9.0, max_calls=7), cache)  # don't change the answer
    assert len(server.seen) == 4


@given(st.data())
def test_a_cache_cut_off_anywhere_loses_its_last_entry_at_most(data) -> None:
    entries = {f"key{i}": f"answer {i}\n\u2028é" for i in range(3)}
    lines = [json.dumps({"key": key, "answer": answer}).encode() + b"\n" for key, answer in entries.items()]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    kept = read_cache(whole[:cut])
    assert kept.items() <= entries.items()
    assert len(kept) >= sum(cut >= len(b"".join(lines[: i + 1])) for i in range(3))
    # and entries appended after the torn line are read
    again = whole[:cut] + (b"" if whole[:cut].endswith(b"\n") or not cut else b"\n") + lines[0]
    assert read_cache(again) == kept | {"key0": entries["key0"]}


def test_a_run_continues_after_a_line_that_a_kill_cut_short(serve, tmp_path) -> None:
    server, endpoint = serve(fine())
    cache = tmp_path / "cache.jsonl"
    ask_all(["p", "q"], endpoint, cache)
    whole = cache.read_bytes()
    cache.write_bytes(whole[:-9])
    answers, account = ask_all(["p", "q", "r"], endpoint, cache)
    assert account["num_calls"] == 2 and answers.keys() == {"p", "q", "r"}
    assert cache.read_bytes().startswith(whole[:-9] + b"\n")  # appended to, not rewritten
    assert ask_all(["p", "q", "r"], endpoint, cache)[1]["num_calls"] == 0


def test_each_answer_is_on_disk_before_the_run_ends(serve, tmp_path) -> None:
    cache = tmp_path / "cache.jsonl"
    seen = []

    def look(handler: BaseHTTPRequestHandler) -> None:
        for _ in range(3000):  # the first answer is written while this request waits
            if cache.exists() and cache.read_bytes().endswith(b"\n"):
                break
            time.sleep(0.01)
        seen.append(len(read_cache(cache.read_bytes())))
        fine()(handler)

    _, endpoint = serve(fine(), look)
    ask_all(["p", "q"], endpoint, cache)
    assert seen == [1]


def test_an_interrupt_keeps_what_was_answered_and_sends_no_further_request(serve, tmp_path, monkeypatch) -> None:
    def interrupted(futures: dict) -> Iterator:
        yield next(iter(futures))
        raise KeyboardInterrupt

    monkeypatch.setattr(endpoint_module, "as_completed", interrupted)
    server, endpoint = serve(fine(), lambda h: server.slow(h), timeout=1.0)
    with pytest.raises(KeyboardInterrupt):
        ask_all([f"p{i}" for i in range(9)], endpoint, tmp_path / "cache.jsonl")
    assert len(server.seen) <= 2 and len(read_cache((tmp_path / "cache.jsonl").read_bytes())) == 1


# ----------------------------------------------------------------------------------------------------- key and address
def test_the_key_is_written_nowhere_even_if_the_server_repeats_it(serve, tmp_path, capfd) -> None:
    repeats = reply(body=chat("You sent sk-secret.\nPreferred: A"))
    _, endpoint = serve(repeats, reply(401, b"wrong key sk-secret"), key="sk-secret")
    answers, account = ask_all(["p", "q"], endpoint, tmp_path / "cache.jsonl")
    assert answers["p"] == "You sent [key].\nPreferred: A" and "[key]" in account["stopped"]
    said = "".join(capfd.readouterr()) + (tmp_path / "cache.jsonl").read_text() + repr((endpoint, account, answers))
    assert "sk-secret" not in said
    garbage, endpoint = serve(reply(200, b"sk-secret"), key="sk-secret")
    assert "sk-secret" not in repr(ask_all(["p"], endpoint, tmp_path / "cache.jsonl"))


def test_the_key_comes_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("A_KEY", " sk-1\n")
    assert key_from("--flag", "A_KEY") == "sk-1"
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(InputError, match="--flag NO_KEY: this environment variable is not set"):
        key_from("--flag", "NO_KEY")
    monkeypatch.setenv("A_KEY", "sk\nwith a break")
    with pytest.raises(InputError, match="--flag A_KEY: the key contains a character") as caught:
        key_from("--flag", "A_KEY")
    assert "break" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "full"),
    [
        ("http://localhost:8000/v1", "http://localhost:8000/v1/chat/completions"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1/chat/completions"),
        ("https://api.openai.com/v1/chat/completions", "https://api.openai.com/v1/chat/completions"),
        ("http://[::1]:8080", "http://[::1]:8080/chat/completions"),
    ],
)
def test_an_address_may_be_the_base_or_the_whole(url, full) -> None:
    assert completions_url("--judge-url", url) == full


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "ftp://x/v1", "http://", "http://x:0/v1", "http://x:99999/v1", "http://x y/v1", "http://ü/v1",
     "http://user:secret@x/v1", "http://x/v1?key=secret", "http://x/v1#secret", "http://x/v1/?a=1&key=secret",
     "user:secret@x:8000/v1", "ftp://user:secret@x/v1", "http://user:se/cr@et@x/v1", "x/v1?key=secret",
     "http://user:secret@x:99999/v1", "file:///etc/passwd", ""],
)  # fmt: skip
def test_an_invalid_url_raises_input_error_without_repeating_its_secret(url) -> None:
    with pytest.raises(InputError, match="^--judge-url") as caught:
        completions_url("--judge-url", url)
    assert not re.search("secret|se/cr|et@x", str(caught.value))


def test_without_prompts_there_is_no_file_and_no_request(serve, tmp_path) -> None:
    server, endpoint = serve(fine())
    assert ask_all([], endpoint, tmp_path / "none" / "cache.jsonl")[0] == {}
    assert not (tmp_path / "none").exists() and server.seen == []
