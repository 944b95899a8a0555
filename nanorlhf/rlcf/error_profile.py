"""Error profile of a policy's programs: mean number of errors per response by category. [RLCF figure 4]"""

import torch

from nanorlhf import distributed
from nanorlhf.rlcf.compilers import Diagnostic, first_error
from nanorlhf.rlcf.feedback import Checked

# prefixes of javac's codes, after "compiler.err.", and of Python's. "syntax" covers javac's scanner and parser; a code
# without a category is "other".
CODES = {
    "syntax": (
        "expected", "illegal.start.of.", "illegal.char", "illegal.dot", "illegal.esc.char", "illegal.line.end.",
        "illegal.nonascii.digit", "illegal.text.block.", "illegal.underscore", "illegal.unicode.esc",
        "illegal.parenthesized.expression", "illegal.array.creation.", "unclosed.", "empty.char.lit",
        "malformed.fp.lit", "invalid.binary.number", "invalid.hex.number", "int.number.too.large", "fp.number.too.",
        "premature.eof", "not.stmt", "orphaned", "else.without.if", "catch.without.try", "finally.without.try",
        "try.without.catch.", "variable.not.allowed", "class.not.allowed", "initializer.not.allowed",
        "invalid.meth.decl.ret.type.req", "array.dimension.missing", "repeated.modifier", "enum.constant.",
        "varargs.must.be.last", "dot.class.expected", "assert.as.identifier", "enum.as.identifier",
        "this.as.identifier", "underscore.as.identifier", "invalid.yield", "restricted.type.not.allowed",
        "feature.not.supported.in.source", "preview.feature.disabled", "switch.mixing.case.types",
        "switch.case.unexpected.statement",
        "SyntaxError", "IndentationError", "TabError", "UnicodeEncodeError",
    ),
    "cannot_find_symbol": ("cant.resolve", "doesnt.exist", "undef.label", "UndefinedName"),
    "type": (
        "prob.found.req", "incomparable.types", "types.incompatible", "cant.apply.", "operator.cant.be.applied",
        "cant.deref", "array.req.but.found", "type.found.req", "unexpected.type", "unexpected.lambda",
        "unexpected.mref", "incompatible.", "invalid.mref", "foreach.not.applicable.to.type",
        "cant.infer.local.var.type", "illegal.initializer.for.type", "void.not.allowed.here", "wrong.number.type.args",
        "type.doesnt.take.params", "not.within.bounds", "improperly.formed.type", "generic.array.creation",
        "cannot.create.array.with", "instanceof.", "ref.ambiguous", "const.expr.req", "string.const.req",
        "constant.label.not.compatible", "override.incompatible.ret",
    ),
    "uninitialised": ("var.might.not.have.been.initialized", "var.not.initialized.in.", "UndefinedLocal"),
    "missing_return": ("missing.ret.stmt",),
    "unreachable": ("unreachable.stmt",),
    "unreported_exception": ("unreported.exception.",),
    "already_defined": ("already.defined", "duplicate.class"),
    "timeout": ("timeout",),
}  # fmt: skip
CATEGORIES = (*CODES, "other", "unused")
"""in report order; `unused` counts variables, all others count compiler errors"""


def error_category(diagnostic: Diagnostic) -> str | None:
    """Return the category of a diagnostic, one of CATEGORIES, or None for a warning."""
    if diagnostic.kind == "warning":
        return None
    if diagnostic.kind == "unused":
        return "unused"
    code = diagnostic.code.removeprefix("compiler.err.")
    return next((category for category, prefixes in CODES.items() if code.startswith(prefixes)), "other")


def error_profile(diagnostics: list[list[Diagnostic]], spans: list[tuple[int, int]]) -> dict[str, float]:
    """Return the mean number of errors per response for each category, zeros included. [RLCF figure 4]

    diagnostics: one list per program; spans: [start, end) of its response, in characters. Errors count anywhere in the
    program, because the code around the response was correct; unused variables count only inside the response. Raises
    ValueError if the two lengths differ.
    """
    counts = dict.fromkeys(CATEGORIES, 0)
    for findings, (start, end) in zip(diagnostics, spans, strict=True):
        for diagnostic in findings:
            category = error_category(diagnostic)
            if category and (category != "unused" or start <= diagnostic.last < end):
                counts[category] += 1
    return {category: count / len(spans) for category, count in counts.items()}


def profile_metrics(checked: list[Checked]) -> dict[str, float]:
    """Return the metrics of one rollout over all ranks: compile_rate, and errors/* per response.

    Unused variables count in both, even if the reward ignores them, so that curves of all objectives are comparable.
    """
    diagnostics = [findings for c in checked for findings in c.diagnostics]
    spans = [span for c in checked for span in c.spans]
    profile = error_profile(diagnostics, spans)
    passes = torch.tensor(
        [first_error(findings, *span) is None for findings, span in zip(diagnostics, spans, strict=True)],
        device=checked[0].passes.device,
    )
    world = distributed.world_size()
    means = torch.tensor([profile[category] for category in CATEGORIES], device=passes.device) / world
    compile_rate = distributed.all_sum(passes.sum()).item() / (world * len(passes))
    errors = zip(CATEGORIES, distributed.all_sum(means).tolist(), strict=True)
    return {"compile_rate": compile_rate} | {f"errors/{category}": mean for category, mean in errors}
