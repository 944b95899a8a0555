"""The paper's LLM judge of two summaries: a chat model behind a URL, or a file of earlier verdicts.

The judge sees the query and two summaries, A and B, in an order that the seed decides for each pair. An answer that
does not end in a verdict is `unparsed`: it is counted separately, not replaced by a coin flip. Answers are cached on
disk, so that nothing is paid for twice; a cap on calls limits what a run may spend.
"""

import hashlib
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit
from urllib.request import HTTPErrorProcessor, Request, build_opener

from tqdm import tqdm

from nanorlhf import dataset
from nanorlhf.errors import InputError
from nanorlhf.files import read_bytes

WIN = {"ours": 1.0, "tie": 0.5, "theirs": 0.0}  # what a verdict counts in a win rate; others are left out
NO_VERDICT = ("unparsed", "unanswered")

SYSTEM = "You are a helpful assistant."
# the paper's words, so that win rates are comparable
PROMPT = """Which of the following summaries does a better job of summarizing the most important points in the given \
forum post, without including unimportant or irrelevant details? Judge based on accuracy, coverage, and coherence.

### Post:
{query}

### Summary A:
{a}

### Summary B:
{b}

### Instructions:
FIRST provide a one-sentence comparison of the two summaries, explaining which you prefer and why. SECOND, on a new \
line, state only "A" or "B" to indicate your choice. Your response should use the format:
Comparison: <one-sentence comparison and explanation>
Preferred: <"A" or "B">"""

TRIES = 6  # per prompt, while the endpoint is busy, slow or answers garbage
LONGEST_WAIT = 120.0  # maximum seconds between two tries, whatever Retry-After says
GIVE_UP = 10  # prompts in a row without an answer: the prompts are not to blame
REFUSED = (400, 413, 422)  # the fault of this prompt alone: too long, or filtered
BUSY = (408, 409, 425, 429)  # and all from 500 on
MOST_BYTES = 2**20  # maximum size of an answer
MAX_CACHE = 2**30  # bytes of the cache: a million answers


# ------------------------------------------------------------------------------------------ 1. pairs, orders, verdicts
class Pair(NamedTuple):
    query: str
    ours: str
    theirs: str


def prompt_of(pair: Pair, ours_first: bool) -> str:
    a, b = (pair.ours, pair.theirs) if ours_first else (pair.theirs, pair.ours)
    return PROMPT.format(query=pair.query.strip(), a=a.strip(), b=b.strip())


def parse(answer: str) -> Literal["A", "B"] | None:
    """The verdict in the last line: A, "A", **A** or Summary A, with or without `Preferred:`; anything else is None.

    >>> parse('Comparison: the first one invents a car.\\nPreferred: "B"')
    'B'
    >>> parse("Comparison: both are good.\\nPreferred: A or B")
    """
    plain = answer.replace("**", "").strip()
    if plain.count("Preferred:") > 1:  # two verdicts
        return None
    found = re.fullmatch(r'(Preferred:\s*)?("?)(Summary )?([AB])\2', plain[plain.rfind("\n") + 1 :].strip())
    if found is None:
        return None
    return "A" if found[4] == "A" else "B"


def orders(pair: Pair, seed: int, both: bool) -> list[bool]:
    """Is our summary A? By the seed and the texts alone, so that a pair gives the same prompt in every evaluation."""
    if both:
        return [True, False]
    return [hashlib.sha256(json.dumps([seed, *pair]).encode()).digest()[0] % 2 == 0]


def judge_pairs(
    pairs: list[Pair], seed: int, both_orders: bool, ask: Callable[[list[str]], dict[str, str]]
) -> list[dict]:
    """One row per pair: its texts, the orders in which it was shown, the answers, and what is `preferred`.

    `ask` maps prompts to answers and may leave some out. With both orders a pair counts if both answers have a
    verdict, and is a tie if these differ. Two equal texts are a tie, for which nobody is asked.
    """
    shown = [[] if pair.ours.strip() == pair.theirs.strip() else orders(pair, seed, both_orders) for pair in pairs]
    prompts = [[prompt_of(pair, first) for first in firsts] for pair, firsts in zip(pairs, shown, strict=True)]
    answers = ask(list(dict.fromkeys(prompt for group in prompts for prompt in group)))
    rows = []
    for pair, firsts, group in zip(pairs, shown, prompts, strict=True):
        said = [answers.get(prompt) for prompt in group]
        verdicts = [parse(answer or "") for answer in said]
        if None in said:
            preferred = "unanswered"
        elif None in verdicts:
            preferred = "unparsed"
        else:
            choices = {"ours" if (v == "A") == first else "theirs" for v, first in zip(verdicts, firsts, strict=True)}
            preferred = choices.pop() if len(choices) == 1 else "tie"
        rows.append({**pair._asdict(), "ours_first": firsts, "answers": said, "preferred": preferred})
    return rows


def load_verdicts(path: Path) -> dict[Pair, str]:
    """Earlier verdicts, by this judge or any other: rows {"query", "ours", "theirs", "preferred"}."""
    verdicts: dict[Pair, str] = {}
    for where, record in dataset.iter_jsonl(path):
        *texts, preferred = (dataset.field(record, name, str, where) for name in (*Pair._fields, "preferred"))
        if preferred not in (*WIN, *NO_VERDICT):
            raise InputError(
                f"{where}: the field 'preferred' is {preferred!r}: write one of {', '.join((*WIN, *NO_VERDICT))}."
            )
        pair = Pair(*(text.strip() for text in texts))
        if verdicts.setdefault(pair, preferred) != preferred:
            raise InputError(f"{where}: an earlier line prefers {verdicts[pair]!r} of the same pair: delete one.")
    return verdicts


# ----------------------------------------------------------------------------------------------------- 2. the endpoint
@dataclass(frozen=True, kw_only=True)
class Endpoint:
    url: str  # of chat completions
    model: str
    key: str | None = field(default=None, repr=False)  # sent as a bearer token, and written nowhere
    temperature: float | None = 0.0
    max_tokens: int | None = 512
    max_calls: int = 1000  # requests, retries included: one that times out may be charged too
    workers: int = 8  # concurrent requests
    timeout: float = 60.0  # seconds per request
    first_wait: float = 1.0  # seconds before the second try, doubled for each further one

    def body(self, prompt: str) -> dict:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        settings = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {"model": self.model, "messages": messages} | {k: v for k, v in settings.items() if v is not None}

    def cache_key(self, prompt: str) -> str:
        return hashlib.sha256(json.dumps([self.url, self.body(prompt)], sort_keys=True).encode()).hexdigest()


def completions_url(flag: str, url: str) -> str:
    """http://localhost:8000/v1 -> http://localhost:8000/v1/chat/completions; raises InputError unless it is a URL."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or not (url.isascii() and url.isprintable()) or " " in url:
        raise InputError(f"{flag} {url}: write a URL such as http://localhost:8000/v1 or https://api.openai.com/v1.")
    if parts.username or parts.password or parts.query or parts.fragment:  # URLs are logged: no secrets
        raise InputError(f"{flag}: write the URL without password, ? and #; a key goes by --judge-key-variable.")
    base = url.rstrip("/")
    return base if base.endswith("/chat/completions") else base + "/chat/completions"


def key_from(flag: str, variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise InputError(f"{flag} {variable}: this environment variable is not set: export it with the key.")
    if not (key.isascii() and key.isprintable()):  # http.client would print it in its error
        raise InputError(f"{flag} {variable}: the key holds a character that no HTTP header takes: export it again.")
    return key


class _AnyStatus(HTTPErrorProcessor):
    """Returns every status as an answer. By default urllib follows redirects and sends the key wherever they point."""

    def http_response(self, request: Request, response: HTTPResponse) -> HTTPResponse:
        return response

    https_response = http_response


class _Asker:
    """Sends prompts until the cap, or an error that no retry can fix. Shared by several threads."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self.opener = build_opener(_AnyStatus)
        self.lock = threading.Lock()
        self.over = threading.Event()  # no further request
        self.stopped = ""  # why
        self.num_calls = 0
        self.num_unanswered_in_a_row = 0
        self.last_error = ""

    def stop(self, reason: str) -> None:
        with self.lock:
            self.stopped = self.stopped or reason
            self.over.set()

    def may_call(self) -> bool:
        with self.lock:
            if self.over.is_set():
                return False
            if self.num_calls < self.endpoint.max_calls:
                self.num_calls += 1
                return True
        self.stop(f"the cap of {self.endpoint.max_calls} calls is reached")
        return False

    def ask(self, prompt: str) -> str | None:
        """The answer; None if there is none."""
        answer = self.try_to_ask(prompt)
        with self.lock:
            self.num_unanswered_in_a_row = 0 if answer is not None else self.num_unanswered_in_a_row + 1
        if self.num_unanswered_in_a_row >= GIVE_UP:
            self.stop(f"{GIVE_UP} prompts in a row got no answer ({self.last_error})")
        return answer

    def try_to_ask(self, prompt: str) -> str | None:
        wait = 0.0
        for attempt in range(TRIES):
            self.over.wait(wait)
            if not self.may_call():
                return None
            try:
                status, later, body = self.post(prompt)
                if status == 200:
                    return self.answer_in(body)
                self.last_error = f"HTTP {status} {self.safe(body)}".strip()
            except (OSError, HTTPException, ValueError) as error:  # no connection, timeout, garbage
                status, later = None, None
                self.last_error = self.safe(f"{type(error).__name__}: {error}")
            if status in REFUSED:
                return None
            if status is not None and status < 500 and status not in BUSY:
                self.stop(f"the endpoint refuses: {self.last_error}")
                return None
            # jitter, so that requests refused together do not come back together
            wait = self.endpoint.first_wait * 2**attempt * random.uniform(0.5, 1)
            wait = min(max(wait, retry_after(later)), LONGEST_WAIT)
        return None

    def post(self, prompt: str) -> tuple[int, str | None, str]:
        """Status, the header Retry-After, and the body."""
        endpoint = self.endpoint
        headers = {"Content-Type": "application/json", "User-Agent": "nanorlhf"}
        if endpoint.key:
            headers["Authorization"] = f"Bearer {endpoint.key}"
        request = Request(endpoint.url, json.dumps(endpoint.body(prompt)).encode(), headers, method="POST")
        deadline, body = time.monotonic() + endpoint.timeout, b""
        with self.opener.open(request, timeout=endpoint.timeout) as response:
            while piece := response.read1(MOST_BYTES):
                body += piece
                if time.monotonic() > deadline:  # a socket's timeout restarts with each byte
                    raise TimeoutError(f"no whole answer within {endpoint.timeout:g} seconds")
                if len(body) > MOST_BYTES:
                    raise ValueError(f"an answer of more than {MOST_BYTES} bytes")
            return response.status, response.headers.get("Retry-After"), body.decode("utf-8", "replace")

    def answer_in(self, body: str) -> str:
        try:
            answer = json.loads(body)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            answer = None
        if not isinstance(answer, str):
            raise ValueError(f"no chat completion but {body}")
        return self.without_key(answer)

    def safe(self, text: str) -> str:
        """For a message: the beginning, on one line."""
        return " ".join(self.without_key(text).split())[:160]

    def without_key(self, text: str) -> str:
        """The endpoint may repeat the key."""
        return text.replace(self.endpoint.key, "[key]") if self.endpoint.key else text


def retry_after(header: str | None) -> float:
    """Seconds that a Retry-After header, a number or a date, asks to wait; 0 if it is missing or unreadable."""
    if header is None:
        return 0.0
    try:
        return max(0.0, float(header))
    except (TypeError, ValueError):
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError, OSError):
        return 0.0


# -------------------------------------------------------------------------------------- 3. answers, cached as they come
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

    The account has `num_calls`, and `stopped` and `last_error`, which are empty if nothing went wrong. Never raises for
    what the endpoint does: the answers received so far are kept.
    """
    lines = read_bytes(cache, MAX_CACHE) if cache.exists() else b""
    known = read_cache(lines)
    keys = {prompt: endpoint.cache_key(prompt) for prompt in prompts}
    answers = {prompt: known[key] for prompt, key in keys.items() if key in known}
    waiting = [prompt for prompt in keys if prompt not in answers]
    asker = _Asker(endpoint)
    if waiting:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with cache.open("ab") as file, ThreadPoolExecutor(endpoint.workers) as pool:
            if lines and not lines.endswith(b"\n"):
                file.write(b"\n")  # end the line that was cut short
            futures = {pool.submit(asker.ask, prompt): prompt for prompt in waiting}
            try:
                for future in tqdm(as_completed(futures), total=len(futures), desc="judge", unit=" prompts"):
                    prompt, answer = futures[future], future.result()
                    if answer is not None:
                        answers[prompt] = answer
                        file.write(json.dumps({"key": keys[prompt], "answer": answer}).encode() + b"\n")
                        file.flush()
            finally:
                asker.over.set()  # after an interrupt: no further request
    unanswered = len(answers) < len(keys)
    return answers, {
        "num_calls": asker.num_calls,
        "stopped": asker.stopped if unanswered else "",
        "last_error": asker.last_error if unanswered else "",
    }
