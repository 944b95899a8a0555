"""The line on an LLM judge below a report's tables. [N+ 17]"""

from nanorlhf.report.page import number


def judge_line(judge: dict, pairs: str) -> str:
    """Return the judge, the number of `pairs` with and without a verdict, and the reward model's agreement.

    judge: its statistics, as in eval.json.
    """
    parts = [f"judge {judge['name']}: {judge['judge_pairs']} verdicts on {pairs}"]
    parts.append(f"{judge['judge_unparsed']} unparsed, {judge['judge_unanswered']} unanswered")
    if judge["judge_ties"]:
        parts.append(f"{judge['judge_ties']} ties")
    if "num_calls" in judge:
        parts.append(f"{judge['num_calls']} calls")
    if judge["first_rate"] is not None:
        parts.append(f"A preferred in {judge['first_rate']:.3f} of its answers")
    if judge["rm_agreement"] is not None:
        agreement = number(judge["rm_agreement"], judge["rm_agreement_ci"], 3)
        parts.append(f"the reward model agrees on {agreement} of the {judge['rm_agreement_pairs']} pairs without ties")
    why = judge.get("stopped") or judge.get("last_error")
    return "; ".join(parts) + (f"; {'stopped asking' if judge.get('stopped') else 'last error'}: {why}" if why else "")
