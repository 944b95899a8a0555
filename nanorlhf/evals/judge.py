"""The paper's LLM judge of two summaries: a chat model behind a URL, or a file of earlier verdicts.

The judge sees the query and two summaries, A and B, in an order that the seed decides for each pair. An answer that
does not end in a verdict is `unparsed`: it is counted separately, not replaced by a coin flip. Answers are cached on
disk, so that nothing is paid for twice; a cap on calls limits what a run may spend.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

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

TRIES = 6  # per prompt, while the endpoint is busy or slow
GIVE_UP = 10  # prompts in a row without an answer: the prompts are not to blame
REFUSED = (400, 413, 422)  # the fault of this prompt alone: too long, or filtered
BUSY = (408, 409, 429)  # and all from 500 on: those that the library tries again
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
    timeout: float = 60.0  # seconds without a byte

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


class _Asker:
    """Sends prompts until the cap, or an error that no retry can fix. Shared by several threads."""

    def __init__(self, endpoint: Endpoint):
        import openai  # part of the optional extra `judge`

        self.endpoint = endpoint
        self.openai: Any = openai
        # without redirects: by default the key would go wherever they point
        http_client = openai.DefaultHttpxClient(follow_redirects=False, event_hooks={"request": [self.count]})
        self.client = openai.OpenAI(
            base_url=endpoint.url.removesuffix("/chat/completions"),
            api_key=endpoint.key or "none",  # without one, the library would send the key in OPENAI_API_KEY
            timeout=endpoint.timeout,
            max_retries=TRIES - 1,
            http_client=http_client,
        )
        self.headers = {} if endpoint.key else {"Authorization": openai.Omit()}
        self.lock = threading.Lock()
        self.over = threading.Event()  # no further request
        self.stopped = ""  # why
        self.cap = f"the cap of {endpoint.max_calls} calls is reached"
        self.num_calls = 0
        self.num_unanswered_in_a_row = 0
        self.last_error = ""

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
            return self.without_key(answer)
        except self.openai.APIStatusError as error:
            self.last_error = f"HTTP {error.status_code} {self.safe(error.response.text)}".strip()
            if error.status_code < 500 and error.status_code not in (*REFUSED, *BUSY):
                self.stop(f"the endpoint refuses: {self.last_error}")
        except self.openai.APIConnectionError as error:  # no connection, or a timeout
            self.last_error = self.safe(f"{type(error).__name__}: {error.__cause__ or error}")
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # the library checks no answer's shape
            self.last_error = self.safe(f"no chat completion ({error})")
        except self.openai.OpenAIError as error:  # from `count`, and what else the library refuses
            self.last_error = self.last_error or self.safe(str(error))
        return None

    def safe(self, text: str) -> str:
        """For a message: the beginning, on one line."""
        return " ".join(self.without_key(text).split())[:160]

    def without_key(self, text: str) -> str:
        """The endpoint may repeat the key."""
        return text.replace(self.endpoint.key, "[key]") if self.endpoint.key else text


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
    account = {"num_calls": 0, "stopped": "", "last_error": ""}
    if waiting:
        asker = _Asker(endpoint)
        cache.parent.mkdir(parents=True, exist_ok=True)
        with cache.open("ab") as file, ThreadPoolExecutor(endpoint.workers) as pool:
            if lines and not lines.endswith(b"\n"):
                file.write(b"\n")  # end the line that was cut short
            # the first ones, and not those whose threads come first: which pairs are judged must not be a race
            futures = {pool.submit(asker.ask, prompt): prompt for prompt in waiting[: endpoint.max_calls]}
            try:
                for future in tqdm(as_completed(futures), total=len(futures), desc="judge", unit=" prompts"):
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
            account |= {"stopped": asker.stopped, "last_error": asker.last_error}
    return answers, account
