"""Compiler feedback on responses: texts, pass or fail, and the token of the first error."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanorlhf.dataset import Demonstration
from nanorlhf.errors import InputError
from nanorlhf.rlcf.compilers import Compiler, Diagnostic, JavaCompiler, PythonCompiler, first_error
from nanorlhf.rlcf.localisation import character_ends, error_token, response_text


def compiler_for(language: str, error_prone_jar: str | None = None, workers: int | None = None) -> Compiler:
    """Return the static checks for a language, java or python. Raises InputError for ErrorProne with Python."""
    if language == "java":
        return JavaCompiler(workers, error_prone_jar=error_prone_jar)
    if error_prone_jar is not None:
        raise InputError(
            f"--error-prone-jar {error_prone_jar}: ErrorProne only checks Java; these programs are in {language}."
        )
    return PythonCompiler()


def training_compiler(rows: Sequence[Demonstration], error_prone_jar: str | None) -> Compiler:
    """Return the static checks for a data set in one language whose written programs all pass them.

    Raises InputError for ErrorProne if an example was converted without it: a written program might then fail.
    """
    language = rows[0].record["language"]
    for number, row in enumerate(rows if error_prone_jar is not None and language == "java" else (), start=1):
        meta = row.record.get("meta")
        if not isinstance(meta, dict) or meta.get("error_prone") is not True:
            raise InputError(
                f"--error-prone-jar {error_prone_jar}: row {number} of --data was converted without ErrorProne: pass "
                "the jar to data.codenet too, which then drops programs that fail."
            )
    return compiler_for(language, error_prone_jar)


def make_programs(records: list[dict], responses: list[str]) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the programs with these responses, and [start, end) of each response in characters."""
    rows = list(zip(records, responses, strict=True))
    programs = [record["prefix"] + response + record["suffix"] for record, response in rows]
    return programs, [(len(record["prefix"]), len(record["prefix"] + response)) for record, response in rows]


@dataclass(frozen=True)
class Checked:
    texts: list[str]
    passes: Tensor  # (B,) bool: no error anywhere and, if they count, no unused variable in the response
    error_index: Tensor  # (B,) the token to blame; T if the response passes
    diagnostics: list[list[Diagnostic]]
    spans: list[tuple[int, int]]  # [start, end) of each response in its program, in characters


def check_responses(
    records: list[dict],
    response: Tensor,
    compiler: Compiler,
    pieces: dict[int, bytes],
    eos_id: int,
    unused: bool = True,
) -> Checked:
    """Compile prefix + response + suffix for each row. [RLCF alg 1]

    records     rows of code.jsonl
    response    (B, T) ids, [PAD] after EOS
    pieces      token_bytes(tokenizer)
    unused      if True, an unused variable fails a response, like an error
    """
    T = response.size(1)
    rows = [ids[: ids.index(eos_id)] if eos_id in ids else ids for ids in response.tolist()]
    texts = [response_text(ids, pieces) for ids in rows]
    programs, spans = make_programs(records, texts)
    diagnostics = compiler.check(programs, spans)
    error_index = []
    for ids, span, findings in zip(rows, spans, diagnostics, strict=True):
        error = first_error(findings if unused else [d for d in findings if d.kind == "error"], *span)
        if error is None:
            error_index.append(T)
        else:  # an empty response has no token but EOS
            ends = character_ends(ids, pieces) or [0]
            error_index.append(error_token(ends, error.last - span[0]))
    index = torch.tensor(error_index, device=response.device)
    return Checked(texts, index == T, index, diagnostics, spans)
