"""A reward of 1 for any response, which ranks none above another."""


def one(queries: list[str], responses: list[str], records: list[dict]) -> list[float]:
    return [1.0] * len(responses)
