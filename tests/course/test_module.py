"""The four-week module: its table matches the handouts, and the exam's answers are right."""

import math
import re

import pytest
import torch

from course.copies import ROOT
from course.exercises import EXERCISES, chosen
from course.sessions import SESSIONS
from kernels.gae import gae_loop
from nanorlhf.ppo import eos_masks, policy_loss

MODULE = (ROOT / "course" / "module.md").read_text()
ANSWERS = (ROOT / "course" / "exam-answers.md").read_text()


def test_the_table_of_sessions_matches_the_handouts() -> None:
    rows = re.findall(r"^\| (\d)\. ([^|]+) \| [^|]+ \| [^|]+ \| ([^|]+) \|$", MODULE, re.M)
    assert len(rows) == len(SESSIONS)
    for (number, title, exercises), session in zip(rows, SESSIONS, strict=True):
        assert title.lower() == session.title.lower() and int(number) == SESSIONS.index(session) + 1
        groups = [group.rpartition(":") for group in exercises.split(";")]
        names = [name.strip() for group, _, _ in groups for name in group.split(",")]
        assert names == list(session.exercises)
        for group, _, points in groups:
            selected = chosen(name.strip() for name in group.split(","))
            assert sum(exercise.points for exercise in selected) == int(points), group
    assert f"Count the {sum(exercise.points for exercise in EXERCISES)} points" in MODULE


def test_the_numbers_in_the_exams_answers_are_right() -> None:
    assert "log(1 + exp(-1)) = 0.31" in ANSWERS and math.log1p(math.exp(-1)) == pytest.approx(0.31, abs=0.005)
    assert "probability 0.73" in ANSWERS and 1 / (1 + math.exp(-1)) == pytest.approx(0.73, abs=0.005)

    response = torch.tensor([[2, 3, 1, 0, 0, 0], [2, 3, 4, 5, 6, 7]])  # [PAD] 0, EOS 1
    _, actions, states = eos_masks(response, 1, 0)
    for name, mask in (("actions", actions), ("states", states)):
        assert f"{name} {' '.join(map(str, mask[0].int().tolist()))}" in ANSWERS
        assert mask[1].all()

    kl = [0.5, 0.0, -1.0]
    assert 2 - 0.1 * sum(kl) == pytest.approx(2.05) and "2 + 0.05 = 2.05" in ANSWERS

    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.8]])
    for lam, said in ((0.0, "0: 0.1, 0.2, 0.2"), (1.0, "1: 0.5, 0.4, 0.2"), (0.5, "0.5: 0.25, 0.3, 0.2")):
        expected = [float(number) for number in said.partition(": ")[2].split(", ")]
        assert gae_loop(rewards, values, 1.0, lam)[0][0].tolist() == pytest.approx(expected)
        assert f"Lambda {said}" in ANSWERS

    logit = torch.zeros((), dtype=torch.float64, requires_grad=True)
    logprobs, received = torch.stack([logit, -logit]).sigmoid().log(), torch.tensor([5.0, 3.0], dtype=torch.float64)
    slopes = torch.stack([torch.autograd.grad(logprob, logit, retain_graph=True)[0] for logprob in logprobs])
    exact = torch.autograd.grad((logprobs.exp() * received).sum(), logit)[0]
    assert exact.item() == pytest.approx(0.5) and "0.5 * 0.5 * (5 - 3) = 0.5" in ANSWERS
    for baseline, each, variance in ((0, "2.5 and -1.5", 4), (4, "0.5 and 0.5", 0)):
        estimates = (received - baseline) * slopes  # equally likely
        assert estimates.tolist() == pytest.approx([float(number) for number in each.split(" and ")])
        assert estimates.mean().item() == pytest.approx(0.5)
        assert estimates.var(correction=0).item() == pytest.approx(variance)
        assert f"{each}: mean 0.5, variance {variance}." in ANSWERS

    for advantage, loss, clips in ((2.0, -2.4, True), (-2.0, 2.6, False)):
        one = torch.ones(1, 1)
        losses, clipped = policy_loss(one * math.log(1.3), one * 0, one * advantage, one.bool(), 0.2)
        assert losses.item() == pytest.approx(loss) and clipped.item() == clips
    assert "= -2.4: clipped" in ANSWERS and "= 2.6, not clipped" in ANSWERS


def test_every_question_of_the_exam_has_an_answer_and_points_add_up() -> None:
    exam = (ROOT / "course" / "exam.md").read_text()
    parts = {text: re.split(r"^## ", text, flags=re.M)[1:] for text in (exam, ANSWERS)}
    assert len(parts[exam]) == len(parts[ANSWERS]) == 5
    total = 0
    for asked, answered in zip(parts[exam], parts[ANSWERS], strict=True):
        title, _, points = asked.splitlines()[0].rpartition(" ")
        assert title == answered.splitlines()[0]
        assert re.findall(r"^([a-d])\)", asked, re.M) == re.findall(r"^([a-d])\)", answered, re.M)
        marks = [int(mark) for mark in re.findall(r"\((\d)\)$", asked.partition("\n")[2], re.M)]
        assert sum(marks) == int(points.strip("()")), title
        total += sum(marks)
    assert f"{total} points" in exam
