"""Compiler feedback on hand-typed responses: their texts, whether they pass, and the token to blame."""

import shutil
import signal

import pytest
import torch
import torch.nn.functional as F

from nanorlhf.dataset import Demonstration
from nanorlhf.errors import InputError
from nanorlhf.padding import right_pad
from nanorlhf.rlcf.compilers import JavaCompiler, PythonCompiler
from nanorlhf.rlcf.feedback import check_responses, compiler_for, training_compiler
from nanorlhf.tokenizer import token_bytes, train_tokenizer

TEXTS = ["    total = 0\n    return total\n", "return größer;\n    }\n", "int sum = a + b; # größer"] * 20
# a tokenizer without merges: every ASCII character is a token, and its position in the text is its index
BYTES = train_tokenizer([], 257)
WORDS = train_tokenizer(TEXTS, 320)


@pytest.fixture
def compiler(request):
    """By language."""
    return lambda language: request.getfixturevalue(f"{language}_compiler")


CONTEXTS = {
    "python": {"prefix": "def f(a, b):\n", "suffix": "\nprint(f(1, 2))\n"},
    "java": {"prefix": "class A {\n    static int f(int a, int b) {\n", "suffix": "\n}\n"},
}


def check(compiler, language, texts, tokenizer=BYTES, ends=True, T=None, context=None):
    """Check responses of these texts, each with EOS and then [PAD], or without EOS."""
    rows = [tokenizer.encode(text) + [tokenizer.eos_id] * ends for text in texts]
    response = right_pad(rows, tokenizer.pad_id)
    if T is not None:
        response = F.pad(response, (0, T - response.size(1)), value=tokenizer.pad_id)
    records = [CONTEXTS[language] if context is None else context] * len(texts)
    return check_responses(records, response, compiler(language), token_bytes(tokenizer), tokenizer.eos_id), response


def blamed(checked, response, b, tokenizer=BYTES):
    """The text up to and including the token to blame; None if there is none."""
    index = checked.error_index[b].item()
    if index == response.size(1):
        return None
    kept = b"".join(token_bytes(tokenizer)[i] for i in response[b, : index + 1].tolist())
    return kept.decode("utf-8", errors="replace")


PYTHON = [  # response, the part of it up to the token to blame
    ("    return a + b", None),
    ("    return a + B", "    return a + B"),
    ("    return a + B + C", "    return a + B"),  # the first one
    ("    return x.y(a, ) + b", "    return x"),
    ("    return a b", "    return a b"),
    ("    c = a\n    return b", "    c"),  # c is unused
    ("    c = a\n    d = B\n    return b", "    c"),  # an unused variable is an error too, and is first
    ("    return D\n    c = a", "    return D"),
    ("    return (a + b", "    return (a + b"),  # never closed: the last token
    ("    return a + b\n  return a", "    return a + b\n  return a"),
    ("    return a +", "    return a +"),
    ("    grö = 1\n    return a  # größer", "    grö"),
    ('    return "😀" + Ü', '    return "😀" + Ü'),
    ("    return a  # 😀\n", None),
]
JAVA = [
    ("        return a + b;\n    }", None),
    ("        return a + B;\n    }", "        return a + B"),
    ("        int s = 0;\n        s += B + C;\n        return s;\n    }", "        int s = 0;\n        s += B"),
    ("        return a.size();\n    }", "        return a.size"),
    ("        return a b;\n    }", "        return a b"),
    ("        int c = a;\n        return b;\n    }", "        int c"),
    ("        int c = a;\n        return B;\n    }", "        int c"),
    ("        return a + b;\n", "        return a + b;\n"),  # the missing brace shows only after it: the last token
    ("        return a + b\n    }", "        return a + b\n    }"),  # the lexeme in place of the missing semicolon
    ("        return a + b;\n    } }", "        return a + b;\n    } }"),
    ("        int grö = 1;\n        return a; // größer\n    }", "        int grö"),
    ('        String s = "😀";\n        return s + ü;\n    }', '        String s = "😀";\n        return s + ü'),
    ("        return a + b; // 😀\n    }", None),
]


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["bytes", "words"])
@pytest.mark.parametrize(("language", "cases"), [("python", PYTHON), ("java", JAVA)])
def test_a_program_passes_or_ends_with_the_token_of_its_first_error(compiler, language, cases, tokenizer):
    checked, response = check(compiler, language, [text for text, _ in cases], tokenizer)
    assert checked.texts == [text for text, _ in cases]
    assert checked.passes.dtype == torch.bool and checked.passes.tolist() == [kept is None for _, kept in cases]
    for b, (text, kept) in enumerate(cases):
        result = blamed(checked, response, b, tokenizer)
        if tokenizer is BYTES or kept is None:
            assert result == kept
        else:  # a token of several characters ends no sooner than the last of them
            assert result.startswith(kept) and len(result) - len(kept) < max(map(len, token_bytes(tokenizer).values()))
            assert text.startswith(result)
        program = CONTEXTS[language]["prefix"] + text + CONTEXTS[language]["suffix"]
        start, end = checked.spans[b]
        assert program[start:end] == text


def test_the_blamed_token_of_a_word_is_the_one_that_completes_it(compiler):
    """Not the next one, nor the one before it."""
    checked, response = check(compiler, "python", ["    return total"], WORDS)
    pieces = [token_bytes(WORDS)[i].decode() for i in response[0, :-1].tolist()]
    assert "".join(pieces) == "    return total" and len(pieces) < 6
    assert checked.error_index.tolist() == [len(pieces) - 1] and not checked.passes.any()


@pytest.mark.parametrize("language", ["python", "java"])
def test_an_empty_response_is_compiled_and_blamed_at_its_eos(compiler, language):
    checked, response = check(compiler, language, ["", ""], T=5)
    assert checked.texts == ["", ""]
    assert checked.error_index.tolist() == [0, 0]  # a function needs a body, a class its closing brace
    assert response[0].tolist() == [BYTES.eos_id] + [BYTES.pad_id] * 4
    context = {"python": {"prefix": "x = 1\n", "suffix": ""}, "java": {"prefix": "class A { }", "suffix": ""}}
    checked, _ = check(compiler, language, [""], T=5, context=context[language])
    assert checked.passes.tolist() == [True] and checked.error_index.tolist() == [5]


@pytest.mark.parametrize("language", ["python", "java"])
def test_a_response_without_eos_is_compiled_unchanged(compiler, language):
    """Reaching the maximum length isn't an error in itself: a response fails at its end if something is missing."""
    texts = {"python": ["    return a", "    return ("], "java": ["return a; }", "return a; "]}[language]
    width = max(map(len, texts))
    texts = [text.rjust(width) for text in texts] if language == "java" else texts
    checked, response = check(compiler, language, texts, ends=False)
    assert checked.texts == texts and checked.passes.tolist() == [True, False]
    assert response.size(1) == width and checked.error_index.tolist() == [width, width - 1]


def test_nothing_after_the_first_eos_is_compiled(compiler):
    row = BYTES.encode("    return a") + [BYTES.eos_id] + BYTES.encode(" + B") + [BYTES.eos_id]
    checked = check_responses(
        [CONTEXTS["python"]], torch.tensor([row]), compiler("python"), token_bytes(BYTES), BYTES.eos_id
    )
    assert checked.texts == ["    return a"] and checked.passes.tolist() == [True]


def test_half_a_character_is_one_replacement_character(compiler):
    """F0 9F by itself isn't UTF-8: it passes in a comment and is an error elsewhere."""
    half = BYTES.encode("😀")[:2]
    comment, code = BYTES.encode("    return a  # "), BYTES.encode("    return a + ")
    rows = [comment + half + [BYTES.eos_id], code + half + BYTES.encode(" + b") + [BYTES.eos_id]]
    response = right_pad(rows, BYTES.pad_id)
    checked = check_responses([CONTEXTS["python"]] * 2, response, compiler("python"), token_bytes(BYTES), BYTES.eos_id)
    assert checked.texts == ["    return a  # \ufffd", "    return a + \ufffd + b"]
    assert checked.passes.tolist() == [True, False]
    assert checked.error_index.tolist() == [
        response.size(1),
        len(code) + 1,
    ]  # the token that completes the replacement character


def test_errors_outside_the_response_count_and_unused_variables_outside_do_not(compiler):
    context = {"prefix": "def f(a):\n    c = 1\n", "suffix": "\n    d = 2\n"}
    checked, _ = check(compiler, "python", ["    return a", "    try: pass"], context=context)
    assert checked.passes.tolist() == [True, False]
    assert checked.error_index.tolist() == [14, len("    try: pass") - 1]
    assert [d.kind for d in checked.diagnostics[0]] == ["unused", "unused"]


def test_unused_variables_can_be_ignored(compiler):
    """The first error is blamed, although a variable before it is unused; the diagnostics stay the same."""
    rows = [BYTES.encode(text) + [BYTES.eos_id] for text in ("    c = a\n    return b", "    c = a\n    return B")]
    checked = check_responses(
        [CONTEXTS["python"]] * 2, right_pad(rows, BYTES.pad_id), compiler("python"), token_bytes(BYTES), BYTES.eos_id,
        unused=False,
    )  # fmt: skip
    assert checked.passes.tolist() == [True, False] and checked.error_index[1] == len(rows[1]) - 2
    assert [[d.kind for d in diagnostics] for diagnostics in checked.diagnostics] == [["unused"], ["unused", "error"]]


def test_one_row_does_not_change_the_result_of_another(compiler):
    texts = [text for text, _ in PYTHON]
    together, _ = check(compiler, "python", texts, T=60)
    for b, text in enumerate(texts):
        alone, _ = check(compiler, "python", [text], T=60)
        assert alone.error_index[0] == together.error_index[b]
        assert alone.diagnostics[0] == together.diagnostics[b] and alone.spans[0] == together.spans[b]


def test_a_response_that_hangs_the_compiler_fails_at_its_last_token():
    row = BYTES.encode("    return a") + [BYTES.eos_id]
    with PythonCompiler(timeout=0.2) as compiler:
        compiler.server.start()
        compiler.server.process.send_signal(signal.SIGSTOP)  # it no longer answers
        checked = check_responses([CONTEXTS["python"]], torch.tensor([row]), compiler, token_bytes(BYTES), BYTES.eos_id)
    assert [d.code for d in checked.diagnostics[0]] == ["timeout"]
    assert checked.error_index.tolist() == [len(row) - 2]


@pytest.mark.parametrize(("language", "kind"), [("python", PythonCompiler), ("java", JavaCompiler)])
def test_each_language_has_its_compiler(language, kind):
    if language == "java" and shutil.which("java") is None:
        pytest.skip("no JDK on this machine")
    with compiler_for(language) as compiler:  # no process starts before the first check
        assert isinstance(compiler, kind)


@pytest.mark.parametrize("meta", [{}, {"error_prone": False}, None, ["error_prone"]])
def test_error_prone_is_refused_on_rows_that_were_not_checked_by_it(meta):
    """Written programs count as passing: one that ErrorProne fails would reverse the comparison."""
    rows = [Demonstration([], [], {"language": "java", "meta": each}) for each in ({"error_prone": True}, meta)]
    with pytest.raises(
        InputError, match="--error-prone-jar some.jar: row 2 of --data was converted without ErrorProne"
    ):
        training_compiler(rows, "some.jar")
    if shutil.which("javac") is not None:
        with pytest.raises(InputError, match="some.jar is not a file"):
            training_compiler(rows[:1], "some.jar")
        training_compiler(rows, None).close()


def test_error_prone_only_checks_java():
    sentence = "--error-prone-jar some.jar: ErrorProne only checks Java; these programs are in python"
    with pytest.raises(InputError, match=sentence):
        compiler_for("python", "some.jar")
    if shutil.which("javac") is not None:
        with pytest.raises(InputError, match="some.jar is not a file"):
            compiler_for("java", "some.jar")
