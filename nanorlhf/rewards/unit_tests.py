"""Score programs by their tests: `--reward tests`, or `--reward tests:FILE.toml` with other settings.

    score = "share"        share of the tests that pass; "all": 1 if all pass, else 0
    compile_error = -1.0   score of a program that doesn't compile
    timeout = 10.0         seconds per run of a program
    workers = 2            programs run at a time
    memory_mib = 512       memory of a program; for Java, its heap
    weak_isolation = false run programs even if the system can't restrict their files or network

The data are rows of a code file: prefix + response + suffix is a program, and `tests` run it. The module
nanorlhf.sandbox.execution defines what a test is and which programs pass. As in StepCoder and RLEF, it is a reward for
the whole response.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from nanorlhf import distributed
from nanorlhf.batch import Batch
from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.reward_model import Scores
from nanorlhf.rewards.function import Value
from nanorlhf.rewards.function_reward import as_scores
from nanorlhf.rewards.toml_file import read_toml
from nanorlhf.sandbox.execution import REASONS, Program, Verdict, isolation, make_program, run_programs
from nanorlhf.tokenizer import Tokenizer

DEFAULTS: dict[str, Any] = {
    "score": "share", "compile_error": -1.0, "timeout": 10.0, "workers": 2, "memory_mib": 512, "weak_isolation": False,
}  # fmt: skip
DECIDES_SCORES = ("score", "compile_error", "timeout", "memory_mib")  # the others may change between resumed runs
LOGGED = (*REASONS, "signal", "timeout", "output", "disk", "compile_error", "compile_limit")


def read_settings(flag: str, path: str) -> dict[str, Any]:
    """Read a settings file. Raises InputError for an unknown or invalid field."""
    fields = read_toml(flag, path, DEFAULTS)
    settings = DEFAULTS | {name: field(fields, name, type(DEFAULTS[name]), path) for name in fields}
    if settings["score"] not in ("share", "all"):
        raise InputError(f"{flag}: {path} sets score = {settings['score']!r}: must be share or all.")
    for name, most in (("timeout", 3600), ("workers", 64), ("memory_mib", 2**20)):
        if not 0 < settings[name] <= most:
            raise InputError(f"{flag}: {path} sets {name} = {settings[name]}: must be above 0, at most {most}.")
    return settings


class UnitTests:
    """A reward by tests. Rank 0 runs the programs of a whole rollout, equal ones once.

    records: the training data. Raises InputError for a row without tests, and on a machine without a sandbox or JDK.
    """

    def __init__(self, path: str, tokenizer: Tokenizer, records: Iterable[dict]):
        self.name = f"--reward tests:{path}" if path else "--reward tests"
        self.label = "tests"
        self.models: list[GPT | ScalarModel] = []
        self.settings = read_settings(self.name, path) if path else DEFAULTS
        self.tokenizer = tokenizer
        self.reasons: Counter[str] = Counter()
        languages = set()
        for number, record in enumerate(records, start=1):
            for name in ("language", "prefix", "suffix", "tests"):
                field(record, name, str, f"{self.name}: row {number} of --data")
            if not record["tests"].strip():
                raise InputError(f"{self.name}: row {number} of --data has no tests.")
            languages.add(record["language"])
        if len(languages) > 1:
            raise InputError(
                f"{self.name}: --data has programs in {' and '.join(sorted(languages))}: use one language."
            )
        self.language = languages.pop() if languages else "python"
        distributed.from_first(lambda: self.run([]))  # refuses a machine without a sandbox or JDK
        if distributed.rank() == 0:
            print("\n  ".join(["isolation of the programs", *isolation()]))

    def run(self, programs: list[Program]) -> list[Verdict]:
        limits = {name: self.settings[name] for name in ("timeout", "workers", "memory_mib", "weak_isolation")}
        return run_programs(programs, self.language, **limits)

    def score(self, batch: Batch) -> Scores:
        texts = [self.tokenizer.decode(ids) for ids in batch.response.tolist()]
        programs = [make_program(record, text) for record, text in zip(batch.records, texts, strict=True)]
        verdicts = distributed.from_first(lambda: self.run(programs))
        self.reasons = Counter(verdict.reason for verdict in verdicts)
        compile_error, shares = self.settings["compile_error"], self.settings["score"] == "share"
        values: list[Value] = [
            (verdict.share if shares else float(verdict.passed)) if verdict.compiled else compile_error
            for verdict in verdicts
        ]
        return as_scores(values, batch.actions)

    def metrics(self) -> dict[str, float]:
        """Return the share of each kind of verdict in the last rollout."""
        total = self.reasons.total()
        return {f"reward/{self.label}_{reason}": self.reasons[reason] / total for reason in LOGGED if total}
