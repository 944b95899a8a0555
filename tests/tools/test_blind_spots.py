import random
from types import SimpleNamespace

import pytest

from data import tiny
from tools import blind_spots
from tools.blind_spots import Args, main, with_errors


def table(text: str) -> dict[str, list[float]]:
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: [float(share) for share in row[1:]] for row in rows if row and row[0] in tiny.SLOTS}


@pytest.fixture
def judged_by(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that scores with a function of two texts instead of a model and returns the printed shares."""

    def run(score) -> dict[str, list[float]]:
        monkeypatch.setattr(blind_spots, "load_scalar", lambda path: None)
        monkeypatch.setattr(blind_spots, "load_tokenizer", lambda path: SimpleNamespace())
        monkeypatch.setattr(blind_spots, "scores", lambda model, tokenizer, *texts: list(map(score, *texts)))
        main(Args(num_posts=50))
        return table(capsys.readouterr().out)

    return run


def test_the_gold_score_detects_every_error(judged_by) -> None:
    assert judged_by(tiny.gold_score) == {slot: [1.0, 1.0, 1.0] for slot in tiny.SLOTS}


def test_a_scorer_that_does_not_read_the_post_misses_false_values_only(judged_by) -> None:
    def blind(query: str, response: str) -> float:
        words = response.replace(" in ", " ").split()
        outlandish = {value.split()[0] for values in tiny.OUTLANDISH.values() for value in values}
        return len(words) - 100 * len(outlandish & set(words))

    shares = judged_by(blind)
    assert all(false < 1 for false, _, _ in (shares["who"], shares["place"], shares["wish"]))
    assert all(shares[slot][1:] == [1.0, 1.0] for slot in ("event", "place", "wish"))


@pytest.mark.parametrize("slot", range(4))
def test_an_error_affects_only_its_slot(slot: int) -> None:
    rng = random.Random(slot)
    for _ in range(20):
        post = tiny.write_post(rng)
        texts = with_errors(post, slot, rng)
        other_facts = [fact for i, fact in enumerate(post.facts) if i != slot]
        for text in texts.values():
            assert all(f" {fact} " in f"{text} " for fact in other_facts)
            assert f" {post.facts[slot]} " not in f"{text} "
        # one of four facts is missing, and a wrong one costs another 1.5
        golds = {kind: tiny.gold_score(post.query, text) for kind, text in texts.items()}
        assert golds == {"false": 1.5, "outlandish": 1.5, "missing": 3.0}


def test_a_real_model_gives_a_full_table(miniature, capsys: pytest.CaptureFixture[str]) -> None:
    main(Args(reward_model=str(miniature.rm.out), num_posts=8))
    shares = table(capsys.readouterr().out)
    assert set(shares) == set(tiny.SLOTS) and all(0 <= share <= 1 for row in shares.values() for share in row)
