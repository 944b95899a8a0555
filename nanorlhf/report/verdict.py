"""What happened, in words: the first lines of a report of summaries, from its numbers and what the doctor's rules find.

A gain over the first policy counts where its 95% interval, paired by query, leaves out 0.
"""

from collections.abc import Sequence

from nanorlhf.doctor.finding import Finding
from nanorlhf.doctor.metric_rules import examine_metrics
from nanorlhf.doctor.record import Record
from nanorlhf.errors import InputError
from nanorlhf.report.page import Section, markup
from nanorlhf.training.run_directory import flat_settings, read_metrics, read_settings

FEW_ENDINGS = 0.95  # a smaller share of responses with EOS is worth a sentence
KINDS = ("good", "warn", "bad")  # from the best to the worst


def verdict_section(result: dict) -> Section:
    """A paragraph for each policy after the first, or for the only one. Its place is read in the settings."""
    words = result["args"]["policies"]
    places = dict(zip(words[::2], words[1::2], strict=True))
    first, *others = result["policies"]
    paragraphs = []
    for name in others or [first]:
        is_run_of_its_own = not places[name].startswith("best-of-") and (name == first or places[name] != places[first])
        findings, unread = None, ""
        try:
            findings = findings_of(places[name]) if is_run_of_its_own else None
        except InputError as error:  # the evaluation is done: its report is written all the same
            unread = f" The doctor can't read its run: {error}"
        kind, text = verdict(result, name, findings)
        paragraphs.append((kind, text + unread))
    return Section(about=markup.verdict(paragraphs))


def findings_of(run: str) -> Sequence[Finding] | None:
    """What the doctor's rules find in a run's metrics; None where it has none, as a model from the Hub."""
    rows = read_metrics(run)
    return examine_metrics(Record(settings=flat_settings(read_settings(run)), rows=rows, summary={})) if rows else None


def verdict(result: dict, name: str, findings: Sequence[Finding] | None) -> tuple[str, str]:
    """One of KINDS, and a paragraph about a policy."""
    row = result["policies"][name]
    kind, outcome = outcome_of(result["differences"].get(name, {}))
    sentences = [wins(result, name), outcome]
    if row["eos_rate"] < FEW_ENDINGS:
        kind = max(kind, "warn", key=KINDS.index)
        sentences.append(f"Only {of_100(row['eos_rate'])} of its responses end before they are cut.")
    if findings:
        is_over = any(finding.name == "over-optimised" for finding in findings)
        kind = max(kind, "bad" if is_over else "warn", key=KINDS.index)
        sentences += [f"Its run: {finding.seen} {finding.means} ({finding.name})" for finding in findings]
    elif findings is not None:
        sentences.append("Nothing looks wrong." if kind == "good" else "The metrics of its run show no fault.")
    return kind, " ".join(filter(None, sentences))


def wins(result: dict, name: str) -> str:
    """How often it beats the references, and how often the first policy does; empty where nobody judged."""
    policies = result["policies"]
    first = next(iter(policies))
    for key, judge in (("gold_win_rate", ""), ("judge_win_rate", ", by the judge")):
        rate, of_first = policies[name].get(key), policies[first].get(key)
        if rate is not None:
            beside = f" ({first}: {round(100 * of_first)})" if name != first and of_first is not None else ""
            whom = "the references" if key == "gold_win_rate" else result["judge"]["against"]
            return f"{name} beats {whom} in {of_100(rate)} queries{beside}{judge}."
    return ""


def of_100(share: float) -> str:
    return f"{round(100 * share)} of 100"


def outcome_of(gains: dict[str, dict]) -> tuple[str, str]:
    """One of KINDS, and a sentence on the scores; gains: score -> its mean gain and interval."""
    gold, rm = (sign_of(gains.get(score)) for score in ("gold_score", "rm_score"))
    if gold is None and rm is None:
        return "good", ""
    if rm is None:
        assert gold is not None
        said = {
            1: "The gold score rose",
            0: "It did not learn: the gold score did not change",
            -1: "It got worse: the gold score fell",
        }
        return KINDS[1 - gold], f"{said[gold]} ({gain(gains['gold_score'])})."
    scored = gain(gains["rm_score"])
    if gold is None:
        known = {
            1: f"The reward model's score rose ({scored}); whether the responses are better, it can't say.",
            0: f"It did not learn: the reward model's score did not change ({scored}).",
            -1: f"It did not learn: the reward model's score fell ({scored}).",
        }
        return ("warn" if rm < 1 else "good"), known[rm]
    true = gain(gains["gold_score"])
    if gold == 1:
        moved = {1: "rose as well", 0: "did not change", -1: "fell"}[rm]
        return ("good" if rm == 1 else "warn"), f"The gold score rose ({true}); the reward model's {moved} ({scored})."
    if rm == 1:
        fell = f"fell ({true})" if gold == -1 else f"did not rise ({true})"
        return "bad", f"It is over-optimised: the reward model's score rose ({scored}) and the gold score {fell}."
    if gold == 0:
        moved = "and neither did the reward model's" if rm == 0 else "and the reward model's fell"
        return "warn", f"It did not learn: the gold score did not change ({true}), {moved} ({scored})."
    return "bad", f"It got worse: the gold score changed by {true}, the reward model's score by {scored}."


def sign_of(gained: dict | None) -> int | None:
    """1 or -1 where the interval of a gain lies above or below 0, else 0; None without one."""
    if gained is None:
        return None
    low, high = gained["ci"]
    return int(low > 0) - int(high < 0)


def gain(gained: dict) -> str:
    return f"{gained['mean']:+.2f}"
