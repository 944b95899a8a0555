"""Client of a chat model behind a URL, for judges in evaluations and rewards.

Answers are cached on disk, so that no request is paid for twice; a cap on calls limits the cost of a run.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanorlhf import dataset
from nanorlhf.cli import check_url
from nanorlhf.errors import InputError
from nanorlhf.files import read_bytes
from nanorlhf.progress import Progress
from nanorlhf.rewards.limits import limits

SYSTEM = "You are a helpful assistant."
TRIES = 6  # per prompt, if the endpoint is busy or slow
GIVE_UP = 10  # consecutive prompts without an answer: then the prompts aren't the problem
REFUSED = (400, 413, 422)  # only this prompt is rejected: too long, or filtered
BUSY = (408, 409, 429)  # retried by the library, like all from 500 on
MAX_ANSWER = 2**24  # bytes: 16 MiB; answers usually have a few thousand
LONGEST = 10  # maximum time of a slow answer, in timeouts
MAX_CACHE = 2**30  # bytes of the cache: a million answers


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    url: str  # of chat completions
    model: str
    key: str | None = field(default=None, repr=False)  # sent as a bearer token, never written to disk
    temperature: float | None = 0.0
    max_tokens: int | None = 512
    max_calls: int = 1000  # requests, retries included: a timed-out request may be charged too
    workers: int = 8  # concurrent requests
    timeout: float = 60.0  # seconds without a byte

    def body(self, prompt: str) -> dict:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        settings = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {"model": self.model, "messages": messages} | {k: v for k, v in settings.items() if v is not None}

    def cache_key(self, prompt: str) -> str:
        return hashlib.sha256(json.dumps([self.url, self.body(prompt)], sort_keys=True).encode()).hexdigest()


def completions_url(flag: str, url: str) -> str:
    """Return the URL of chat completions: http://localhost:8000/v1 -> http://localhost:8000/v1/chat/completions.

    Raises InputError as `check_url` does.
    """
    check_url(flag, url, "write a URL such as http://localhost:8000/v1 or https://api.openai.com/v1")
    base = url.rstrip("/")
    return base if base.endswith("/chat/completions") else base + "/chat/completions"


def key_from(flag: str, variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise InputError(f"{flag} {variable}: this environment variable is not set; export it with the key.")
    if not (key.isascii() and key.isprintable()):  # the client would print it in its error
        raise InputError(f"{flag} {variable}: the key contains a character that isn't allowed in an HTTP header.")
    return key


class _Asker:
    """Send prompts until the cap is reached or an error can't be fixed by retrying. Thread-safe."""

    def __init__(self, endpoint: Endpoint):
        import openai  # part of the optional extra `judge`

        self.endpoint = endpoint
        self.openai: Any = openai
        hooks = limits(LONGEST * endpoint.timeout, MAX_ANSWER, openai.OpenAIError)
        hooks["request"].insert(0, self.count)
        http_client = openai.DefaultHttpxClient(event_hooks=hooks, follow_redirects=False)  # it would get the key
        self.client = openai.OpenAI(
            base_url=endpoint.url.removesuffix("/chat/completions"),
            api_key=endpoint.key or "none",  # if empty, the library would send OPENAI_API_KEY
            timeout=endpoint.timeout,
            max_retries=TRIES - 1,
            http_client=http_client,
        )
        # one connection per request, closed with it
        self.headers = {"Connection": "close"} | ({} if endpoint.key else {"Authorization": openai.Omit()})
        self.lock = threading.Lock()
        self.over = threading.Event()  # no further requests
        self.stopped = ""  # the reason
        self.cap = f"the cap of {endpoint.max_calls} calls is reached"
        self.num_calls = 0
        self.num_unanswered_in_a_row = 0
        self.last_error = ""
        self.failure = ""  # the endpoint's last error that left a prompt without an answer

    def stop(self, reason: str) -> None:
        with self.lock:
            self.stopped = self.stopped or reason
            self.over.set()

    def count(self, request: Any) -> None:
        """Count a request before it is sent, retries included; reject it after the cap or a stop."""
        with self.lock:
            if not self.over.is_set() and self.num_calls < self.endpoint.max_calls:
                self.num_calls += 1
                return
        self.stop(self.cap)
        raise self.openai.OpenAIError("no further request")  # the library doesn't retry its own errors

    def ask(self, prompt: str) -> str | None:
        """Return the answer, or None without one."""
        answer = self.try_to_ask(prompt)
        with self.lock:
            self.num_unanswered_in_a_row = 0 if answer is not None else self.num_unanswered_in_a_row + 1
        if self.num_unanswered_in_a_row >= GIVE_UP:
            self.stop(f"{GIVE_UP} prompts in a row got no answer ({self.last_error})")
        return answer

    def try_to_ask(self, prompt: str) -> str | None:
        if self.over.is_set():
            return None
        try:
            completion = self.client.chat.completions.create(**self.endpoint.body(prompt), extra_headers=self.headers)
            answer = completion.choices[0].message.content
            if not isinstance(answer, str):
                raise TypeError("no text in it")
            answer.encode()  # fails for half a surrogate pair
            return self.without_key(answer)
        except self.openai.APIStatusError as error:
            self.last_error = f"HTTP {error.status_code} {self.safe(error.response.text)}".strip()
            if error.status_code < 500 and error.status_code not in (*REFUSED, *BUSY):
                self.stop(f"the endpoint refuses: {self.last_error}")
            if error.status_code not in REFUSED:
                self.failure = self.last_error
        except self.openai.APIConnectionError as error:  # no connection, or a timeout
            self.failure = self.last_error = self.safe(f"{type(error).__name__}: {error.__cause__ or error}")
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:  # the library doesn't validate the answer's structure
            self.last_error = self.safe(f"not a chat completion ({error})")
        except self.openai.OpenAIError as error:  # from `count`, or another rejection by the library
            if not self.over.is_set():  # otherwise the reason is already in `stopped`
                self.last_error = self.safe(str(error))
        return None

    def safe(self, text: str) -> str:
        """Shorten a text for a message: its beginning, on one line, without the key."""
        return " ".join(self.without_key(text).split())[:160]

    def without_key(self, text: str) -> str:
        """Remove the key, which the endpoint may repeat."""
        return text.replace(self.endpoint.key, "[key]") if self.endpoint.key else text


# ----------------------------------------------------------------------------------------- answers, cached as they come
def read_cache(lines: bytes) -> dict[str, str]:
    """Return key -> answer; skip truncated lines, left by a killed run."""
    answers = {}
    for line in lines.splitlines():
        try:
            record = dataset.parse_object(line, "the cache")
            answers[dataset.field(record, "key", str, "the cache")] = dataset.field(record, "answer", str, "the cache")
        except InputError:
            continue
    return answers


def ask_all(prompts: Iterable[str], endpoint: Endpoint, cache: Path) -> tuple[dict[str, str], dict]:
    """Return prompt -> answer, from the cache or the endpoint, and statistics of the calls.

    The statistics are `num_calls`, and `stopped`, `last_error` and `failure`, which are empty if nothing went wrong;
    `failure` is the endpoint's error if valid prompts have no answer. Errors of the endpoint never raise, so that the
    answers received so far are kept.
    """
    lines = read_bytes(cache, MAX_CACHE) if cache.exists() else b""
    known = read_cache(lines)
    keys = {prompt: endpoint.cache_key(prompt) for prompt in prompts}
    answers = {prompt: known[key] for prompt, key in keys.items() if key in known}
    waiting = [prompt for prompt in keys if prompt not in answers]
    account = {"num_calls": 0, "stopped": "", "last_error": "", "failure": ""}
    if waiting:
        asker = _Asker(endpoint)
        cache.parent.mkdir(parents=True, exist_ok=True)
        with cache.open("ab") as file, ThreadPoolExecutor(endpoint.workers) as pool:
            if lines and not lines.endswith(b"\n"):
                file.write(b"\n")  # end the truncated line
            # submit only the first prompts: under a cap, the choice of prompts must not depend on thread timing
            futures = {pool.submit(asker.ask, prompt): prompt for prompt in waiting[: endpoint.max_calls]}
            try:
                for future in Progress(
                    as_completed(futures), total=len(futures), desc="judge", unit=" prompts", leave=None
                ):
                    prompt, answer = futures[future], future.result()
                    if answer is not None:
                        answers[prompt] = answer
                        file.write(json.dumps({"key": keys[prompt], "answer": answer}).encode() + b"\n")
                        file.flush()
            finally:
                asker.over.set()  # after an interrupt: no further requests
        if len(waiting) > endpoint.max_calls:
            asker.stop(asker.cap)
        account["num_calls"] = asker.num_calls
        if len(answers) < len(keys):
            account |= {"stopped": asker.stopped, "last_error": asker.last_error, "failure": asker.failure}
    return answers, account
