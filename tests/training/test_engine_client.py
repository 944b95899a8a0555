"""PPO with rollouts from a server that speaks vLLM's or SGLang's protocol and runs our model."""

import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import train_grpo
import train_ppo
from nanorlhf.checkpoint import load_gpt
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training import engine_client
from nanorlhf.training.settings import SamplerSettings
from tests.conftest import read_metrics, weights
from tests.test_train_grpo import grpo_args
from tests.test_train_ppo import miniature, spy_on  # noqa: F401  its policy sometimes samples EOS


class Server(ThreadingHTTPServer):
    """Serves the model in a directory; `change` corrupts an answer, `replies` are sent before anything else."""

    def __init__(self, kind: str, directory: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.kind, self.lock, self.change, self.replies = kind, threading.Lock(), lambda path, answer: answer, []
        self.asked: list[tuple[str, dict]] = []
        self.load(directory)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def load(self, directory: str) -> None:
        self.directory, self.model, self.tokenizer = directory, load_gpt(directory), load_tokenizer(directory)

    def answer(self, path: str, body: dict | None) -> dict | None:
        """Return the JSON answer; None for an unknown path."""
        vllm, sglang = self.kind == "vllm", self.kind == "sglang"
        if path == "/v1/models":  # SGLang names the model after its directory
            name = "policy" if vllm else self.directory
            return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": self.kind}]}
        if path == "/v1/completions":
            return self.complete(**body)
        if path == "/collective_rpc" and vllm:
            assert body["method"] == "reload_weights"
            self.load(body["kwargs"]["weights_path"])
            return {"results": [None]}
        if path == "/reset_prefix_cache" and vllm:
            return {"success": True}
        if path == "/update_weights_from_disk" and sglang:
            self.load(body["model_path"])
            return {"success": True, "message": "", "num_paused_requests": 0}
        return None

    def complete(
        self, *, model, prompt, seed, max_tokens, temperature, stop_token_ids, logprobs, return_token_ids, **on
    ):
        assert model == self.answer("/v1/models", None)["data"][0]["id"] and logprobs == 1 and return_token_ids
        assert (on["top_p"], on["top_k"], on["min_p"], on["repetition_penalty"], on["n"]) == (1.0, -1, 0.0, 1.0, 1)
        ids, (eos_id,) = torch.tensor([prompt]), stop_token_ids
        for number, bias in on.get("logit_bias", {}).items():
            assert bias == -100 and (int(number) == self.tokenizer.pad_id or int(number) >= self.tokenizer.vocab_size)
        with self.lock:
            model = self.model.forbid(self.tokenizer.pad_id, self.tokenizer.vocab_size)
            written, logprobs = generate(
                model, ids, torch.ones_like(ids, dtype=torch.bool), max_tokens, temperature, eos_id=eos_id, pad_id=-1,
                generator=torch.Generator().manual_seed(seed),
            )  # fmt: skip
        token_ids = [number for number in written[0].tolist() if number != -1]
        choice = {"index": 0, "text": "", "token_ids": token_ids, "prompt_token_ids": prompt}
        choice["finish_reason"] = "stop" if token_ids[-1] == eos_id else "length"
        choice["logprobs"] = {"token_logprobs": logprobs[0, : len(token_ids)].tolist()}
        return {"object": "text_completion", "choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.reply(None)

    def do_POST(self) -> None:
        self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def reply(self, body: dict | None) -> None:
        self.server.asked.append((self.path, body))
        code, text = 200, None
        if self.server.replies:
            code, text = self.server.replies.pop(0)
        else:
            answer = self.server.answer(self.path, body)
            code, text = (
                (404, "Not Found") if answer is None else (200, json.dumps(self.server.change(self.path, answer)))
            )
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture
def ppo(miniature, tmp_path, monkeypatch):  # noqa: F811
    """Two updates of eight responses each, in a fresh directory; retries don't wait."""
    monkeypatch.setattr(engine_client, "WAITS", (0.0, 0.0))
    return replace(miniature.ppo, out=tmp_path / "ppo", total_episodes=16, micro_batch_size=8, num_ppo_epochs=1)


@pytest.fixture(params=["vllm", "sglang"])
def server(request, ppo):
    with Server(request.param, ppo.sft) as server:
        yield server
        server.shutdown()


def paths(server) -> list[str]:
    return [path for path, _ in server.asked]


def pushes(server) -> int:
    return sum(path in ("/collective_rpc", "/update_weights_from_disk") for path in paths(server))


def test_ppo_learns_from_what_the_server_wrote(ppo, server, monkeypatch):
    """Its log-probabilities match the policy's at each update, so it has the weights; equal queries get different
    responses.
    """
    batches = spy_on(monkeypatch, "rollout_metrics")
    args = replace(ppo, sampler=SamplerSettings(url=f"{server.url}/v1/", correction="tis"), lr=1e-2)
    train_grpo.main(grpo_args(args, algorithm="rloo", samples_per_query=2, num_epochs=1))
    assert pushes(server) == 2 and paths(server).count("/v1/completions") == 16
    assert paths(server).count("/reset_prefix_cache") == (2 if server.kind == "vllm" else 0)
    assert Path(server.directory) == ppo.out.absolute() / "rollout_weights"
    for row in read_metrics(ppo.out):
        assert row["policy/sampler_gap"] < 1e-5 and abs(row["policy/tis_weight"] - 1) < 1e-5
        assert row["policy/first_ratio_error"] < 1e-5
    for (batch, *_), _ in batches.calls:
        assert len({tuple(ids) for ids in batch.response.tolist()}) > 6
        assert (batch.response[batch.actions] != load_tokenizer(ppo.sft).pad_id).all()
    moved = weights(load_gpt(ppo.out)) - weights(load_gpt(ppo.sft))
    assert moved.abs().max() > 1e-3


def test_the_same_seed_asks_for_the_same_responses(ppo, server, monkeypatch):
    batches = spy_on(monkeypatch, "rollout_metrics")
    for name in ("one", "two"):
        train_ppo.main(replace(ppo, out=ppo.out / name, sampler=SamplerSettings(url=server.url), total_episodes=8))
    ((one, *_), _), ((two, *_), _) = batches.calls
    assert torch.equal(one.response, two.response)


def test_weights_are_pushed_as_seldom_as_asked_and_at_once_on_resume(ppo, server):
    args = replace(ppo, sampler=SamplerSettings(url=server.url, sync_every=3), total_episodes=32, save_every=2, lr=1e-2)
    spoil = edit(token_ids=None)
    server.change = lambda path, answer: spoil(path, answer) if pushes(server) == 2 else answer
    with pytest.raises(InputError, match="returned no token_ids"):
        train_ppo.main(args)
    assert len(read_metrics(ppo.out)) == 3  # pushed at updates 0 and 3; the last state is from after two updates
    server.asked.clear()
    server.change = lambda path, answer: answer
    server.load(ppo.sft)  # as on another server
    train_ppo.main(replace(args, resume=True))
    gaps = [row["policy/sampler_gap"] for row in read_metrics(ppo.out)]
    assert gaps[0] < 1e-5 < 1e-4 < gaps[1] and gaps[2] < 1e-5 and gaps[3] < 1e-5


def edit(**change):
    """Return a `change` that replaces these fields in the choices of completions."""

    def spoil(path, answer):
        if path == "/v1/completions":
            choice = answer["choices"][0]
            choice |= {name: value(choice) if callable(value) else value for name, value in change.items()}
        return answer

    return spoil


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (edit(token_ids=None), "returned no token_ids with a log-probability each: use a version that knows"),
        (edit(logprobs=None), "returned no token_ids with a log-probability each"),
        (edit(logprobs={"token_logprobs": [-1.0]}, token_ids=[5, 6]), "returned no token_ids with a log-probability"),
        (edit(logprobs={"token_logprobs": [float("nan")]}, token_ids=[5]), "returned no token_ids with a log-prob"),
        (edit(logprobs={"token_logprobs": [10**400]}, token_ids=[5]), "returned no token_ids with a log-prob"),
        (edit(logprobs={"token_logprobs": [0.5]}, token_ids=[5]), "returned no token_ids with a log-prob"),
        (edit(logprobs={"token_logprobs": [-1e400]}, token_ids=[5]), "returned no token_ids with a log-prob"),
        (edit(logprobs={"token_logprobs": "ab"}, token_ids=[5, 6]), "returned no token_ids with a log-prob"),
        (edit(logprobs={"token_logprobs": []}, token_ids=[]), "returned no token_ids with a log-prob"),
        (edit(token_ids={"5": 6}), "returned no token_ids with a log-prob"),
        (edit(token_ids=[True]), "returned no token_ids with a log-prob"),
        (edit(token_ids=[-1], logprobs={"token_logprobs": [-1.0]}), "wrote the id -1, which the policy can't"),
        (edit(token_ids=[10**3000], logprobs={"token_logprobs": [-1.0]}), "wrote the id 1000000"),
        (edit(prompt_token_ids=5), "returned no token_ids with a log-prob"),
        (edit(prompt_token_ids=None), "read a prompt of 0 ids, not the [0-9]+ sent"),
        (edit(token_ids=[99999], logprobs={"token_logprobs": [-1.0]}), "wrote the id 99999, which the policy can't"),
        (edit(token_ids=[7], logprobs={"token_logprobs": [-1.0]}), r"wrote 1 of 12 ids and stopped \(\w+\) without E"),
        (
            edit(prompt_token_ids=lambda choice: [0, *choice["prompt_token_ids"]]),
            "read a prompt of [0-9]+ ids, not the [0-9]+ sent",
        ),
        (lambda path, answer: answer if path != "/v1/completions" else [], "returned no token_ids"),
        (lambda path, answer: {} if path == "/v1/models" else answer, "lists no model at /v1/models: start vLLM or"),
        (
            lambda path, answer: {"data": [{"id": "x", "owned_by": "openai"}]} if path == "/v1/models" else answer,
            "is owned by 'openai': only vLLM and SGLang accept new weights",
        ),
        (
            lambda path, answer: answer | {"success": False} if "success" in answer else answer,
            "did not load the weights in .*sft_that_stops: check its log",
        ),
    ],
)
def test_what_the_policy_cannot_have_written_is_refused(ppo, server, change, sentence):
    server.change = change
    query, tokenizer = torch.tensor([[5, 6, 7]]), server.tokenizer
    with pytest.raises(InputError, match=f"^--sampler.url {server.url} .*{sentence}.*[.]$"):
        known = engine_client.Engine(server.url)
        known.reload(Path(ppo.sft))
        known.write(
            query, query > 0, 12, 1.0, tokenizer.eos_id, tokenizer.pad_id, torch.full((1, 12), 0.5),
            tokenizer.vocab_size, frozenset(), [tokenizer.eos_id],
        )  # fmt: skip


def test_a_server_that_keeps_its_old_weights_is_found_out(ppo, server, monkeypatch):
    monkeypatch.setattr(server, "load", lambda directory: None)
    with pytest.raises(InputError, match="nats per token off the policy's: check that it has loaded"):
        train_ppo.main(replace(ppo, sampler=SamplerSettings(url=server.url), lr=0.5))
    assert len(read_metrics(ppo.out)) == 1


def test_a_busy_server_is_asked_again_and_a_refusal_is_not(ppo, server):
    server.replies[:] = [(503, "busy"), (429, "busy")]
    assert engine_client.Engine(server.url).kind == server.kind and paths(server) == ["/v1/models"] * 3
    server.asked.clear()
    server.replies[:] = [(503, "loading\nthe model.")] * 3
    with pytest.raises(InputError, match=r"answered 503 to /v1/models \(loading the model\): check its log."):
        engine_client.Engine(server.url)
    assert len(server.asked) == 3
    server.asked.clear()
    server.replies[:] = [(401, "")]
    with pytest.raises(InputError, match="answered 401 to /v1/models: check its log."):
        engine_client.Engine(server.url)
    assert len(server.asked) == 1
    server.replies[:] = [(200, "<html>")]
    with pytest.raises(InputError, match="answered /v1/models with no JSON"):
        engine_client.Engine(server.url)


def http_answer(body: bytes, status: str = "200 OK", **headers: object) -> bytes:
    fields = {"Content-Length": len(body)} | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value is not None)
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


MODELS = json.dumps({"data": [{"id": "x", "owned_by": "vllm"}]}).encode()
HOSTILE = {  # what a server sends (None: nothing; a list: one item every 0.05 s), and the expected error
    "hangs": (None, "did not answer /v1/models in 1 s"),
    "hangs after the header": ([http_answer(MODELS)[:-1], *[b""] * 60], "did not answer /v1/models in 1 s"),
    "drips its header": ([b"HTTP/1.1 200 OK\r\n", *[b"a: b\r\n"] * 60], "did not answer /v1/models in 1 s"),
    "drips its header byte by byte": (
        [b"HTTP/1.1 200 OK\r\na: ", *[b"b"] * 60], "did not answer /v1/models in 1 s",
    ),
    "drips its body": ([http_answer(b"", Content_Length=1000), *[b"["] * 60], "did not answer /v1/models in 1 s"),
    "continues for ever": ([b"HTTP/1.1 100 Continue\r\n\r\n"] * 60, "did not answer /v1/models in 1 s"),
    "says nothing": (b"", "gave no answer to /v1/models .*(disconnected|reset)"),
    "is no HTTP server": (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "gave no answer to /v1/models .illegal status line"),
    "has a status of letters": (http_answer(MODELS, "ok"), "gave no answer to /v1/models .illegal status line"),
    "has a line without end": (b"HTTP/1.1 200 " + b"a" * 99999, "gave no answer to /v1/models"),
    "promises more than it sends": (http_answer(MODELS, Content_Length=999), "gave no answer to /v1/models .*closed"),
    "promises less than it sends": (http_answer(MODELS, Content_Length=9), "answered /v1/models with no JSON"),
    "promises a negative length": (http_answer(b"", Content_Length=-5), "gave no answer to /v1/models .bad Content"),
    "cuts a chunk": (
        http_answer(b"fff\r\nabc", Content_Length=None, Transfer_Encoding="chunked"), "gave no answer to .*closed",
    ),
    "sends too much": (http_answer(b" " * 5000), "sent an answer of more than 4,096 bytes"),
    "sends too much in chunks": (
        http_answer(b"1388\r\n" + b" " * 5000 + b"\r\n0\r\n\r\n", Content_Length=None, Transfer_Encoding="chunked"),
        "sent an answer of more than 4,096 bytes",
    ),
    "redirects": (http_answer(b"", "302 Found", Location="http://127.0.0.1:9/"), "answered 302 to /v1/models: check"),
    "redirects to a file": (http_answer(b"", "301 Moved", Location="file:///etc/hosts"), "answered 301 to /v1/models"),
    "fails": (http_answer(b"out\nof memory.", "500 Oops"), r"answered 500 to /v1/models \(out of memory\): check"),
    "asks for a password": (http_answer(b"", "401 No"), "answered 401 to /v1/models: check its log"),
    "has no content": (http_answer(b"", "204 Nothing"), "answered 204 to /v1/models"),
    "sends a page": (http_answer(b"<html>"), "answered /v1/models with no JSON"),
    "sends bytes": (http_answer(bytes(range(256))), "answered /v1/models with no JSON"),
    "sends deep JSON": (http_answer(b"[" * 2000 + b"]" * 2000), "no JSON|lists no model"),
    "sends a number of 5000 digits": (http_answer(b"9" * 4090), "lists no model at /v1/models"),
    "lists a number": (http_answer(b'{"data": 3}'), "lists no model at /v1/models"),
    "lists a model without a name": (
        http_answer(b'{"data": [{"id": 3, "owned_by": "vllm"}]}'), "lists no model at /v1/models",
    ),
    "lists an owner that is a list": (
        http_answer(b'{"data": [{"id": "x", "owned_by": ["vllm"]}]}'), r"is owned by \['vllm'\]: only vLLM and SGLang",
    ),
}  # fmt: skip


@pytest.fixture
def raw_server():
    """A server that sends the same bytes to each client, then closes; `sent` is what it sends, as in HOSTILE."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket, sent: bytes | list[bytes] | None) -> None:
            with connection, suppress(OSError):
                connection.recv(10_000)
                for piece in sent if isinstance(sent, list) else [sent or b""]:
                    connection.sendall(piece)
                    time.sleep(0.05 if isinstance(sent, list) else 0.0)
                if sent is None:
                    time.sleep(3)

        def accept(sent: bytes | list[bytes] | None) -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0], sent), daemon=True).start()

        def start(sent: bytes | list[bytes] | None) -> str:
            threading.Thread(target=accept, args=(sent,), daemon=True).start()
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield start


@pytest.mark.parametrize("case", HOSTILE)
def test_whatever_a_server_sends_is_one_sentence_in_bounded_time(raw_server, monkeypatch, case):
    monkeypatch.setattr(engine_client, "WAITS", (0.0,))
    monkeypatch.setattr(engine_client, "TIMEOUT", 0.6)
    monkeypatch.setattr(engine_client, "MAX_ANSWER", 4096)
    sent, sentence = HOSTILE[case]
    url, start = raw_server(sent), time.monotonic()
    with pytest.raises(InputError, match=f"^--sampler.url {url} .*{sentence}.*[.]$") as error:
        engine_client.Engine(url)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600 and time.monotonic() - start < 2


def test_a_hostile_completion_is_refused_and_leaves_no_run(ppo, server):
    """If one row of a rollout fails while others are answered, the threads end and nothing is written."""
    first = edit(prompt_token_ids=5)
    server.change = lambda path, answer: first(path, answer) if paths(server).count("/v1/completions") > 3 else answer
    with pytest.raises(InputError, match="returned no token_ids with a log-probability each"):
        train_ppo.main(replace(ppo, sampler=SamplerSettings(url=server.url)))
    assert not (ppo.out / "metrics.jsonl").exists()


def test_vllm_without_its_development_mode_is_told_so(ppo):
    with Server("vllm", ppo.sft) as server:
        known = engine_client.Engine(server.url)
        server.kind = "other"
        with pytest.raises(InputError, match="answered 404 to /collective_rpc .*: start vLLM with VLLM_SERVER_DEV"):
            known.reload(ppo.out)
        server.shutdown()


def test_a_server_that_is_slow_or_not_there_is_named(ppo, server, monkeypatch):
    monkeypatch.setattr(engine_client, "TIMEOUT", 0.2)
    known = engine_client.Engine(server.url)
    server.change = lambda path, answer: time.sleep(0.5) or answer
    with pytest.raises(InputError, match=f"{server.url} did not answer /v1/models in 0 s: reduce its load."):
        known.served()
    server.shutdown()
    server.server_close()
    with pytest.raises(InputError, match=f"{server.url} gave no answer to /v1/models .*refused.*: start it, or check"):
        engine_client.Engine(server.url)
    for url in ("localhost:8000", "file:///etc/hosts", "ftp://x"):
        with pytest.raises(InputError, match=f"--sampler.url {url}: write http://HOST:PORT"):
            engine_client.Engine(url)


@pytest.mark.parametrize("url", ["http://me:secret@127.0.0.1:9", "me:secret@host", "http://127.0.0.1:9/?key=secret"])
def test_a_password_in_the_url_is_refused_and_written_nowhere(ppo, url):
    with pytest.raises(InputError, match="^--sampler.url: the URL is logged, so it can.t contain a password") as error:
        train_ppo.main(replace(ppo, sampler=SamplerSettings(url=url)))
    assert "secret" not in str(error.value) and not ppo.out.exists()


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"top_p": 0.9}], ids=str)
def test_what_the_server_decides_is_no_flag(ppo, change):
    with pytest.raises(InputError, match="can.t be combined with --sampler.dtype or"):
        train_ppo.main(replace(ppo, sampler=SamplerSettings(url="http://127.0.0.1:9", **change)))
    assert not ppo.out.exists()
