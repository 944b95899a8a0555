"""A chat model that grades each response: `--reward judge:FILE.toml`, with the client that evaluations have.

    url = "http://localhost:8000/v1"      OpenAI-compatible
    model = "NAME"                        as the endpoint knows it
    rubric = "... {query} ... {response} ... End with a number from 1 to 10."

and, where the defaults don't fit, key_variable, max_calls (of the run), cache, workers, timeout, temperature,
max_tokens, and scale, which multiplies the number. The judge's answer must end in a number, such as `Score: 7`,
`**7**` or `7/10` (7). An answer that doesn't, and a prompt that the endpoint refuses, say nothing of the response.
Where the endpoint fails, the run ends: without these scores it would go on as another run.
"""

import re
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanorlhf import distributed
from nanorlhf.batch import Batch
from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, open_regular, read_text
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.reward import Scores
from nanorlhf.rewards.endpoint import Endpoint, ask_all, completions_url, key_from
from nanorlhf.rewards.function import Value
from nanorlhf.rewards.rule import as_scores
from nanorlhf.tokenizer import Tokenizer

FIELDS: dict[str, tuple[type, Any]] = {  # name -> type and default
    "url": (str, None),
    "model": (str, None),
    "rubric": (str, None),
    "key_variable": (str, ""),
    "max_calls": (int, 1000),
    "cache": (str, "runs/judge.jsonl"),
    "workers": (int, 8),
    "timeout": (float, 60.0),
    "temperature": (float, 0.0),
    "max_tokens": (int, 512),
    "scale": (float, 1.0),
}
NUMBER = re.compile(r"(?<![\d./])(-?\d+(?:\.\d+)?)(?:\s*/\s*\d+)?\W*$")


def last_number(answer: str) -> float | None:
    """The number that an answer ends in.

    >>> last_number("It is short.\\nScore: **7/10**."), last_number("-1.5"), last_number("I can't say.")
    (7.0, -1.5, None)
    """
    found = NUMBER.search(answer)
    return None if found is None else float(found[1])


def read_settings(flag: str, path: str) -> dict[str, Any]:
    """The fields of a judge's file. Raises InputError for a missing, unknown or absurd one."""
    try:
        given = tomllib.loads(read_text(Path(path)))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{flag}: {path} is no TOML file ({error}).") from error
    if unknown := sorted(given.keys() - FIELDS.keys()):
        raise InputError(f"{flag}: {path} has the unknown field {unknown[0]!r}: it may have {', '.join(FIELDS)}.")
    settings = {name: default for name, (_, default) in FIELDS.items()}
    for name, (kind, default) in FIELDS.items():
        if name in given or default is None:
            settings[name] = field(given, name, kind, path)
    for name in ("max_calls", "workers", "timeout", "max_tokens"):
        if settings[name] <= 0 or (name == "workers" and settings[name] > 500):
            raise InputError(
                f"{flag}: {path} sets {name} = {settings[name]}: it must be above 0 (workers: 500 at most)."
            )
    if settings["temperature"] < 0:
        raise InputError(f"{flag}: {path} sets temperature = {settings['temperature']}: it must be at least 0.")
    for name in ("{query}", "{response}"):
        if name not in settings["rubric"]:
            raise InputError(f"{flag}: the rubric in {path} lacks {name}.")
    return settings


class Judge:
    """Rank 0 asks about all responses of a rollout, each text once.

    Raises InputError when the judge stops answering.
    """

    def __init__(self, path: str, tokenizer: Tokenizer):
        self.name = self.flag = f"--reward judge:{path}"
        self.label = "judge"
        self.models: list[GPT | ScalarModel] = []
        self.tokenizer = tokenizer
        settings = read_settings(self.flag, path)
        if find_spec("openai") is None:  # the optional extra `judge`
            raise InputError(f"{self.flag}: asking needs a library: install it with `pip install openai`.")
        self.rubric, self.scale, self.cache = settings["rubric"], settings["scale"], Path(settings["cache"])
        if self.cache.exists():
            open_regular(self.cache).close()
        check_out(self.cache.parent, f"{self.flag}: cache")
        self.max_calls: int = settings["max_calls"]
        key_variable = settings["key_variable"]
        self.endpoint = Endpoint(
            url=completions_url(f"{self.flag}: url", settings["url"]),
            key=key_from(f"{self.flag}: key_variable", key_variable) if key_variable else None,
            **{name: settings[name] for name in ("model", "temperature", "max_tokens", "workers", "timeout")},
        )
        self.num_calls = 0  # of this run
        self.no_score_rate = 0.0

    def score(self, batch: Batch) -> Scores:
        values = distributed.from_first(lambda: self.values(batch))
        self.no_score_rate = sum(value is None for value in values) / len(values)
        return as_scores(values, batch.actions)

    def values(self, batch: Batch) -> list[Value]:
        """A number per response; None where the judge gave none."""
        prompts = [
            self.prompt(self.tokenizer.decode(query), self.tokenizer.decode(response))
            for query, response in zip(batch.query.tolist(), batch.response.tolist(), strict=True)
        ]
        endpoint = replace(self.endpoint, max_calls=self.max_calls - self.num_calls)
        answers, account = ask_all(dict.fromkeys(prompts), endpoint, self.cache)
        self.num_calls += account["num_calls"]
        if account["stopped"] or account["failure"]:
            is_spent = self.num_calls >= self.max_calls
            unanswered = f"{len(prompts) - len(answers)} prompts got no answer ({account['failure']})"
            reason = f"max_calls = {self.max_calls} is spent" if is_spent else account["stopped"] or unanswered
            raise InputError(f"{self.name}: {reason}; answers are kept in {self.cache}.")
        numbers = [last_number(answers.get(prompt, "")) for prompt in prompts]
        return [None if number is None else self.scale * number for number in numbers]

    def prompt(self, query: str, response: str) -> str:
        """In one pass: a text may contain {response} itself."""
        texts = {"{query}": query.strip(), "{response}": response.strip()}
        return re.sub(r"\{query\}|\{response\}", lambda found: texts[found[0]], self.rubric)

    def metrics(self) -> dict[str, float]:
        return {f"reward/{self.label}_no_score": self.no_score_rate}
