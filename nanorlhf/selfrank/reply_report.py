"""Tables and report.html for an evaluation of replies: overlap with references, self-ranking and the human study."""

from collections.abc import Iterable

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from nanorlhf.report.page import BLUE, Column, Lines, Page, Section, answer, markup, number, panel, percent, tabulate
from nanorlhf.report.run_curves import run_sections
from nanorlhf.report.verdict import Gain, Outcome, change_of, outcomes_of, verdict_section
from nanorlhf.training.run_directory import read_metrics

SQUAD = (
    Column("exact_match", "EM", factor=100),
    Column("precision", "precision", factor=100),
    Column("recall", "recall", factor=100),
    Column("f1", "F1", factor=100),
)
OVERLAP = (
    Column("bleu4", "BLEU-4", factor=100),
    Column("google_bleu", "Google-BLEU", factor=100),
    Column("meteor", "METEOR", factor=100),
)
SCORES = (Column("gold_score", "gold score", factor=100), Column("rm_score", "RM score"))
ENDINGS = (Column("eos_rate", "EOS rate", 3), Column("response_length", "length, tokens", 1))
METRICS = {column.key: column for column in (*SQUAD, *OVERLAP, *SCORES)}


# ----------------------------------------------------------------------------------------------------------- 1. tables
def measured(result: dict, columns: Iterable[Column]) -> list[Column]:
    """Return those of `columns` that the evaluation has."""
    known = next(iter(result["policies"].values()))["metrics"]
    return [column for column in columns if column.key in known]


def with_unit(column: Column) -> str:
    return f"{column.heading} × {column.factor}" if column.factor > 1 else column.heading


def means(result: dict, columns: tuple[Column, ...]) -> Lines:
    """[STR tables] Return one row per policy, with 95% intervals over questions; empty without any of `columns`."""
    present = measured(result, columns)
    lines = tabulate("× 100", present, [(name, row["metrics"]) for name, row in result["policies"].items()])
    if METRICS["meteor"] in present:  # scores with and without synonyms are not comparable
        lines[0][1 + present.index(METRICS["meteor"])] += f" ({result['meteor_matching']})"
    return lines if present else []


def scores(result: dict) -> Lines:
    """Return gold and RM score, EOS rate and length of the references and each policy."""
    columns = [column._replace(heading=with_unit(column)) for column in measured(result, SCORES)]
    policies = [(name, row | row["metrics"]) for name, row in result["policies"].items()]
    return tabulate("policy", [*columns, *ENDINGS], [("reference", result["reference"]), *policies])


def differences(result: dict, columns: tuple[Column, ...]) -> Lines:
    """Return each policy minus the one before it, and the last minus all others; empty without any of `columns`."""
    names = list(result["policies"])
    neighbours = list(zip(names[1:], names, strict=False))
    present = measured(result, columns)
    rows = {(row["ours"], row["theirs"], row["metric"]): row for row in result["differences"]}
    lines = [["difference", *map(with_unit, present)]]
    for ours, theirs in dict.fromkeys([*neighbours, *((names[-1], other) for other in names[:-1])]):
        lines.append([f"{ours} - {theirs}", *(gain_cell(rows[ours, theirs, column.key]) for column in present)])
    return lines if present else []


def gain_cell(row: dict) -> str:
    gain = {"mean": row["mean_difference"], "ci": row["mean_difference_ci"]}
    return METRICS[row["metric"]]._replace(sign="+").cell({row["metric"]: gain})


def outcome(result: dict, name: str) -> Outcome:
    """Return the verdict on a policy against the one before it, by the gold score or F1 and the reward model's score.

    Without any of these, BLEU-4 decides.
    """
    names = list(result["policies"])
    before = names[names.index(name) - 1] if name != names[0] else None
    keys = [column.key for column in measured(result, METRICS.values())]
    rewarded = "rm_score" if "rm_score" in keys else None
    gold_metric = next((m for m in ("gold_score", "f1", *(() if rewarded else ("bleu4",))) if m in keys), None)
    shown = METRICS[gold_metric or rewarded or "bleu4"]
    rows = result["policies"].items()
    means = {policy: number(shown.factor * row["metrics"][shown.key]["mean"]) for policy, row in rows}
    comparison = f" ({before}: {means[before]})" if before else ""
    level = f"The mean {with_unit(shown)} of {name} is {means[name]}{comparison}."
    gains = {
        row["metric"]: Gain(f"the {METRICS[row['metric']].heading}", row["mean_difference_ci"], gain_cell(row))
        for row in result["differences"]
        if (row["ours"], row["theirs"]) == (name, before)
    }
    return Outcome(level, *change_of(gains.get(gold_metric), gains.get(rewarded)), result["policies"][name]["eos_rate"])


def self_ranking(result: dict) -> Lines:
    """Return how often the reward model and gold agree with self-ranking, by group of pairs; empty without either."""
    columns = {
        "rm_accuracy": "RM agrees",
        "chosen_better": "chosen is better",
        "chosen_as_good": "at least as good",
        "gold_agreement": "unequal pairs: better",
        "rm_gold_agreement": "unequal pairs: RM right",
    }
    groups = result["self_ranking"] or [{}]
    present = [column for column in columns if column in groups[0]]
    lines = [["pairs of self-ranking, %", "pairs", *(columns[column] for column in present)]]
    for group in groups:
        name = "all"
        if "noise" in group:
            name = "without noise" if group["noise"] == "none" else f"noise: {group['noise']}"
        elif "distance" in group:
            name = f"{group['distance']} rank{'s' * (group['distance'] != 1)} apart"
        bare = ("chosen_better", "chosen_as_good")  # these have no chance level
        cells = [percent(group[c], None if c in bare else group[f"{c}_ci"]) for c in present]
        lines.append([name, f"{group.get('num_pairs', 0):,}", *cells])
    return lines if present else []


def first_answers(result: dict) -> Lines:
    """Return how often self-ranking puts a right answer first; empty without gold."""
    rows = result["first_answers"]
    names = {
        "first": "TextRank's first",
        "random": "one at random",
        "last": "TextRank's last",
        "any": "any of them",
        "first_minus_random": "first - random",
    }
    lines = [["answers to a question", "right, %", "gold score × 100"]]
    for key, name in names.items() if rows else ():
        sign = "+" if key == "first_minus_random" else ""
        row = rows[key]
        lines.append([name, percent(row["right"], row["right_ci"], sign), percent(row["gold_score"], None, sign)])
    return lines


def human_study(study: dict) -> Lines:
    """[STR human study] Return the reward model's agreement with people, and people's with each other, times 100."""
    both = f"RM and people, {study['num_questions']} questions"
    lines = [[f"× 100, {'with' if study['representatives'] else 'without'} ISODATA", "", "chance", "between"]]
    for measure, name, chance in (
        ("order_probability", f"same order of all {study['num_answers']}", study["chance"]),
        ("pairwise_agreement", "pairs in the same order", 0.5),
        ("kendall_tau", "Kendall's tau", 0.0),
    ):
        lines.append([name, percent(study[measure], study[f"{measure}_ci"]), percent(chance), both])
    people = study["annotators"]
    if people:
        pairs = f"people, {people['num_pairs']} pair{'s' * (people['num_pairs'] != 1)} of them"
        lines.append(["Cohen's kappa", percent(people["cohen_kappa"]), percent(0), pairs])
    if people and people["num_common"]:
        common = f"{people['num_annotators']} people, {people['num_common']} questions"
        lines.append(["Fleiss' kappa", percent(people["fleiss_kappa"]), percent(0), common])
    return lines


def costs(result: dict) -> Lines:
    """Return the size and time of the training run that each policy and the reward model came from."""
    lines = [["training run", "parameters trained", "examples", "seconds"]]
    for name, cost in result["costs"].items():
        parameters, examples = f"{cost['num_trained_parameters']:,}", f"{cost['num_examples']:,}"
        lines.append([name, parameters, examples, number(cost["seconds"], digits=0)])
    return lines


def notes(result: dict) -> str:
    """Return the settings behind the tables, and what was omitted."""
    settings = result["args"]
    sentences = [
        f"{result['num_questions']} {settings['split']} questions, one reply each; temperature "
        f"{settings['temperature']}, top-p {settings['top_p']}, at most {settings['response_length']} tokens, seed "
        f"{settings['seed']}. Intervals are 95%, over questions."
    ]
    if result["self_ranking"] is None:
        sentences.append("Self-ranking's pairs are omitted: --data has none, or there is nothing to compare them with.")
    if not result["human_study"]:
        sentences.append("The human study is omitted: it needs --rankings, written by `python -m data.rank`.")
    elif any(study["annotators"] is None for study in result["human_study"]):
        sentences.append("Kappa is omitted: no question was ranked by two people.")
    if result["figure"] is None:
        sentences.append("Figure 2 is omitted: it needs --self-rank and --encoder.")
    return " ".join(sentences)


# ------------------------------------------------------------------------------------------------------------- 2. page
def interval_figures(result: dict) -> list[Figure]:
    """Draw one panel per metric, one bar per policy, with intervals."""
    drawn = []
    for column in measured(result, METRICS.values()):
        factor = column.factor
        rows = [row["metrics"][column.key] for row in result["policies"].values()]
        lengths = np.array([factor * row["mean"] for row in rows])
        ends = np.array([[factor * end for end in row["mean_ci"]] for row in rows]).T  # (2, policies)
        figure, axes = panel(column.heading, with_unit(column), "")
        figure.set_size_inches(5.2, 1.3 + 0.32 * len(rows))
        axes.barh(
            range(len(rows)), lengths, 0.72, xerr=np.abs(ends - lengths), color=BLUE,
            error_kw={"elinewidth": 1, "ecolor": "#1c2024", "capsize": 2},
        )  # fmt: skip
        if ends.min() >= 0:
            axes.set_xlim(left=0)
        axes.set_yticks(range(len(rows)), list(result["policies"]))
        axes.invert_yaxis()  # the first policy on top
        axes.grid(False, axis="y")
        drawn.append(figure)
    return drawn


def figure_2(figure: Figure, drawn: dict) -> Page:
    """Return STR Figure 2 and, below it, the answers, best first."""
    caption = (
        f"Embeddings of the sampled answers by {drawn['encoder']}, in two dimensions. The colour is the rank by "
        "TextRank. Each cluster's representative is ringed and labelled with its rank, and lines connect it to the "
        "other members. The reward model's pairs consist of representatives only. In the paper, the encoder for this "
        "figure wasn't used for ranking."
    )
    section = Section("Answers to one question, ranked and clustered", figures=[figure], caption=caption)
    return [section, markup.ranked(drawn["query"], drawn["answers"])]


def sample_card(sample: dict) -> Markup:
    """Render a question, its references and each policy's reply."""
    answers = [answer("reference", " / ".join(text.strip() for text in sample["references"]), {})]
    for name, row in sample["policies"].items():
        overlap = () if "f1" in row else ("bleu4", "meteor")  # SQuAD has its own metrics
        keys = ("exact_match", "f1", *overlap, *(column.key for column in SCORES))
        shown = {METRICS[key].heading: METRICS[key].factor * row[key] for key in keys if key in row}
        answers.append(answer(name, row["response"], shown))
    return markup.card(sample["query"], answers)


def page(result: dict, figure: Figure | None, runs: list[str], samples: list[dict]) -> Page:
    """Return the page: tables, figures, the curves of `runs`, and `samples` side by side.

    figure: STR Figure 2, drawn from the answers in result["figure"].
    """
    return [
        markup.title("Results by training stage"),
        verdict_section(outcomes_of(result, outcome)),
        Section(
            about=notes(result),
            tables=[means(result, SQUAD), means(result, OVERLAP), scores(result)],
            figures=interval_figures(result),
            caption="Overlap measures similarity to the reference. A dialogue can continue in many equally good ways, "
            "so the numbers are low.",
        ),
        Section(
            "Differences between policies",
            tables=[differences(result, metrics) for metrics in (SQUAD, OVERLAP, SCORES)],
            notes="Two policies differ if the interval excludes 0. It resamples questions, each with both replies, so "
            "the difficulty of a question cancels out.",
        ),
        Section(
            "Cost",
            tables=[costs(result)],
            notes="Each run without the ones before it: PPO also needs its initial policy, a reward model, and the "
            "answers that self-ranking samples. Examples count once per epoch; PPO's are the answers it samples.",
        ),
        Section(
            "Reward model vs. self-ranking",
            tables=[self_ranking(result)],
            notes="Validation pairs; chance is 50. Accuracy should rise with the distance in rank. If it is near 50 "
            "for a type of noise, the reward model doesn't notice that noise. With gold scores, the table also shows "
            "how often the chosen answer is better than, or at least as good as, the rejected one. For pairs with "
            "different gold scores, it shows how often the better answer is chosen, and how often the reward model "
            "prefers it.",
        ),
        Section(
            "Self-ranking's first answers",
            tables=[first_answers(result)],
            notes="The answer most similar to the others isn't always right: if most answers are wrong, so is it.",
        ),
        Section(
            "Human study",
            tables=[human_study(study) for study in result["human_study"]],
            notes="People's ranking is by mean rank. Kappa treats the rank of each answer as a label. With ISODATA, "
            "all answers to a question are from different clusters (`data.rank --representatives`).",
        ),
        *(figure_2(figure, result["figure"]) if figure else ()),
        *run_sections(run for run in dict.fromkeys(runs) if read_metrics(run)),
        Section("Samples side by side", samples=list(map(sample_card, samples))),
    ]
