"""What happened, in words: the first lines of a report, from its numbers and what the doctor's rules find.

A gain counts where its 95% interval leaves out 0.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from nanorlhf.errors import InputError
from nanorlhf.report.page import Section, markup
from nanorlhf.rules.finding import Finding
from nanorlhf.rules.metric_rules import examine_metrics
from nanorlhf.rules.record import Record
from nanorlhf.training.run_directory import Rows, flat_settings, read_metrics, read_settings

FEW_ENDINGS = 0.95  # a smaller share of responses with EOS is worth a sentence
KINDS = ("good", "warn", "bad")  # from the best to the worst


class Gain(NamedTuple):
    """What a policy gains over another one by a measure."""

    measure: str  # within a sentence: "the gold score"
    ends: Sequence[float]  # of its 95% interval
    text: str  # its mean and interval, as the page shows them

    @property
    def sign(self) -> int:
        """1 or -1 where the interval lies above or below 0, else 0."""
        return sign_of(self.ends)


class Outcome(NamedTuple):
    """What an evaluation says about a policy or a reward model."""

    level: str  # how good it is, a sentence; empty where that is unknown
    kind: str  # one of KINDS
    change: str  # what became of its scores, a sentence; empty without another one to compare it with
    eos_rate: float = 1.0  # share of its responses with EOS


def verdict_section(outcomes: Iterable[tuple[Outcome, Sequence[str]]], known: Mapping[str, Rows] = {}) -> Section:
    """A paragraph for each outcome; with it come the run directories whose metrics the doctor reads.

    known: run directory -> its metrics, where they have been read.
    """
    return Section(about=markup.verdict([verdict(outcome, *findings_in(runs, known)) for outcome, runs in outcomes]))


def outcomes_of(result: dict, outcome: Callable[[dict, str], Outcome]) -> Iterator[tuple[Outcome, list[str]]]:
    """The outcome of each policy after the first, or of the only one, and its run directory if it has its own."""
    words = result["args"]["policies"]
    places = dict(zip(words[::2], words[1::2], strict=True))
    first, *others = result["policies"]
    for name in others or [first]:
        is_run_of_its_own = not places[name].startswith("best-of-") and (name == first or places[name] != places[first])
        yield outcome(result, name), [places[name]] if is_run_of_its_own else []


def findings_in(runs: Sequence[str], known: Mapping[str, Rows] = {}) -> tuple[list[Finding] | None, str]:
    """What the doctor finds in runs, None if none of them has metrics; and a sentence where it can't read one."""
    findings: list[Finding] | None = None
    for run in runs:
        try:
            found = findings_of(run, known.get(run))
        except InputError as error:  # the evaluation is done: its report is written all the same
            return None, f"The doctor can't read its run: {error}"
        if found is not None:
            findings = [*(findings or []), *found]
    return findings, ""


def findings_of(run: str, rows: Rows | None = None) -> Sequence[Finding] | None:
    """What the doctor's rules find in a run's metrics; None where it has none, as a model from the Hub."""
    rows = read_metrics(run) if rows is None else rows
    return examine_metrics(Record(settings=flat_settings(read_settings(run)), rows=rows, summary={})) if rows else None


def verdict(outcome: Outcome, findings: Sequence[Finding] | None, unread: str = "") -> tuple[str, str]:
    """One of KINDS, and a paragraph; unread: why there are no findings."""
    level, kind, change, eos_rate = outcome
    sentences = [level, change]
    if eos_rate < FEW_ENDINGS:
        kind = worse(kind, "warn")
        sentences.append(f"Only {of_100(eos_rate)} of its responses end before they are cut.")
    if findings:
        is_over = any(finding.name == "over-optimised" for finding in findings)
        kind = worse(kind, "bad" if is_over else "warn")
        first, *others = [f"{finding.seen} {finding.means} ({finding.name})" for finding in findings]
        sentences += [f"Its run: {first}", *(["These may follow:"] if others else []), *others]
    elif findings is not None:
        sentences.append("Nothing looks wrong." if kind == "good" else "The metrics of its run show no fault.")
    return kind, " ".join(filter(None, [*sentences, unread]))


def sign_of(ends: Sequence[float], zero: float = 0.0) -> int:
    """1 or -1 where an interval lies above or below `zero`, else 0."""
    low, high = ends
    return int(low > zero) - int(high < zero)


def worse(*kinds: str) -> str:
    return max(kinds, key=KINDS.index)


def of_100(share: float) -> str:
    return f"{round(100 * share)} of 100"


def change_of(true: Gain | None, rewarded: Gain | None) -> tuple[str, str]:
    """One of KINDS, and a sentence: did the score that training raises rise, and did what is true?"""
    if true is None and rewarded is None:
        return "good", ""
    if rewarded is None:
        assert true is not None
        said = {
            1: f"{capital(true.measure)} rose",
            0: f"It did not learn: {true.measure} did not change",
            -1: f"It got worse: {true.measure} fell",
        }
        return KINDS[1 - true.sign], f"{said[true.sign]} ({true.text})."
    scored = f"{rewarded.measure} {{}} ({rewarded.text})"
    if true is None:
        known = {
            1: f"{capital(scored.format('rose'))}; whether the responses are better, it can't say.",
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
    """One of KINDS, and who is better and who worse than `against`; gains: name -> its gain, None without interval."""
    found: dict[int, list[str]] = {1: [], -1: [], 0: []}
    alone = [name for name, gain in gains.items() if gain is None]
    for name, gain in gains.items():
        if gain is not None:
            found[gain.sign].append(f"{name} ({gain.text})")
    said = {1: f"better than {against}", -1: "worse" if found[1] else f"worse than {against}", 0: "no difference shown"}
    parts = [f"{said[sign]}: {', '.join(names)}" for sign, names in found.items() if names]
    if alone:
        parts.append(f"one seed alone, so without an interval: {', '.join(alone)}")
    kind = "good" if found[1] else "bad" if found[-1] else "warn"
    return kind, f"By {measure}, seed by seed, {'; '.join(parts)}."


def capital(text: str) -> str:
    """With a capital letter first, the others as they are."""
    return text[:1].upper() + text[1:]
