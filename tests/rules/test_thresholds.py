import re
from pathlib import Path

from nanorlhf.rules.thresholds import THRESHOLDS

ROOT = Path(__file__).resolve().parents[2]


def test_every_threshold_is_used():
    code = "".join(
        path.read_text() for package in ("rules", "doctor") for path in (ROOT / "nanorlhf" / package).glob("*.py")
    )
    for name in THRESHOLDS:
        assert len(re.findall(rf'"{name}"', code)) > 1, name


def test_every_finding_names_a_page_that_exists_and_files_that_exist():
    for path in (ROOT / "nanorlhf" / "rules").glob("*_rules.py"):
        for file in re.findall(r"\b((?:docs|nanorlhf|kernels)/[\w/]+\.(?:md|py)|train_\w+\.py)", path.read_text()):
            assert (ROOT / file).exists(), f"{path.name}: {file}"
