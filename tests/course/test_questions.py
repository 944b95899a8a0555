"""Questions with individual numbers: their answers equal the results of the repository's code."""

import math
import re

import pytest
import torch

from course.exercises import chosen
from course.questions import FILE, MAKERS, draw_questions, right_answers, sheet, student_seed
from course.start import start
from kernels.gae import gae_loop
from nanorlhf.grpo import Inputs, rloo
from nanorlhf.metrics.at_k import pass_at_k
from nanorlhf.ppo import policy_loss, whiten

STUDENTS = [f"student {number}" for number in range(40)]


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", text)]


def by_the_code(name: str, text: str) -> float:
    """Answer a printed question with the functions of the repository."""
    text = text.replace("pass@", "")
    x = numbers(text)
    if name == "pair":
        return -torch.nn.functional.logsigmoid(torch.tensor(x[0] - x[1])).item()
    if name == "rewards":
        *logprobs, score, beta = x
        return score - beta * (sum(logprobs[:3]) - sum(logprobs[3:]))
    if name == "advantage":
        *steps, gamma, lam = x
        return gae_loop(torch.tensor([steps[:3]]), torch.tensor([steps[3:]]), gamma, lam)[0][0, 0].item()
    if name == "whitened":
        return whiten(torch.tensor([x]), torch.ones(1, len(x), dtype=torch.bool))[0, 0].item()
    if name == "clipped":
        shift, advantage, clip = (torch.tensor([[value]]) for value in x)
        losses, _ = policy_loss(shift, torch.zeros(1, 1), advantage, torch.ones(1, 1, dtype=torch.bool), clip.item())
        return losses.item()
    if name == "group":
        none = torch.zeros(4, 1)
        return rloo(Inputs(torch.tensor(x), none, none, none.bool(), 4, 0.0, 1.0))[0, 0].item()
    n, right, k = (int(value) for value in x)
    return pass_at_k(n, right, k)


@pytest.mark.parametrize("student", STUDENTS[:8])
def test_the_answers_equal_the_codes_results(student) -> None:
    for question in draw_questions(student):
        assert question.answer == pytest.approx(by_the_code(question.name, question.text), abs=1e-4), question


def test_every_student_has_different_numbers() -> None:
    texts = {student: tuple(question.text for question in draw_questions(student)) for student in STUDENTS}
    for number in range(len(MAKERS)):
        assert len({text[number] for text in texts.values()}) > len(STUDENTS) / 2
    assert len(set(texts.values())) == len(STUDENTS)
    assert draw_questions(" Ada ") == draw_questions("ada") and student_seed("ada") != student_seed("bob")
    assert all(math.isfinite(question.answer) for student in STUDENTS for question in draw_questions(student))


def test_right_answers_are_counted_and_another_students_are_wrong(tmp_path) -> None:
    copy = tmp_path / "copy"
    start(copy, chosen(["padding"]), "Ada")
    assert (copy / FILE).read_text() == sheet("Ada") and right_answers(copy) == ("Ada", 0)

    def fill_in(student: str) -> None:
        text = sheet("Ada")
        for question in draw_questions(student):
            text = text.replace(f"\n{question.name} =", f"\n{question.name} = {question.answer:.2f}")
        (copy / FILE).write_text(text)

    fill_in("Ada")
    assert right_answers(copy) == ("Ada", len(MAKERS))
    fill_in("Bob")
    assert right_answers(copy)[1] <= 1
    (copy / FILE).write_text("pair = nan\nrewards = 1e999\n")
    assert right_answers(copy) == ("Ada", 0)
    (copy / FILE).unlink()
    assert right_answers(copy) == ("Ada", 0)
    start(tmp_path / "other", chosen(["padding"]))
    assert right_answers(tmp_path / "other") is None and not (tmp_path / "other" / FILE).exists()
