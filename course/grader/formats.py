"""Format the grades of one submission: as a table, as JSON, for Gradescope and for GitHub Classroom."""

import base64
import json
from collections.abc import Sequence

from course.exercises import Exercise
from course.grader.worker import Outcome

Outcomes = dict[str, Outcome]


def max_points(exercises: Sequence[Exercise]) -> int:
    return sum(exercise.points for exercise in exercises)


def reached(exercise: Exercise, outcomes: Outcomes) -> int:
    return exercise.points if outcomes[exercise.name].passed else 0


def total(exercises: Sequence[Exercise], outcomes: Outcomes) -> int:
    return sum(reached(exercise, outcomes) for exercise in exercises)


def summary(result: Outcome) -> str:
    return "passed" if result.passed else f"{result.claim}: {result.reason}"


def table(exercises: Sequence[Exercise], outcomes: Outcomes) -> str:
    """Return one line per exercise, and the total of those whose tests can run here."""
    width = max(len(exercise.name) for exercise in exercises)
    gradable = [exercise for exercise in exercises if outcomes[exercise.name].gradable]
    lines = [
        f"{exercise.name:{width}}  {reached(exercise, outcomes) if exercise in gradable else '-':>2} "
        f"of {exercise.points}  {summary(outcomes[exercise.name]):.160}"
        for exercise in exercises
    ]
    return "\n".join([*lines, f"{'points':{width}}  {total(exercises, outcomes):2} of {max_points(gradable)}"])


def as_json(exercises: Sequence[Exercise], outcomes: Outcomes) -> str:
    rows = [
        {
            "name": exercise.name,
            "points": reached(exercise, outcomes),
            "of": exercise.points,
            "passed": (result := outcomes[exercise.name]).passed,
            "gradable": result.gradable,
            "claim": result.claim,
            "reason": result.reason,
            "seconds": result.seconds,
        }
        for exercise in exercises
    ]
    report = {"points": total(exercises, outcomes), "of": max_points(exercises), "exercises": rows}
    return json.dumps(report, indent=2) + "\n"


def as_gradescope(exercises: Sequence[Exercise], outcomes: Outcomes) -> str:
    """Return the results.json that Gradescope reads from /autograder/results."""
    tests = [
        {
            "name": exercise.name,
            "score": reached(exercise, outcomes),
            "max_score": exercise.points,
            "status": "passed" if outcomes[exercise.name].passed else "failed",
            "output": summary(outcomes[exercise.name]),
            "visibility": "visible",
        }
        for exercise in exercises
    ]
    seconds = sum(result.seconds for result in outcomes.values())
    return (
        json.dumps({"execution_time": round(seconds), "stdout_visibility": "hidden", "tests": tests}, indent=2) + "\n"
    )


def as_github_classroom(exercises: Sequence[Exercise], outcomes: Outcomes) -> str:
    """Return a line for $GITHUB_OUTPUT: the `result` that GitHub Classroom's autograding reporter reads from a step."""
    tests = [
        {
            "name": exercise.name,
            "status": "pass" if outcomes[exercise.name].passed else "fail",
            "score": reached(exercise, outcomes),
            "message": "" if outcomes[exercise.name].passed else summary(outcomes[exercise.name]),
            "test_code": "",
            "filename": "",
            "line_no": 0,
            "execution_time": f"{outcomes[exercise.name].seconds:.1f}s",
        }
        for exercise in exercises
    ]
    status = "pass" if all(result.passed for result in outcomes.values()) else "fail"
    result = {"version": 1, "status": status, "max_score": max_points(exercises), "tests": tests}
    return f"result={base64.b64encode(json.dumps(result).encode()).decode()}\n"


FORMATS = {"json": as_json, "gradescope": as_gradescope, "github-classroom": as_github_classroom}
