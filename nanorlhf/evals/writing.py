"""Write the results of an evaluation: eval.json, report.html and samples."""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from nanorlhf.dataset import write_jsonl
from nanorlhf.evals.settings import EvalArgs
from nanorlhf.files import atomic
from nanorlhf.report.page import Page, text, write_page
from nanorlhf.training.run import write_json


def json_settings(args: EvalArgs) -> dict[str, Any]:
    """Return the settings as written to eval.json."""
    return json.loads(json.dumps(asdict(args), default=str))


def write_evaluation(
    args: EvalArgs, result: dict, page: Page, files: Mapping[str, Iterable[dict]] | None = None
) -> dict:
    """Write `files` (name -> rows), report.html and eval.json, print the page's tables, and return the result.

    eval.json is written last, so if it exists, the evaluation is complete.
    """
    files = files or {}
    args.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        new = {name: stack.enter_context(atomic(args.out / name)) for name in ("report.html", *files)}
        write_page(new["report.html"], str(args.out), page)
        for name, rows in files.items():
            write_jsonl(new[name], rows)
        (args.out / "eval.json").unlink(missing_ok=True)  # from the evaluation being replaced
    write_json(args.out / "eval.json", result)
    written = ", ".join([str(args.out / "eval.json"), *files])
    print(f"{text(page)}\n\nwritten: {written}; report: {args.out / 'report.html'}")
    return result
