"""Mutants that no test can kill, as they do what the function does. `python -m course mutants` leaves them out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Equivalent:
    function: str
    """module:name"""
    changes: tuple[str, ...]
    """the mutated statements, as `operators.Mutant.change` has them"""
    why: str


EQUIVALENT: tuple[Equivalent, ...] = ()
