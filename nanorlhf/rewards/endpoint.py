"""A chat model behind a URL, asked many prompts: the judge of an evaluation, and of a reward.

Answers are cached on disk, so that nothing is paid for twice; a cap on calls limits what a run may spend.
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
TRIES = 6  # per prompt, while the endpoint is busy or slow
GIVE_UP = 10  # prompts in a row without an answer: the prompts are not to blame
REFUSED = (400, 413, 422)  # the fault of this prompt alone: too long, or filtered
BUSY = (408, 409, 429)  # and all from 500 on: those that the library tries again
MAX_ANSWER = 2**24  # bytes: 16 MiB. An answer has a few thousand
LONGEST = 10  # timeouts that one answer may take, however it drips
MAX_CACHE = 2**30  # bytes of the cache: a million answers


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    url: str  # of chat completions
    model: str
    key: str | None = field(default=None, repr=False)  # sent as a bearer token, and written nowhere
    temperature: float | None = 0.0
    max_tokens: int | None = 512
    max_calls: int = 1000  # requests, retries included: one that times out may be charged too
    workers: int = 8  # concurrent requests
    timeout: float = 60.0  # seconds without a byte

    def body(self, prompt: str) -> dict:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        settings = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {"model": self.model, "messages": messages} | {k: v for k, v in settings.items() if v is not None}

    def cache_key(self, prompt: str) -> str:
        return hashlib.sha256(json.dumps([self.url, self.body(prompt)], sort_keys=True).encode()).hexdigest()


def completions_url(flag: str, url: str) -> str:
    """http://localhost:8000/v1 -> http://localhost:8000/v1/chat/completions; raises InputError as `check_url` does."""
    check_url(flag, url, "write a URL such as http://localhost:8000/v1 or https://api.openai.com/v1")
    base = url.rstrip("/")
    return base if base.endswith("/chat/completions") else base + "/chat/completions"


def key_from(flag: str, variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise InputError(f"{flag} {variable}: this environment variable is not set: export it with the key.")
    if not (key.isascii() and key.isprintable()):  # the client would print it in its error
        raise InputError(f"{flag} {variable}: the key holds a character that no HTTP header takes: export it again.")
    return key


class _Asker:
    """Sends prompts until the cap, or an error that no retry can fix. Shared by several threads."""

    def __init__(self, endpoint: Endpoint):
        import openai  # part of the optional extra `judge`

        self.endpoint = endpoint
        self.openai: Any = openai
        hooks = limits(LONGEST * endpoint.timeout, MAX_ANSWER, openai.OpenAIError)
        hooks["request"].insert(0, self.count)
        http_client = openai.DefaultHttpxClient(event_hooks=hooks, follow_redirects=False)  # the key would go there too
        self.client = openai.OpenAI(
            base_url=endpoint.url.removesuffix("/chat/completions"),
            api_key=endpoint.key or "none",  # without one, the library would send the key in OPENAI_API_KEY
            timeout=endpoint.timeout,
            max_retries=TRIES - 1,
            http_client=http_client,
        )
        # a connection per request, so that its end is the request's
        self.headers = {"Connection": "close"} | ({} if endpoint.key else {"Authorization": openai.Omit()})
        self.lock = threading.Lock()
        self.over = threading.Event()  # no further request
        self.stopped = ""  # why
        self.cap = f"the cap of {endpoint.max_calls} calls is reached"
        self.num_calls = 0
        self.num_unanswered_in_a_row = 0
        self.last_error = ""
        self.failure = ""  # the last error that was the endpoint's fault and cost a prompt its answer

    def stop(self, reason: str) -> None:
        with self.lock:
            self.stopped = self.stopped or reason
            self.over.set()

    def count(self, request: Any) -> None:
        """Called before each request, retries included: refuses it after the cap or a stop."""
        with self.lock:
            if not self.over.is_set() and self.num_calls < self.endpoint.max_calls:
                self.num_calls += 1
                return
        self.stop(self.cap)
        raise self.openai.OpenAIError("no further request")  # of its own errors, the library tries none again

    def ask(self, prompt: str) -> str | None:
        """The answer; None if there is none."""
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
            answer.encode()  # half a surrogate pair is no text
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
        ) as error:  # the library checks no answer's shape
            self.last_error = self.safe(f"no chat completion ({error})")
        except self.openai.OpenAIError as error:  # from `count`, and what else the library refuses
            if not self.over.is_set():  # or it says no more than why this one is over
                self.last_error = self.safe(str(error))
        return None

    def safe(self, text: str) -> str:
        """For a message: the beginning, on one line."""
        return " ".join(self.without_key(text).split())[:160]

    def without_key(self, text: str) -> str:
        """The endpoint may repeat the key."""
        return text.replace(self.endpoint.key, "[key]") if self.endpoint.key else text


# ----------------------------------------------------------------------------------------- answers, cached as they come
def read_cache(lines: bytes) -> dict[str, str]:
    """Key -> answer. A line that a kill cut short is skipped."""
    answers = {}
    for line in lines.splitlines():
        try:
            record = dataset.parse_object(line, "the cache")
            answers[dataset.field(record, "key", str, "the cache")] = dataset.field(record, "answer", str, "the cache")
        except InputError:
            continue
    return answers


def ask_all(prompts: Iterable[str], endpoint: Endpoint, cache: Path) -> tuple[dict[str, str], dict]:
    """Prompt -> answer, from the cache or the endpoint, and an account of the calls.

    The account has `num_calls`, and `stopped`, `last_error` and `failure`, which are empty if nothing went wrong;
    `failure` says why prompts that are not to blame have no answer. Never raises for what the endpoint does: the
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
                file.write(b"\n")  # end the line that was cut short
            # the first ones, and not those whose threads come first: which pairs are judged must not be a race
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
                asker.over.set()  # after an interrupt: no further request
        if len(waiting) > endpoint.max_calls:
            asker.stop(asker.cap)
        account["num_calls"] = asker.num_calls
        if len(answers) < len(keys):
            account |= {"stopped": asker.stopped, "last_error": asker.last_error, "failure": asker.failure}
    return answers, account
