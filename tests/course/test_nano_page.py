"""nano.py needs only PyTorch, and docs/nano.md contains all of it."""

import ast
import re
import sys
from pathlib import Path

from course import nano_page

ROOT = Path(__file__).resolve().parents[2]


def test_nano_needs_only_pytorch_and_cites_every_detail():
    text = (ROOT / "nano.py").read_text()
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    roots = {(getattr(node, "module", None) or node.names[0].name).split(".")[0] for node in imports}
    assert roots - set(sys.stdlib_module_names) == {"torch"}
    for detail in (3, 5, 7, 9, 10, 11, 12, 15, 20, 22, 23, 25):
        assert re.search(rf"\[N\+ (\d+, )*{detail}(, \d+)*\]", text), detail


def test_the_docs_page_contains_the_whole_file():
    source = (ROOT / "nano.py").read_text()
    text = nano_page.page(source)
    assert (ROOT / "docs/nano.md").read_text() == text, "run `python -m course.nano_page`"
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    statements = [ast.unparse(node) for node in ast.parse(source).body[1:]]
    assert [ast.unparse(node) for node in ast.parse(code).body] == statements
