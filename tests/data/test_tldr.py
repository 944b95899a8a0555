import csv
import gzip
import json
import re
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import prepare, tldr
from nanorlhf.dataset import load_comparisons, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from tests.conftest import run_program
from tests.data.rows import read

TOKENIZER = train_tokenizer(["SUBREDDIT: r/cats TITLE: POST: TL;DR: my cat sat on the mat. It is fat."] * 3, 320)
POST = {"id": "t3_1", "subreddit": "cats", "title": "My cat", "post": "It sat.\n\nOn the mat."}
SFT = POST | {"summary": "cat sat"}
COMPARISON = {
    "info": POST,
    "summaries": [
        {"text": " the mat", "policy": "sup4", "note": None},
        {"text": " my cat sat", "policy": "ref", "note": "good"},
    ],
    "choice": 1,
    "worker": "w",
    "batch": "batch9",
    "split": "valid1",
    "extra": {"confidence": 7},
}
CNNDM = COMPARISON | {
    "info": {"id": "1", "article": "It sat.\nOn.", "site": "cnn", "title": "A", "post": None, "subreddit": None},
    "batch": "cnndm0",
}


@pytest.fixture
def args(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer")
    return tldr.Args(source=str(tmp_path / "source"), out=tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"))


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def convert(args, *records, name="comparisons.json"):
    """Convert `records` and return the rows by file."""
    write(args.out.parent / "source" / name, *records)
    tldr.main(args)
    return read(args.out)


# -------------------------------------------------------------------------------------------------- template [N+ 1, 2]
def test_demonstrations_have_the_papers_template(args):
    rows = convert(args, SFT, name="train.jsonl")
    query = "SUBREDDIT: r/cats\n\nTITLE: My cat\n\nPOST: It sat.\n\nOn the mat.\n\nTL;DR:"
    assert rows == {"sft.train": [{"query": query, "response": "cat sat", "meta": {"id": "t3_1", "split": "train"}}]}


def test_comparisons_become_chosen_and_rejected(args):
    [row] = convert(args, COMPARISON)["comparisons.validation"]
    assert row == {
        "query": "SUBREDDIT: r/cats\n\nTITLE: My cat\n\nPOST: It sat.\n\nOn the mat.\n\nTL;DR:",
        "chosen": " my cat sat",
        "rejected": " the mat",
        "meta": {
            "id": "t3_1",
            "batch": "batch9",
            "confidence": 7,
            "split": "valid1",
            "policies": ["ref", "sup4"],
            "worker": "w",
        },
    }


def test_cnndm_rows_have_their_own_file_template_and_limit(args):
    long = CNNDM | {"info": CNNDM["info"] | {"article": "It sat.\n" * 40}}
    only_article = CNNDM | {"info": {"id": "1", "article": "It sat.", "site": "cnn", "title": "A"}}
    rows = convert(replace(args, max_query_length=40), CNNDM, long, only_article, COMPARISON)
    assert [len(rows[name]) for name in ("comparisons.cnndm", "comparisons.validation")] == [3, 1]
    assert rows["comparisons.cnndm"][0]["query"] == "Article:\nIt sat.\nOn.\n\nTL;DR:\n"
    assert rows["comparisons.cnndm"][1]["query"] == "Article:\n" + "It sat.\n" * 40 + "\n\nTL;DR:\n"  # not cut at 40
    assert rows["comparisons.cnndm"][2]["query"] == "Article:\nIt sat.\n\nTL;DR:\n"
    # no second space: the query ends in a newline
    rows = load_comparisons(args.out / "comparisons.cnndm.jsonl", TOKENIZER, 1919, 169)
    assert rows[0].chosen == TOKENIZER.encode(" my cat sat") + [TOKENIZER.eos_id]
    rows = convert(replace(args, max_cnndm_query_length=40), long)
    assert len(TOKENIZER.encode(rows["comparisons.cnndm"][0]["query"])) <= 40


def test_confidence_may_be_missing(args):
    extras = [{"confidence": None}, {}, None]
    rows = convert(args, *[COMPARISON | {"extra": extra} for extra in extras])["comparisons.validation"]
    assert [row["meta"]["confidence"] for row in rows] == [None] * 3


# ------------------------------------------------------------------------------------------------------ truncation
words = st.lists(
    st.sampled_from(["cat", "mat", " ", " ", ". ", "! ", "\n", "\n\n", "sat", "xq", "a", "…", '." ', "é"]), max_size=60
).map("".join)


def fits_in(limit):
    return lambda text: len(TOKENIZER.encode("POST: " + text + "\n\nTL;DR:")) <= limit


def truncate(text, limit):
    fits = fits_in(limit)
    return tldr.truncate(text, lambda end: fits(text[:end]))


def paragraph_at_a_time(text, fits):
    """Apply the published rule literally; None if its next step would cut characters or leave nothing."""
    while not fits(text):
        if "\n" not in text or not text[: text.rfind("\n")].strip():
            return None
        text = text[: text.rfind("\n")]
    return text


def character_at_a_time(text, fits):
    while text.strip() and not fits(text):
        text = text[:-1]
    return text if text.strip() else ""


@settings(max_examples=300)
@given(words, st.integers(8, 40))
def test_a_truncated_post_is_a_prefix_that_fits_and_keeps_every_paragraph_it_can(text, limit):
    fits = fits_in(limit)
    result, rule = truncate(text, limit)
    assert text.startswith(result)
    assert fits(result) or rule == "nothing"
    assert (rule == "whole") == fits(text)
    paragraphs = paragraph_at_a_time(text, fits)
    if paragraphs is not None:
        assert result == paragraphs  # exactly as if paragraphs were dropped one by one
    elif rule == "sentence":
        assert result.rstrip("\"'”’)]")[-1] in ".!?…" and text[len(result)].isspace()
        assert "\n" not in result.strip()
    elif rule == "character":
        sentences = [m.end() for m in re.finditer(r"[.!?…][\"'”’)\]]*\s", text.lstrip().split("\n")[0] + "\n")]
        leading = len(text) - len(text.lstrip())
        assert not any(fits(text[: leading + end - 1]) and leading + end - 1 < len(text) for end in sentences[:1])


@settings(max_examples=200)
@given(st.text(alphabet="cat mtosé", max_size=120), st.integers(5, 40))
def test_a_post_without_newline_and_sentence_is_cut_character_by_character(text, limit):
    result, rule = truncate(text, limit)
    expected = character_at_a_time(text, fits_in(limit))
    assert result == expected if text.strip() else rule in ("whole", "nothing")


def test_the_longest_fit_is_found_even_if_a_shorter_prefix_does_not_fit():
    # lengths 10, 11 and 13 fit: bisection by itself would stop at 11
    assert prepare.longest_fit(range(1, 50), lambda end: end <= 11 or end == 13) == 13
    assert prepare.longest_fit([3, 9], lambda end: False) is None
    assert prepare.longest_fit([], lambda end: True) is None
    assert prepare.longest_fit([3, 9], lambda end: True) == 9


@pytest.mark.parametrize(
    ("post", "limit", "result"),
    [
        ("aaa\nbbb\nccc", 11, ("aaa\nbbb\nccc", "whole")),
        ("aaa\nbbb\nccc", 10, ("aaa\nbbb", "paragraph")),
        ("aaa\n\nccc", 7, ("aaa\n", "paragraph")),  # as published: the last newline goes, the one before it stays
        ("aaa\n\nccc", 3, ("aaa", "paragraph")),
        ("aa. bb! cc\ndd", 9, ("aa. bb!", "sentence")),
        ('aa. "bb!" cc', 10, ('aa. "bb!"', "sentence")),
        ("a.b c.d", 6, ("a.b c.", "character")),  # a full stop inside a word doesn't end a sentence
        ("aaaa bb. c", 6, ("aaaa b", "character")),
        ("\n\naaaa. bb", 8, ("\n\naaaa.", "sentence")),  # a leading blank line isn't a paragraph
        ("\naaaa", 3, ("\naa", "character")),
        ("aaaa", 3, ("aaa", "character")),
        ("aaaa", 1, ("a", "character")),
        ("aaaa\nb", 3, ("aaa", "character")),
        ("aaa\n", 3, ("aaa", "paragraph")),
        ("aa\nb", 0, ("", "nothing")),
        ("\n\naa", 2, ("", "nothing")),
    ],
)
def test_truncation_by_hand(post, limit, result):
    assert tldr.truncate(post, lambda end: end <= limit) == result  # one token per character


def test_characters_are_dropped_from_the_first_paragraph_alone():
    """Even if a longer prefix fits, which is possible because tokens have several characters."""
    for length in (4, 6):
        assert tldr.truncate("aaa\nb\ncd", lambda end, length=length: end == length) == ("", "nothing")


def test_the_limit_applies_to_the_query_with_its_template(args):
    long = SFT | {"post": "\n".join(["It is fat."] * 30)}
    [row] = convert(replace(args, max_query_length=60), long, name="train.jsonl")["sft.train"]
    before, after = "SUBREDDIT: r/cats\n\nTITLE: My cat\n\nPOST: ", "\n\nTL;DR:"
    post = row["query"].removeprefix(before).removesuffix(after)
    assert row["query"] == before + post + after
    assert set(post.split("\n")) == {"It is fat."}
    more = before + post + "\nIt is fat." + after
    assert len(TOKENIZER.encode(row["query"])) <= 60 < len(TOKENIZER.encode(more))


def test_no_room_for_the_post_is_an_error(args):
    with pytest.raises(InputError, match=r"train.jsonl:2: no room for the post: .*; --max-query-length is 40"):
        convert(replace(args, max_query_length=40), SFT, SFT | {"title": "long " * 50}, name="train.jsonl")
    assert not args.out.exists()
    with pytest.raises(InputError, match=r"comparisons.json:1: info: no room .* --max-cnndm-query-length is 3"):
        convert(replace(args, max_cnndm_query_length=3), CNNDM)


# ------------------------------------------------------------------------------------------------ files, splits, Hub
def test_every_file_format_gives_the_same_rows(args, tmp_path):
    records = [COMPARISON | {"choice": i % 2} for i in range(5)] + [CNNDM]
    full = [r | {"info": {"article": None, "site": None} | r["info"]} for r in records]  # as on the Hub
    source = tmp_path / "formats"
    paths = [write(source / "a.jsonl", *records), write(source / "b.json", *records)]
    (source / "c.jsonl.gz").write_bytes(gzip.compress(paths[0].read_bytes()))
    (source / "d.json").write_text(json.dumps(records, indent=1))
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(full)
    parquet.write_table(table, source / "e.parquet")
    results = []
    for path in sorted(source.iterdir()):
        tldr.main(replace(args, source=str(path)))
        results.append(read(args.out))
    assert len(results) == 5 and all(result == results[0] for result in results)
    tldr.main(replace(args, source=str(source), files="[ab].json*"))
    assert [len(rows) for rows in read(args.out).values()] == [2, 10]


def test_one_pretty_printed_record_is_read(args, tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps(COMPARISON, indent=2))
    tldr.main(replace(args, source=str(path)))
    assert len(read(args.out)["comparisons.validation"]) == 1


def test_published_splits_are_kept(args):
    for name in ("train.jsonl", "valid.jsonl", "data/test-00000-of-00001.jsonl"):
        write(args.out.parent / "source" / name, SFT)
    comparisons = [COMPARISON | {"split": split} for split in ("train", "valid1", "valid2", "valid2")]
    rows = convert(args, *comparisons)
    assert {name: len(split_rows) for name, split_rows in rows.items()} == {
        "comparisons.train": 1,
        "comparisons.validation": 3,
        "sft.test": 1,
        "sft.train": 1,
        "sft.validation": 1,
    }
    assert [row["meta"]["split"] for row in rows["comparisons.validation"]] == ["valid1", "valid2", "valid2"]


def test_a_query_is_in_the_same_drawn_split_everywhere(args, capsys):
    posts = [{**POST, "post": f"post {i % 60}"} for i in range(150)]
    write(args.out.parent / "source" / "sft.jsonl", *[post | {"summary": "cat sat"} for post in posts])
    args = replace(args, resplit=True, validation_share=0.3)
    rows = convert(args, *[COMPARISON | {"info": post} for post in posts])
    queries = {name: {row["query"] for row in split_rows} for name, split_rows in rows.items()}
    for kind in ("sft", "comparisons"):
        assert len(queries[f"{kind}.train"]) + len(queries[f"{kind}.validation"]) == 60
        assert 8 <= len(queries[f"{kind}.validation"]) <= 28  # 18 expected, standard deviation 3.5
    assert queries["sft.train"] == queries["comparisons.train"]  # the same split in both kinds of file
    tldr.main(args)
    assert read(args.out) == rows
    tldr.main(replace(args, seed=2))
    assert {row["query"] for row in read(args.out)["sft.train"]} != queries["sft.train"]
    capsys.readouterr()
    tldr.main(replace(args, resplit=False))
    assert "no comparisons.train.jsonl" in capsys.readouterr().out


def test_a_hub_dataset_is_read_as_a_directory(args, tmp_path, monkeypatch):
    write(tmp_path / "snapshot" / "comparisons" / "valid" / "0.jsonl", COMPARISON)
    asked = []
    monkeypatch.setattr(
        "nanorlhf.files.snapshot_download", lambda *a, **k: asked.append((a, k)) or tmp_path / "snapshot"
    )
    tldr.main(replace(args, source="openai/summarize_from_feedback", files="comparisons/*", revision="x"))
    assert list(read(args.out)) == ["comparisons.validation"]
    expected = {"repo_type": "dataset", "revision": "x", "allow_patterns": ["comparisons/*"]}
    assert asked == [(("openai/summarize_from_feedback",), expected)]


def test_parquet_without_pyarrow_fails_with_the_install_command(args, tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match="a.parquet: .*pip install pyarrow"):
        tldr.main(replace(args, source=str(tmp_path / "a.parquet")))


# ------------------------------------------------------------------------------------ skipped and malformed records
def test_unusable_rows_are_skipped_and_counted(args, capsys):
    long = [{"text": "xq " * 90, "policy": "p"}, {"text": "b", "policy": "q"}]
    same = [{"text": "cat", "policy": "p"}, {"text": " cat", "policy": "q"}]
    empty = [{"text": "", "policy": "p"}, {"text": " cat", "policy": "q"}]
    bad = [COMPARISON | {"summaries": summaries} for summaries in (long, same, same, empty)]
    write(args.out.parent / "source" / "train.jsonl", SFT, SFT | {"summary": "xq " * 40})
    write(args.out.parent / "source" / "axis.json", {"info": POST, "summary": {"text": "a", "policy": "p"}})
    rows = convert(args, COMPARISON, *bad)
    assert {name: len(split_rows) for name, split_rows in rows.items()} == {"comparisons.validation": 1, "sft.train": 1}
    printed = capsys.readouterr().out
    for count, reason in (
        (1, "a response longer than --max-preference-response-length 169"),
        (2, "two identical responses"),
        (1, "an empty summary"),
        (1, "a response longer than --max-sft-response-length 53"),
        (1, "an evaluation of a single summary, not a comparison"),
    ):
        assert re.search(rf"^ +{count}  {reason}$", printed, re.MULTILINE)


def test_tables_agree_with_a_recount(args, capsys):
    pairs = (("cat", "ref", "the mat", "sup4"), ("it is fat", "sup4", "fat", "ref"), ("xq on", "sup4", "on", "sup4"))
    records = [
        COMPARISON | {"summaries": [{"text": a, "policy": p}, {"text": b, "policy": q}], "choice": 0, "split": "train"}
        for a, p, b, q in pairs
    ]
    rows = convert(args, *records)["comparisons.train"]
    printed = capsys.readouterr().out
    chosen = sorted(len(TOKENIZER.encode(" " + row["chosen"])) + 1 for row in rows)
    number = r" +([\d.]+)"
    line = re.search(rf"comparisons.train +chosen{number * 6}", printed)
    mean, median = sum(chosen) / len(chosen), chosen[(len(chosen) - 1) // 2]
    assert line.groups() == tuple(map(str, (len(rows), chosen[0], median, round(mean, 1), chosen[-1], chosen[-1])))
    table = "2 unique pairs of policies in 3 comparisons [N+ 6]\n        2  ref / sup4\n        1  sup4 / sup4\n"
    assert f"comparisons.train: {table}" in printed  # the order in a pair doesn't count


def test_the_policy_pairs_are_a_csv_that_a_rerun_replaces(args):
    def comparison(policy, other, split):
        summaries = [{"text": "cat", "policy": policy}, {"text": "the mat", "policy": other}]
        return COMPARISON | {"summaries": summaries, "split": split}

    convert(args, comparison("b, 2", "a", "valid1"), COMPARISON | {"split": "train"})
    records = [comparison("sup4", "ref", "valid2"), comparison("b, 2", "b, 2", "valid1")]
    records += [comparison("ref", "sup4", "valid1"), comparison("ref", "sup4", "train")]
    convert(replace(args, num_pairs=0), *records, CNNDM)
    assert (args.out / "policy_pairs.csv").read_text() == (
        "split,policy,other_policy,comparisons\n"
        "cnndm,ref,sup4,1\n"
        "train,ref,sup4,1\n"
        "validation,ref,sup4,2\n"
        'validation,"b, 2","b, 2",1\n'
    )


def test_histograms_by_hand():
    lengths = prepare.LengthTable()
    for query, chosen, rejected in ((10, 3, 4), (10, 3, 6), (11, 3, 4), (129, 3, 4)):
        lengths.add("comparisons.train", query, chosen=chosen, rejected=rejected)
    lengths.add("comparisons.validation", 12, chosen=3, rejected=4)
    lengths.add("sft.train", 500, response=50)
    panels = tldr.draw_lengths(lengths, "comparisons").axes
    assert [axes.get_title("left") for axes in panels] == ["query", "chosen", "rejected"]
    assert [patch.get_label() for patch in panels[0].patches] == ["train", "validation"]
    (query, query_2), (chosen, _), (rejected, rejected_2) = (
        [patch.get_data() for patch in axes.patches] for axes in panels
    )
    assert panels[0].get_ylabel() == "% of rows (bin width 2)"  # 120 lengths in 60 bins
    assert query.edges.tolist() == list(range(10, 131, 2)) and query.values.tolist() == [75] + [0] * 58 + [25]
    assert query_2.values.tolist() == [0, 100] + [0] * 58
    assert chosen.edges.tolist() == [3, 4] and chosen.values.tolist() == [100]
    assert rejected.edges.tolist() == [4, 5, 6, 7] and rejected.values.tolist() == [75, 0, 25]
    assert rejected_2.values.tolist() == [100, 0, 0]


def test_each_kind_has_its_picture_which_a_rerun_replaces(args):
    source = write(args.out.parent / "sft" / "train.jsonl", SFT)
    tldr.main(replace(args, source=str(source)))
    assert not (args.out / "lengths.comparisons.png").exists() and not (args.out / "policy_pairs.csv").exists()
    convert(args, COMPARISON)  # from a second source: the demonstrations and their picture stay
    pictures = {path.name: path.read_bytes() for path in args.out.glob("*.png")}
    assert sorted(pictures) == ["lengths.comparisons.png", "lengths.sft.png"]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values())
    convert(args, COMPARISON, COMPARISON | {"choice": 0, "split": "train"})
    changed = {name for name, picture in pictures.items() if (args.out / name).read_bytes() != picture}
    assert changed == {"lengths.comparisons.png"}
    old = {path: path.read_bytes() for path in args.out.iterdir()}
    with pytest.raises(InputError, match="malformed JSON"):
        convert(args, CNNDM, "{")
    assert {path: path.read_bytes() for path in args.out.iterdir()} == old


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("{", "malformed JSON"),
        ({"prompt": "a"}, "not a TL;DR record: .* got prompt"),
        (SFT, "a record of sft in a file of comparisons"),
        ({key: value for key, value in COMPARISON.items() if key != "choice"}, "the field 'choice' is missing"),
        (COMPARISON | {"choice": 2}, "'choice' must be 0 or 1, not 2"),
        (COMPARISON | {"choice": "1"}, "'choice' must be int, not str"),
        (COMPARISON | {"choice": True}, "'choice' must be int, not bool"),
        (COMPARISON | {"summaries": COMPARISON["summaries"] * 2}, "'summaries' must have two objects"),
        (COMPARISON | {"summaries": ["a", "b"]}, r"'summaries\[0\]' must be dict, not str"),
        (COMPARISON | {"summaries": [{"text": "a", "policy": "p"}, {"text": "b"}]}, "'policy' is missing"),
        (COMPARISON | {"info": {"id": "1", "title": "a", "subreddit": "b"}}, "info: the field 'post' is missing"),
        (COMPARISON | {"info": POST | {"title": None}}, "info: the field 'title' must be str, not NoneType"),
        (COMPARISON | {"info": POST | {"post": " \n"}}, "info: the field 'post' is empty"),
        (COMPARISON | {"split": "dev"}, "unknown split 'dev'"),
        (COMPARISON | {"extra": {"confidence": "high"}}, "extra: the field 'confidence' must be int, not str"),
        (COMPARISON | {"extra": [7]}, "'extra' must be dict, not list"),
    ],
)
def test_a_malformed_record_is_reported_with_file_and_line_and_nothing_is_written(args, record, reason):
    with pytest.raises(InputError, match=rf"comparisons.json:2: {reason}|comparisons.json:2: .*{reason}") as error:
        convert(args, COMPARISON, record)
    assert "\n" not in str(error.value)
    assert not args.out.exists()


def test_a_malformed_demonstration_is_reported_with_file_line_and_reason(args):
    for record, reason in (
        (SFT | {"summary": " "}, "the field 'summary' is empty"),
        (POST, "the field 'summary' is missing"),
        (SFT | {"post": ""}, "the field 'post' is empty"),
    ):
        with pytest.raises(InputError, match=f"train.jsonl:2: {reason}"):
            convert(args, SFT, record, name="train.jsonl")


def test_a_failed_conversion_keeps_the_earlier_files(args):
    before = convert(args, COMPARISON)
    with pytest.raises(InputError):
        convert(args, COMPARISON, COMPARISON, "{")
    assert read(args.out) == before
    assert not [path for path in args.out.iterdir() if path.name.startswith(".")]


def test_unusable_sources_and_flags_are_rejected(args, tmp_path):
    (tmp_path / "source").mkdir()
    broken = write(tmp_path / "broken.json", "[1, ")
    damaged = tmp_path / "a.parquet"
    damaged.write_bytes(b"PAR1, it says")
    for changes, reason in (
        ({}, "no file matches --files"),
        ({"source": str(write(tmp_path / "a.csv", "a,b"))}, "unsupported file type"),
        ({"source": str(write(tmp_path / "empty.json"))}, "empty.json is empty"),
        ({"source": str(broken)}, "broken.json:2: malformed JSON"),
        (
            {"source": str(write(tmp_path / "list.json", "[1, 2]"))},
            "list.json: record 1: expected a JSON object, got int",
        ),
        ({"source": str(damaged)}, "a.parquet: damaged, or not a parquet file"),
        ({"max_query_length": 0}, "--max-query-length 0"),
        ({"validation_share": 1.5}, "--validation-share 1.5"),
        ({"source": str(write(tmp_path / "b.jsonl", COMPARISON)), "out": broken}, "--out .*broken.json is a file"),
        (
            {"source": str(tmp_path / "b.jsonl"), "max_preference_response_length": 1},
            r"no usable rows \(1 x a response longer .*nothing was written",
        ),
    ):
        with pytest.raises(InputError, match=reason):
            tldr.main(replace(args, **changes))
        assert not args.out.exists()


def test_the_command_ends_with_one_line_and_code_2(args, tmp_path, capsys):
    source = write(tmp_path / "a.jsonl", COMPARISON, "{")
    flags = ["--source", str(source), "--out", str(args.out), "--tokenizer", args.tokenizer]
    with pytest.raises(SystemExit) as stopped:
        run_program("data.tldr", *flags)
    assert stopped.value.code == 2
    assert re.fullmatch(r"error: \S+a.jsonl:2: malformed JSON [^\n]*\n", capsys.readouterr().err)
    assert not args.out.exists()


# ------------------------------------------------------------------------------------------------------ the real slices
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox_20b/20B_tokenizer.json"])
@pytest.mark.slow
def test_real_tldr_fits_the_papers_limits(real_data, tmp_path, name, capsys):
    args = tldr.Args(
        source=str(real_data / "tldr"), out=tmp_path, tokenizer=str(real_data / "tokenizers" / name), resplit=True
    )
    tldr.main(args)
    tokenizer = load_tokenizer(tmp_path)
    demonstrations = [
        row
        for split in ("train", "validation")
        for row in load_demonstrations(tmp_path / f"sft.{split}.jsonl", tokenizer, 512, 53)
    ]
    comparisons = [
        row
        for split in ("train", "validation")
        for row in load_comparisons(tmp_path / f"comparisons.{split}.jsonl", tokenizer, 512, 169)
    ]
    assert (len(demonstrations), len(comparisons)) == (1397, 721)
    assert "1  an evaluation of a single summary" in capsys.readouterr().out
    # the queries published by the authors for these posts
    with (real_data / "tldr" / "oai1b.csv_judged.csv").open(newline="") as file:
        published = {row["query"] for row in csv.DictReader(file)}
    written = {row.record["query"] for row in demonstrations}
    assert len(written - published) == (0 if name == "gpt2" else 9)  # nine exceed 512 NeoX tokens and are cut
    for query in written - published:
        [whole] = [other for other in published if other.startswith(query.removesuffix("\n\nTL;DR:") + "\n")]
        assert len(tokenizer.encode(whole)) > 512
