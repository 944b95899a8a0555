"""The static checks as a reward: a program with an undefined name or an unused variable fails."""

from functools import cache

from nanorlhf.rlcf.compilers import Compiler, first_error
from nanorlhf.rlcf.feedback import compiler_for, make_programs


@cache
def compiler(language: str) -> Compiler:
    return compiler_for(language)


def fails(queries: list[str], responses: list[str], records: list[dict]) -> list[float]:
    """-1 for a program that fails, else 0."""
    programs, spans = make_programs(records, responses)
    checked = compiler(records[0]["language"]).check(programs, spans)
    return [
        -float(first_error(diagnostics, *span) is not None) for diagnostics, span in zip(checked, spans, strict=True)
    ]


def passes(queries: list[str], responses: list[str], records: list[dict]) -> list[float]:
    """-1 for a program that fails, else 1."""
    return [2 * score + 1 for score in fails(queries, responses, records)]
