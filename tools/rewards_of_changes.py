"""Rewards for the runs of tools/changes.py: one that uses a query's ground truth, and a dense one."""


def told(queries: list[str], responses: list[str], place: list[str], who: list[str]) -> list[float]:
    """Give 1 for naming the place and 1 for naming the person; both are fields of the row's meta."""
    return [float(p in r) + float(w in r) for r, p, w in zip(responses, place, who, strict=True)]


def brief(queries: list[str], responses: list[str], response_ids: list[list[int]]) -> list[list[float]]:
    """Give -0.1 for each token after the tenth, and 0 before."""
    return [[-0.1 * (t >= 10) for t in range(len(ids))] for ids in response_ids]
