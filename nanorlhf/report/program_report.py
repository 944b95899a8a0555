"""The tables and the page of an evaluation that compiles and runs what policies wrote."""

import html
from collections import Counter
from pathlib import Path

from nanorlhf.code.error_profile import CATEGORIES
from nanorlhf.report.answer_report import figures
from nanorlhf.report.page import SEARCH, aligned, curves, html_table, write_page
from nanorlhf.report.program_figures import at_k_figures, error_figure, training_figures
from nanorlhf.run_directory import read_metrics

Lines = list[list[str]]
STYLE = """<style>
.programs { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
.programs div { padding: .6rem 1rem; border-top: 1px solid #dfe3e8; min-width: 0; overflow-wrap: anywhere; }
.programs pre { margin: .4rem 0; font: .8rem/1.45 ui-monospace, monospace; overflow-x: auto; tab-size: 4; }
.programs b { font-size: .85rem; color: #1f5fa8; } .programs mark { background: #fbdedb; color: #98130a; }
.verdict { font-size: .8rem; font-weight: 600; margin-left: .5rem; color: #98130a; }
.verdict.passed { color: #1e6b40; } .verdict.wrong_answer { color: #8d4506; }
</style>"""


def percent(share: float, interval: tuple[float, float] | None = None) -> str:
    return f"{100 * share:.2f}" + (" [{:.2f}, {:.2f}]".format(*(100 * end for end in interval)) if interval else "")


def at_k(result: dict) -> Lines:
    """pass@k, and exec and comp at the smallest k, each at the best temperature of its k."""
    ks = result["args"]["ks"]
    lines = [["%", *(f"pass@{k}" for k in ks), f"exec@{ks[0]}", f"comp@{ks[0]}", "temperature"]]
    for name, row in result["policies"].items():
        first, *others = row["at_k"]
        passes = [percent(first["pass"], first["pass_ci"]), *(percent(other["pass"]) for other in others)]
        temperatures = " / ".join(str(best["temperature"]) for best in row["at_k"])
        lines.append(
            [name, *passes, percent(first["exec"]), percent(first["comp"], first["comp_ci"]), temperatures]
        )  # fmt: skip
    return lines


def best_rows(result: dict) -> dict[str, dict]:
    """Of each policy what was found at the best temperature of the smallest k."""
    return {
        name: next(r for r in row["temperatures"] if r["temperature"] == row["at_k"][0]["temperature"])
        for name, row in result["policies"].items()
    }


def errors(result: dict) -> Lines:
    """[RLCF figure 4] in numbers; categories that no policy has are left out."""
    best = best_rows(result)
    lines = [["errors a response", *best]]
    for category in CATEGORIES:
        if any(row["errors"][category] for row in best.values()):
            lines.append([category.replace("_", " "), *(f"{row['errors'][category]:.3f}" for row in best.values())])
    lines.append(["responses without any, %", *(percent(row["compile_rate"]) for row in best.values())])
    return lines


def reasons(result: dict) -> Lines:
    """How the runs ended."""
    best = best_rows(result)
    total = sum((Counter(row["reasons"]) for row in best.values()), Counter())
    lines = [["how runs ended", *best]]
    for reason in sorted(total, key=lambda reason: (reason != "passed", -total[reason])):
        lines.append([reason.replace("_", " "), *(f"{row['reasons'].get(reason, 0):,}" for row in best.values())])
    return lines


def temperatures(result: dict) -> Lines:
    """Every temperature of every policy; the best of a k, which the first table shows, has a star."""
    ks = result["args"]["ks"]
    heading = ["policy", "temperature", *(f"pass@{k}" for k in ks), f"exec@{ks[0]}", f"comp@{ks[0]}"]
    lines = [[*heading, "EOS rate", "length, tokens"]]
    for policy, row in result["policies"].items():
        for at in row["temperatures"]:
            stars = [" *" if best["temperature"] == at["temperature"] else "" for best in row["at_k"]]
            passes = [percent(x) + star for x, star in zip(at["pass_at_k"], stars, strict=True)]
            others = [percent(at[f"{name}_at_k"][0]) for name in ("exec", "comp")]
            lengths = [f"{at['eos_rate']:.3f}", f"{at['response_length']:.1f}"]
            lines.append([policy, str(at["temperature"]), *passes, *others, *lengths])
    return lines


def notes(result: dict) -> list[str]:
    settings = result["args"]
    return [
        f"{result['num_problems']} problems in {result['language'].capitalize()}, {settings['num_samples']} samples of "
        f"each at every temperature, top-p {settings['top_p']}, at most {settings['response_length']} tokens; a run "
        f"may take {settings['timeout']:g} s; seed {settings['seed']}.",
        "comp: compiles, tests included; exec: compiles, and all tests run without a crash or a timeout; pass: and all "
        "answers are right. The temperature is that of the best pass@k, for each k; exec and comp are at the same. "
        "Intervals are of 95%, over problems.",
        f"Errors and endings are those at the best temperature of k = {settings['ks'][0]}; errors are those of the "
        "compiler in the program without its tests, and local variables of the response that nothing reads.",
    ]


def tables(result: dict) -> str:
    """For the terminal."""
    parts = (aligned(part(result)) for part in (at_k, errors, reasons))
    return "\n\n".join([*parts, "\n".join(notes(result))])


# ------------------------------------------------------------------------------------------------------------ the page
def marked(text: str, error: dict | None) -> str:
    """A response as HTML, what the checks blame in red: `(here)` where nothing shows, at the end of a line or text."""
    if error is None:
        return html.escape(text)
    before, blamed, after = text[: error["start"]], text[error["start"] : error["end"]], text[error["end"] :]
    red, blank = (blamed, "") if blamed.strip() else ("(here)", blamed)
    return f"{html.escape(before)}<mark>{html.escape(red)}</mark>{blank}{html.escape(after)}"


def program(name: str, row: dict) -> str:
    """One response with its verdict, and what was said of it."""
    error, reason = row["error"], row["reason"]
    said = [" ".join(error["message"].split())] if error else []
    if reason != "passed" and not (error and reason == "compile_error"):  # that would be said twice
        said.append(row["output"])
    return (
        f'<div><b>{html.escape(name)}</b><span class="verdict {reason}">{reason.replace("_", " ")}</span>'
        f"<pre>{marked(row['response'], error) or '<i>empty</i>'}</pre>"
        f"<small>{html.escape(' · '.join(filter(None, said)))}</small></div>"
    )


def sample_card(sample: dict) -> str:
    """A problem, and of each policy the first response."""
    programs = "".join(program(name, row) for name, row in sample["policies"].items())
    query = f"{html.escape(sample['task'])}\n\n{html.escape(sample['query'])}"
    return f'<div class="sample"><pre>{query}</pre><div class="programs">{programs}</div></div>'


def write_report(path: Path, result: dict, runs: dict[str, str], samples: list[dict]) -> None:
    """Write report.html, whole or not at all: tables, figures, the curves of `runs`, and `samples` side by side.

    runs: run directory -> the name that it goes by.
    """
    logged = {run: rows for run in runs if (rows := read_metrics(run))}
    drawn = training_figures({runs[run]: rows for run, rows in logged.items()})
    about = notes(result)
    best = best_rows(result)
    parts = [
        STYLE,
        "<h1>What each stage gained</h1>",
        f'<p class="quiet">{html.escape(about[0])}</p>',
        html_table(at_k(result)),
        f'<p class="quiet">{html.escape(about[1])}</p>',
        figures(
            at_k_figures({name: row["at_k"] for name, row in result["policies"].items()}),
            "A problem counts for pass@k by the probability that at least one of k samples passes. What compiles need "
            "not run, and what runs need not be right.",
        ),
        "<h2>What is wrong with them?</h2>",
        f'<p class="quiet">{html.escape(about[2])}</p>',
        html_table(errors(result)),
        figures(
            [error_figure({name: row["errors"] for name, row in best.items()})],
            "One slip may count several times: a variable that was never declared is an error wherever it is used.",
        ),
        "<h2>How did the runs end?</h2>",
        html_table(reasons(result)),
        f'<p class="quiet">Programs ran shut off from the machine ({html.escape("; ".join(result["isolation"]))}).</p>',
        "<h2>Every temperature</h2>",
        html_table(temperatures(result)),
        '<p class="quiet">In %; a star: the best pass@k of that policy.</p>',
    ]
    if drawn:
        caption = (
            "Responses of the rollouts, so at the temperature of training and on its queries; a running mean over the "
            "single updates behind it. A discriminator at 0.5 can't tell the policy's code from people's."
        )
        parts += ["<h2>In training</h2>", figures(drawn, caption)]
    parts += [text for _, text in sorted(map(curves, logged))]
    parts.append(f"<h2>Samples, side by side</h2>{SEARCH}{''.join(map(sample_card, samples))}")
    write_page(path, str(result["args"]["out"]), "\n".join(parts))
