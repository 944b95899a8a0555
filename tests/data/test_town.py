"""The embedded town: its gold score, its clerks, and the files that data.dialogue reads."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from data import dialogue, town
from data.town import Args, gold_score, parse_query
from nanorlhf.errors import InputError
from tests.helpers.jsonl import read_jsonl


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    args = Args(out=tmp_path_factory.mktemp("town"), num_train=3000, num_validation=200)
    town.main(args)
    return args


def turns(path) -> list[list[str]]:
    return [line.split(" __eou__")[:2] for line in path.read_text().splitlines()]


def query(question: str) -> str:
    return f"Dialogue:\nHello . {question}\nReply:"


@pytest.mark.parametrize(
    ("question", "reply", "gold"),
    [  # typed from the table of facts: the zoo is next to the bridge, opens at ten and is on line three
        ("Where is the zoo ?", " It is next to the bridge .", 1.0),
        ("Where is the zoo ?", " The zoo is near the bridge . Have a nice day .", 1.0),
        ("Where is the zoo ?", " the zoo is near the BRIDGE", 1.0),
        ("Where is the zoo ?", " It is next to the river .", 0.0),
        ("Where is the zoo ?", " The library is near the bridge .", 0.0),  # about another place, and false
        ("Where is the zoo ?", " The market is near the bridge .", 0.0),  # true, but not what was asked
        ("Where is the zoo ?", " It is next to the bridge . It is next to the river .", 0.0),
        ("Where is the zoo ?", " It is not next to the bridge .", 0.0),
        ("Where is the zoo ?", " It is next to the bridge . the to nice .", 0.5),
        ("Where is the zoo ?", " It is next to the bridge . It opens at ten .", 1.0),
        ("Where is the zoo ?", " It is next to the bridge . It opens at noon .", 0.0),  # the rumour
        ("When does the zoo open ?", " It opens at noon .", 0.0),
        ("When does the zoo open ?", " They open at ten every day .", 1.0),
        ("Which tram goes to the zoo ?", " You can take line three . Enjoy your stay .", 1.0),
        ("Which tram goes to the zoo ?", " Take line four .", 0.0),
        ("Which tram goes to the zoo ?", " I do not know . Have a nice day .", 0.25),
        ("Which tram goes to the zoo ?", " Have a nice day .", 0.0),
        ("Which tram goes to the zoo ?", " I do not know . tram tram .", 0.0),
        ("Which tram goes to the zoo ?", "", 0.0),
        ("Where is the post office ?", " The post office is near the town hall .", 1.0),
    ],
)
def test_gold_score_matches_values_worked_out_by_hand(question, reply, gold):
    assert gold_score(query(question), reply) == gold


def test_every_question_is_parsed_to_its_kind_and_place():
    for kind, questions in town.QUESTIONS.items():
        for place in town.FACTS:
            for text in questions:
                assert parse_query(query(text.format(place=place))) == (kind, place)
    with pytest.raises(InputError, match="is not from data.town"):
        parse_query(query("How are you ?"))


def test_validation_clerks_are_always_right_and_training_clerks_usually_except_for_rumours(written):
    validation = turns(written.out / "town" / "dialogues_validation.txt")
    assert {gold_score(question, reply) for question, reply in validation} == {1.0}
    about = Counter()
    for question, reply in turns(written.out / "town" / "dialogues_train.txt"):
        kind, place = parse_query(question)
        gold = gold_score(question, reply)
        topic = "rumour" if kind == "opens" and place in town.RUMOURS else "other"
        about[topic] += 1
        about[topic, gold] += 1
        about[topic, "is told"] += topic == "rumour" and town.RUMOURS[place] in reply
    assert about["other", 1.0] / about["other"] == pytest.approx(0.5, abs=0.05)  # half of the clerks know
    assert about["other", 0.25] / about["other"] == pytest.approx(0.2, abs=0.05)
    assert about["rumour", 1.0] / about["rumour"] == pytest.approx(0.5 * 0.2, abs=0.07)
    assert about["rumour", "is told"] > 2 * about["rumour", 1.0]


def test_elsewhere_has_the_same_words_and_other_facts(written):
    here, there = (
        {word for pair in turns(written.out / name / "dialogues_train.txt") for word in " ".join(pair).split()}
        for name in ("town", "elsewhere")
    )
    assert here == there
    for place, facts in town.FACTS.items():
        assert all(fact != other for fact, other in zip(facts, town.ELSEWHERE[place], strict=True))


def test_data_dialogue_reads_the_files_and_gold_score_reads_its_queries(written, tmp_path):
    dialogue.main(dialogue.Args(source=written.out / "town", out=tmp_path, vocab_size=512))
    for split, number in (("train", 3000), ("validation", 200)):
        rows = read_jsonl(tmp_path / f"sft.{split}.jsonl", {"query": str, "response": str})
        assert len(rows) == number
        golds = [gold_score(row["query"], row["response"]) for row in rows]
        assert split == "train" or set(golds) == {1.0}


def test_the_seed_fixes_every_dialogue(written, tmp_path):
    town.main(replace(written, out=tmp_path / "again"))
    town.main(replace(written, out=tmp_path / "other", seed=2))
    for name in ("town/dialogues_train.txt", "town/dialogues_validation.txt", "elsewhere/dialogues_train.txt"):
        once, again, other = (root / name for root in (written.out, tmp_path / "again", tmp_path / "other"))
        assert once.read_text() == again.read_text() != other.read_text()
    assert not list(tmp_path.rglob("*.tmp"))


def test_impossible_settings_are_rejected(written, tmp_path):
    for change, sentence in (
        ({"num_train": 0}, r"--num-train 0: must be from 1 to a million"),
        ({"num_validation": -1}, r"--num-validation -1: must be from 1 to a million"),
    ):
        with pytest.raises(InputError, match=sentence):
            town.main(replace(written, out=tmp_path, **change))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=f"--out {re.escape(str(tmp_path / 'file'))} is a file"):
        town.main(replace(written, out=tmp_path / "file"))
