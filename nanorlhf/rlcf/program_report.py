"""Tables and report.html of an evaluation that compiles and runs generated programs."""

from collections import Counter

from markupsafe import Markup

from nanorlhf.report.page import Column, Lines, Page, Section, markup, number, percent, tabulate
from nanorlhf.report.run_curves import run_sections
from nanorlhf.report.verdict import Gain, Outcome, change_of, of_100, outcomes_of, verdict_section
from nanorlhf.rlcf.error_profile import CATEGORIES
from nanorlhf.rlcf.figures import (
    CURVES,
    at_k_figures,
    error_figure,
    problem_figures,
    temperature_figures,
    training_figures,
)
from nanorlhf.training.run_directory import Rows, read_metrics


def at_k(result: dict) -> Lines:
    """Return the table of pass@k, and of exec@k and comp@k at the smallest k, at the best temperature for each k."""
    ks = result["args"]["ks"]
    lines = [["%", *(f"pass@{k}" for k in ks), f"exec@{ks[0]}", f"comp@{ks[0]}", "temperature"]]
    for name, row in result["policies"].items():
        first, *rest = row["at_k"]
        passes = [percent(first["pass"], first["pass_ci"]), *(percent(row_at_k["pass"]) for row_at_k in rest)]
        temperatures = " / ".join(str(best["temperature"]) for best in row["at_k"])
        lines.append(
            [name, *passes, percent(first["exec"]), percent(first["comp"], first["comp_ci"]), temperatures]
        )  # fmt: skip
    return lines


def best_rows(result: dict) -> dict[str, dict]:
    """Return each policy's results at the best temperature for the smallest k."""
    return {
        name: next(r for r in row["temperatures"] if r["temperature"] == row["at_k"][0]["temperature"])
        for name, row in result["policies"].items()
    }


def differences(result: dict) -> Lines:
    """Return the table of each policy's gain over the first, paired by problem, at the smallest k."""
    first, k = next(iter(result["policies"])), result["args"]["ks"][0]
    columns = [Column(key, f"{key}@{k}", sign="+", factor=100) for key in ("pass", "exec", "comp")]
    return tabulate(f"minus {first}, %", columns, result["differences"].items())


def outcome(result: dict, name: str) -> Outcome:
    """Return the verdict on a policy: the share it solves, and its gains over the first policy in pass and comp."""
    k, gains = result["args"]["ks"][0], result["differences"].get(name, {})
    first = next(iter(result["policies"]))
    solved = {policy: row["at_k"][0]["pass"] for policy, row in result["policies"].items()}
    comparison = f" ({first}: {round(100 * solved[first])}%)" if gains else ""
    level = f"{name} solves {of_100(solved[name])} problems with {k} sample{'s' * (k > 1)}{comparison}."
    eos_rate = best_rows(result)[name]["eos_rate"]
    if not gains:
        return Outcome(level, "good", "", eos_rate)
    passes, compiles = (
        Gain(f"its {key}@{k}", gains[key]["ci"], f"{percent(gains[key]['mean'], gains[key]['ci'], '+')} points")
        for key in ("pass", "comp")
    )
    if compiles.sign == 1 and passes.sign == 0:  # it learned what the compiler rewards, which isn't a fault
        change = f"More of its programs compile ({compiles.text}), but {passes.measure} did not change ({passes.text})."
        return Outcome(level, "warn", change, eos_rate)
    return Outcome(level, *change_of(passes, compiles), eos_rate)


def errors(result: dict) -> Lines:
    """Return [RLCF figure 4] as a table, without categories that have no errors."""
    best = best_rows(result)
    lines = [["errors per response", *best]]
    for category in CATEGORIES:
        if any(row["errors"][category] for row in best.values()):
            lines.append([category.replace("_", " "), *(f"{row['errors'][category]:.3f}" for row in best.values())])
    lines.append(["responses without any, %", *(percent(row["compile_rate"]) for row in best.values())])
    if any(row["discriminator"] is not None for row in best.values()):
        scores = [number(row["discriminator"], digits=3, sign="+") for row in best.values()]
        lines.append(["discriminator, mean of those", *scores])
    return lines


def reasons(result: dict) -> Lines:
    """Return the table of run outcomes: counts by reason."""
    best = best_rows(result)
    total = sum((Counter(row["reasons"]) for row in best.values()), Counter())
    lines = [["outcome of runs", *best]]
    for reason in sorted(total, key=lambda reason: (reason != "passed", -total[reason])):
        lines.append([reason.replace("_", " "), *(f"{row['reasons'].get(reason, 0):,}" for row in best.values())])
    return lines


def temperatures(result: dict) -> Lines:
    """Return the table of all policies at all temperatures. A star marks the best for a k, as in the first table."""
    ks = result["args"]["ks"]
    heading = ["policy", "temperature", *(f"pass@{k}" for k in ks), f"exec@{ks[0]}", f"comp@{ks[0]}"]
    lines = [[*heading, "EOS rate", "length, tokens"]]
    for policy, row in result["policies"].items():
        for at in row["temperatures"]:
            stars = [" *" if best["temperature"] == at["temperature"] else "" for best in row["at_k"]]
            passes = [percent(x) + star for x, star in zip(at["pass_at_k"], stars, strict=True)]
            successes = [percent(at[f"{name}_at_k"][0]) for name in ("exec", "comp")]
            lengths = [f"{at['eos_rate']:.3f}", f"{at['response_length']:.1f}"]
            lines.append([policy, str(at["temperature"]), *passes, *successes, *lengths])
    return lines


# ------------------------------------------------------------------------------------------------------------ the page
def program(name: str, row: dict) -> Markup:
    """Render one response with its outcome and the messages of the compiler and the run."""
    error, reason, response = row["error"], row["reason"], row["response"]
    messages, blamed = [], None
    if error:
        messages.append(" ".join(error["message"].split()))
        start, end = error["start"], error["end"]
        blamed = response[:start], response[start:end], response[end:]
    if reason != "passed" and not (error and reason == "compile_error"):  # otherwise the message would repeat
        messages.append(row["output"])
    return markup.program(name, reason, row["discriminator"], response, blamed, " · ".join(filter(None, messages)))


def sample_card(sample: dict) -> Markup:
    """Render a problem and the first response of each policy."""
    programs = [program(name, row) for name, row in sample["policies"].items()]
    return markup.card(f"{sample['task']}\n\n{sample['query']}", programs, "programs")


def page(result: dict, runs: dict[str, str], samples: list[dict]) -> Page:
    """Return the page: tables, figures, the curves of `runs`, and `samples` side by side.

    runs: run directory -> name.
    """
    logged = {run: rows for run in runs if (rows := read_metrics(run))}
    in_training: dict[str, Rows] = {}  # runs that share a name are listed by directory
    for run, rows in logged.items():
        if any(key in row for row in rows for key in CURVES):
            in_training[run if runs[run] in in_training else runs[run]] = rows
    policies, best, settings = result["policies"], best_rows(result), result["args"]
    about_errors = (
        f"Errors and outcomes are at the best temperature for k = {settings['ks'][0]}. Errors are the compiler's, for "
        "the program without its tests, plus local variables of the response that are never read."
    )
    if settings["discriminator"] is not None:
        about_errors += (
            f"\nThe discriminator ({settings['discriminator']}) compares a sample y' with the written program y: "
            "D(x, y', y) is near 1 if the sample looks more human-written, and near -1 if the written program does."
        )
    return [
        markup.title("Results by training stage"),
        verdict_section(outcomes_of(result, outcome)),
        Section(
            about=f"{result['num_problems']} problems in {result['language'].capitalize()}, {settings['num_samples']} "
            f"samples per problem and temperature; top-p {settings['top_p']}, at most {settings['response_length']} "
            f"tokens, timeout {settings['timeout']:g} s, seed {settings['seed']}.",
            tables=[at_k(result), differences(result)],
            notes="comp: the program compiles with its tests. exec: it compiles, and all tests run without a crash or "
            "a timeout. pass: all results are also right. For each k, the temperature is the one with the best "
            "pass@k; exec and comp use the same one. Intervals are 95%, over problems. Differences are paired by "
            "problem, with each policy at its best temperature.",
            figures=at_k_figures({name: row["at_k"] for name, row in policies.items()}),
            caption="pass@k is the probability that at least one of k samples passes, averaged over problems. A "
            "program that compiles may crash, and one that runs may be wrong.",
        ),
        Section(
            "Problems",
            figures=problem_figures(
                {name: row["num_passed"] for name, row in best.items()},
                settings["num_samples"],
                result["query_lengths"],
                settings["seed"],
            ),
            caption="The first figure sorts each policy's problems by the share of samples that pass: the area under a "
            f"curve is pass@1, and the share of problems above 0 is pass@{settings['num_samples']}. The second one has "
            "four groups of equal size, with 95% intervals over problems. The temperature is the best one for "
            f"k = {settings['ks'][0]}.",
        ),
        Section(
            "Errors",
            tables=[errors(result)],
            notes=about_errors,
            figures=[error_figure({name: row["errors"] for name, row in best.items()})],
            caption="One mistake may count several times: an undeclared variable is an error at each use.",
        ),
        Section(
            "Outcomes",
            tables=[reasons(result)],
            notes=f"Programs ran in a sandbox ({'; '.join(result['isolation'])}).",
        ),
        Section(
            "All temperatures",
            tables=[temperatures(result)],
            notes="In %. A star marks the best pass@k of each policy.",
            figures=temperature_figures({name: row["temperatures"] for name, row in policies.items()}, settings["ks"]),
            caption="A more confident policy gives k answers that are more alike, so it gains less from more samples. "
            "A higher temperature restores diversity, at the cost of more mistakes.",
        ),
        Section(
            "In training",
            figures=training_figures(in_training, policies),
            caption="Measured on the rollouts, i.e. on the training queries at the training temperature. Lines are "
            "running means; faint lines are single updates. At an accuracy of 0.5, the discriminator can't distinguish "
            "the policy's code from human code.",
        ),
        *run_sections(logged),
        Section("Samples side by side", samples=list(map(sample_card, samples))),
    ]
