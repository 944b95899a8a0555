"""LLM judge that grades each response: `--reward judge:FILE.toml`, with the same client as evaluations.

    url = "http://localhost:8000/v1"      OpenAI-compatible
    model = "NAME"                        model name at the endpoint
    rubric = "... {query} ... {response} ... End with a number from 1 to 10."

Optional fields: key_variable, max_calls (per run), cache, workers, timeout, temperature, max_tokens, and scale, which
multiplies the grade. `last_grade` reads the grade from the last line of the judge's answer. A response has no score if
the answer has no grade or the endpoint rejects the prompt. If the endpoint fails, the run stops: without these scores
it would no longer be the same run.
"""

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanorlhf import distributed
from nanorlhf.batch import Batch
from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, open_regular
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.reward_model import Scores
from nanorlhf.rewards.endpoint import Endpoint, ask_all, completions_url, key_from
from nanorlhf.rewards.function import Value
from nanorlhf.rewards.function_reward import as_scores
from nanorlhf.rewards.toml_file import read_toml
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
DECIDES_SCORES = ("model", "rubric", "temperature", "max_tokens", "scale")
NUMBER = r"(?:[0-9]{1,9}(?:\.[0-9]+|,[0-9]{1,2})?|\.[0-9]+)"
MARKUP = re.compile(r"</?[a-z]+>|<(?=[0-9.]+>)|(?<=[0-9])>|\\[a-z]+|[*_`\"\[\](){}#$|]", re.IGNORECASE)
GRADE_LINE = re.compile(
    rf"""
    (?P<label>
        [^0-9]* [:=]                                                         # Quality:
      | (?:(?!score|rating|grade).)* (?:score|rating|grade) \s* [:=]         # 2 of 3 facts are there. Score:
      | (?:[^0-9]* [.!?,;] \s)? (?:
            (?:(?:my|the|final|overall)\s)* (?:score|rating|grade) (?:\sis)? # The score is
          | I (?:'d|'ll|\swould|\swill)? \s (?:give|rate|grade)              # I'd give it a
            (?:\s(?:it|this|the))? (?:\s(?:summary|response|answer))? (?:\s(?:as|an?))?
        )
    )? \s*
    (?<!\w) (?P<grade>-?{NUMBER})
    (?:\s* (?:/|\bout\sof\b|\bof\b) \s* (?P<most>{NUMBER}))?
    (?:\s+ (?P<percent>{NUMBER}) \s?%)?
    """,
    re.VERBOSE | re.IGNORECASE,
)
# ends a label of a number that isn't a grade: Maximum score:
LIMIT = re.compile(r"\b(?:max\w*|min\w*|highest|lowest|best|worst|perfect|scale|out of)\W+(?:\w+\W+)?$", re.IGNORECASE)


def last_grade(answer: str) -> float | None:
    """Parse the grade at the end of an answer; None if the last line isn't a single grade, or is ambiguous.

    The last line is a number, optionally with its maximum and after a label. Ranges, percentages, exponents, 1,000 (a
    thousand, or one) and grades above their maximum are rejected.

    >>> last_grade("It is short.\\nScore: **7/10**."), last_grade("I'd give it 2 out of 10"), last_grade("-1,5")
    (7.0, 2.0, -1.5)
    >>> last_grade("Score: 6-7"), last_grade("between 6 and 7"), last_grade("70%"), last_grade("I can't say.")
    (None, None, None, None)
    """
    line = next((line for line in reversed(answer.splitlines()) if re.search(r"\w", line)), "")
    line = line.replace("\N{MINUS SIGN}", "-").replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    # remarks: Score (1-10): 7 (good)
    line = re.sub(r"\([^()0-9]*\)|\([^()]*\)(?=\W*[:=])", " ", line)
    line = MARKUP.sub(" ", line).strip(" \t'").rstrip(" \t.!,;'")
    match = GRADE_LINE.fullmatch(line)
    if match is None or LIMIT.search(match["label"] or ""):
        return None
    groups = match.groupdict()
    numbers = {name: float(groups[name].replace(",", ".")) for name in ("grade", "most", "percent") if groups[name]}
    grade, most, percent = numbers["grade"], numbers.get("most"), numbers.get("percent")
    if most is not None and not (most > 0 and grade <= most):
        return None
    if percent is not None and not (most and abs(100 * grade / most - percent) < 1):
        return None
    return grade


def read_settings(flag: str, path: str) -> dict[str, Any]:
    """Read the fields of a judge's file. Raises InputError for a missing, unknown or invalid one."""
    fields = read_toml(flag, path, FIELDS)
    settings = {name: default for name, (_, default) in FIELDS.items()}
    for name, (kind, default) in FIELDS.items():
        if name in fields or default is None:
            settings[name] = field(fields, name, kind, path)
    for name in ("max_calls", "workers", "timeout", "max_tokens"):
        if settings[name] <= 0 or (name == "workers" and settings[name] > 500):
            raise InputError(f"{flag}: {path} sets {name} = {settings[name]}: must be above 0 (workers: 500 at most).")
    if settings["temperature"] < 0:
        raise InputError(f"{flag}: {path} sets temperature = {settings['temperature']}: must be at least 0.")
    for name in ("{query}", "{response}"):
        if name not in settings["rubric"]:
            raise InputError(f"{flag}: the rubric in {path} lacks {name}.")
    return settings


class Judge:
    """A reward by an LLM judge; rank 0 sends the prompts of a whole rollout, equal ones once.

    Raises InputError if the judge stops answering.
    """

    def __init__(self, path: str, tokenizer: Tokenizer):
        self.name = self.flag = f"--reward judge:{path}"
        self.label = "judge"
        self.models: list[GPT | ScalarModel] = []
        self.tokenizer = tokenizer
        settings = read_settings(self.flag, path)
        if find_spec("openai") is None:  # the optional extra `judge`
            raise InputError(f"{self.flag} needs the openai package; run `pip install openai`.")
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
        """Return a number per response, None without a grade."""
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
            reason = f"max_calls = {self.max_calls} is used up" if is_spent else account["stopped"] or unanswered
            raise InputError(f"{self.name}: {reason}; answers are kept in {self.cache}.")
        grades = [last_grade(answers.get(prompt, "")) for prompt in prompts]
        return [None if grade is None else self.scale * grade for grade in grades]

    def prompt(self, query: str, response: str) -> str:
        """Fill in the rubric in one pass, since a text may contain {response} itself."""
        texts = {"{query}": query.strip(), "{response}": response.strip()}
        return re.sub(r"\{query\}|\{response\}", lambda match: texts[match[0]], self.rubric)

    def metrics(self) -> dict[str, float]:
        return {f"reward/{self.label}_no_score": self.no_score_rate}
