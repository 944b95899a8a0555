"""The verdict at the top of a report, in words: from the report's numbers and the findings of the doctor's rules.

A gain counts if its 95% interval excludes 0.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from nanorlhf.errors import InputError
from nanorlhf.report.along_run import earlier_checkpoints
from nanorlhf.report.page import Section, markup
from nanorlhf.rules.finding import Finding
from nanorlhf.rules.metric_rules import examine_metrics
from nanorlhf.rules.record import Record
from nanorlhf.training.run_directory import Rows, flat_settings, read_metrics, read_settings, run_of

FEW_ENDINGS = 0.95  # a smaller share of responses with EOS is reported
KINDS = ("good", "warn", "bad")  # from best to worst


class Gain(NamedTuple):
    """A policy's gain over another one in one measure."""

    measure: str  # as part of a sentence: "the gold score"
    ends: Sequence[float]  # low and high of the 95% interval
    text: str  # mean and interval, as shown on the page

    @property
    def sign(self) -> int:
        """1 or -1 if the interval is above or below 0, else 0."""
        return sign_of(self.ends)


class Outcome(NamedTuple):
    """The result of an evaluation for a policy or a reward model."""

    level: str  # a sentence on how good it is; empty if unknown
    kind: str  # one of KINDS
    change: str  # a sentence on how its scores changed; empty without another policy or model to compare with
    eos_rate: float = 1.0  # share of its responses with EOS


def verdict_section(outcomes: Iterable[tuple[Outcome, Sequence[str]]], known: Mapping[str, Rows] = {}) -> Section:
    """Return a paragraph per outcome; outcomes come with run directories, and the doctor checks their metrics.

    known: run directory -> its metrics, if already read.
    """
    return Section(about=markup.verdict([verdict(outcome, *findings_in(runs, known)) for outcome, runs in outcomes]))


def outcomes_of(result: dict, outcome: Callable[[dict, str], Outcome]) -> Iterator[tuple[Outcome, list[str]]]:
    """Yield the outcome of each policy after the first, or of the only one, and its run directory, if any.

    A policy from the first policy's checkpoint, such as its best-of-N, has no separate run. Of the checkpoints kept
    along a run, only the last has an outcome.
    """
    words = result["args"]["policies"]
    checkpoints = dict(zip(words[::2], words[1::2], strict=True))
    first, *rest = result["policies"]
    earlier = earlier_checkpoints(checkpoints)
    for name in rest or [first]:
        if name in earlier:
            continue
        has_separate_run = not checkpoints[name].startswith("best-of-") and (
            name == first or checkpoints[name] != checkpoints[first]
        )
        yield outcome(result, name), [run_of(checkpoints[name])] if has_separate_run else []


def findings_in(runs: Sequence[str], known: Mapping[str, Rows] = {}) -> tuple[list[Finding] | None, str]:
    """Return the doctor's findings in runs, None if none has metrics; and a sentence if a run can't be read."""
    findings: list[Finding] | None = None
    for run in runs:
        try:
            run_findings = findings_of(run, known.get(run))
        except InputError as error:  # the evaluation is done: write its report anyway
            return None, f"The doctor can't read the run: {error}"
        if run_findings is not None:
            findings = [*(findings or []), *run_findings]
    return findings, ""


def findings_of(run: str, rows: Rows | None = None) -> Sequence[Finding] | None:
    """Return the doctor's findings in a run's metrics; None without metrics, as for models from the Hub."""
    rows = read_metrics(run) if rows is None else rows
    return examine_metrics(Record(settings=flat_settings(read_settings(run)), rows=rows, summary={})) if rows else None


def verdict(outcome: Outcome, findings: Sequence[Finding] | None, unread: str = "") -> tuple[str, str]:
    """Return one of KINDS and a paragraph; unread: the reason for missing findings."""
    level, kind, change, eos_rate = outcome
    sentences = [level, change]
    if eos_rate < FEW_ENDINGS:
        kind = worse(kind, "warn")
        sentences.append(f"Only {of_100(eos_rate)} responses end with EOS; the others are truncated.")
    if findings:
        is_over = any(finding.name == "over-optimised" for finding in findings)
        kind = worse(kind, "bad" if is_over else "warn")
        first, *rest = [f"{finding.seen} {finding.means} ({finding.name})" for finding in findings]
        sentences += [f"Training run: {first}", *(["Possible consequences:"] if rest else []), *rest]
    elif findings is not None:
        sentences.append("Nothing looks wrong." if kind == "good" else "The run's metrics show no problem.")
    return kind, " ".join(filter(None, [*sentences, unread]))


def sign_of(ends: Sequence[float], zero: float = 0.0) -> int:
    """Return 1 or -1 if an interval is above or below `zero`, else 0."""
    low, high = ends
    return int(low > zero) - int(high < zero)


def worse(*kinds: str) -> str:
    return max(kinds, key=KINDS.index)


def of_100(share: float) -> str:
    return f"{round(100 * share)}% of"


def change_of(true: Gain | None, rewarded: Gain | None) -> tuple[str, str]:
    """Return one of KINDS and a sentence on the change of the true score and of the score used in training."""
    if true is None and rewarded is None:
        return "good", ""
    if rewarded is None:
        assert true is not None
        texts = {
            1: f"{capital(true.measure)} rose",
            0: f"It did not learn: {true.measure} did not change",
            -1: f"It got worse: {true.measure} fell",
        }
        return KINDS[1 - true.sign], f"{texts[true.sign]} ({true.text})."
    scored = f"{rewarded.measure} {{}} ({rewarded.text})"
    if true is None:
        known = {
            1: f"{capital(scored.format('rose'))}; this doesn't show whether the responses are better.",
            0: f"It did not learn: {scored.format('did not change')}.",
            -1: f"It did not learn: {scored.format('fell')}.",
        }
        return ("good" if rewarded.sign == 1 else "warn"), known[rewarded.sign]
    if true.sign == 1:
        moved = {1: "rose as well", 0: "did not change", -1: "fell"}[rewarded.sign]
        both = f"{capital(true.measure)} rose ({true.text}); {scored.format(moved)}."
        return ("good" if rewarded.sign == 1 else "warn"), both
    if rewarded.sign == 1:
        fell = "fell" if true.sign == -1 else "did not rise"
        return "bad", f"It is over-optimised: {scored.format('rose')} and {true.measure} {fell} ({true.text})."
    if true.sign == 0:
        moved = f"neither did {rewarded.measure} ({rewarded.text})" if rewarded.sign == 0 else scored.format("fell")
        return "warn", f"It did not learn: {true.measure} did not change ({true.text}), and {moved}."
    moved = "did not change" if rewarded.sign == 0 else "fell as well"
    return "bad", f"It got worse: {true.measure} fell ({true.text}); {scored.format(moved)}."


def comparison(measure: str, against: str, gains: Mapping[str, Gain | None]) -> tuple[str, str]:
    """Return one of KINDS and a sentence on who is better or worse than `against`; gains: name -> gain or None.

    None is a single seed, without an interval.
    """
    by_sign: dict[int, list[str]] = {1: [], -1: [], 0: []}
    single_seed = [name for name, gain in gains.items() if gain is None]
    for name, gain in gains.items():
        if gain is not None:
            by_sign[gain.sign].append(f"{name} ({gain.text})")
    texts = {
        1: f"better than {against}",
        -1: "worse" if by_sign[1] else f"worse than {against}",
        0: "no difference shown",
    }
    parts = [f"{texts[sign]}: {', '.join(names)}" for sign, names in by_sign.items() if names]
    if single_seed:
        parts.append(f"one seed, so no interval: {', '.join(single_seed)}")
    kind = "good" if by_sign[1] else "bad" if by_sign[-1] else "warn"
    return kind, f"By {measure}, seed by seed, {'; '.join(parts)}."


def capital(text: str) -> str:
    """Capitalize the first letter and leave the others unchanged."""
    return text[:1].upper() + text[1:]
