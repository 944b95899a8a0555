import errno
import gzip
import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import tldr
from nanorlhf import dataset
from nanorlhf.dataset import (
    batch_indices,
    load_comparisons,
    load_demonstrations,
    load_programs,
    load_scored,
    load_unpaired,
    response_ids,
    with_leading_space,
    write_jsonl,
)
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from tests.helpers.jsonl import read_jsonl

TOKENIZER = train_tokenizer(["TL;DR: my cat sat on the mat"], 280)
DEMONSTRATION = {"query": "TL;DR:", "response": "my cat", "meta": {"id": 7}}
PROGRAM = {"query": "# a", "response": "return a\n", "language": "python", "prefix": "p", "suffix": "", "tests": ""}
COMPARISON = {"query": "TL;DR:", "chosen": " my cat", "rejected": "the mat sat on"}


def write(path, *rows):
    """Write rows: bytes and strings unchanged, dicts as JSON."""
    lines = [json.dumps(row) if isinstance(row, dict) else row for row in rows]
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


# -------------------------------------------------------------------------------------------------------------- reading
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"query": "a", ', "malformed JSON"),
        ('{"query": "a"} {}', "malformed JSON .Extra data"),
        ("", "the line is blank"),
        ("[1]", "expected a JSON object, got list"),
        ('"text"', "expected a JSON object, got str"),
        (b'{"query": "\xff"}', "not UTF-8"),
        ({"response": "b"}, "the field 'query' is missing"),
        ({"query": "a"}, "the field 'response' is missing"),
        ({"query": None, "response": "b"}, "the field 'query' must be str, not NoneType"),
        ({"query": ["a"], "response": "b"}, "the field 'query' must be str, not list"),
        ({"query": "a", "response": 3}, "the field 'response' must be str, not int"),
        ({"query": " \n", "response": "b"}, "the field 'query' is empty"),
        ({"query": "a", "response": ""}, "the field 'response' is empty"),
        ({"query": "a", "response": "\t "}, "the field 'response' is empty"),
        ('{"query": "a", "response": "\\ud83d"}', "the field 'response' isn't valid Unicode"),
    ],
)
def test_a_broken_line_names_file_line_and_reason(tmp_path, line, reason):
    path = write(tmp_path / "sft.train.jsonl", DEMONSTRATION, line)
    with pytest.raises(InputError, match=rf"sft.train.jsonl:2: {reason}") as error:
        load_demonstrations(path, TOKENIZER, 100, 100)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (COMPARISON | {"rejected": " my cat"}, "'chosen' and 'rejected' are the same"),
        (
            COMPARISON | {"rejected": "my cat"},
            "'chosen' and 'rejected' are the same",
        ),  # equal because of detail N+ 3
        (COMPARISON | {"rejected": " "}, "the field 'rejected' is empty"),
        (COMPARISON | {"chosen": ""}, "the field 'chosen' is empty"),
        ({"query": "a", "chosen": "b"}, "the field 'rejected' is missing"),
    ],
)
def test_a_broken_comparison_names_file_line_and_reason(tmp_path, row, reason):
    path = write(tmp_path / "comparisons.train.jsonl", COMPARISON, row)
    with pytest.raises(InputError, match=rf"comparisons.train.jsonl:2: {reason}"):
        load_comparisons(path, TOKENIZER, 100, 100)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (PROGRAM | {"language": "rust"}, "the field 'language' is 'rust', must be java or python"),
        (PROGRAM | {"language": "java"}, "the field 'language' is 'java', unlike line 1"),
        (PROGRAM | {"prefix": None}, "the field 'prefix' must be str, not NoneType"),
        (PROGRAM | {"tests": ["assert True"]}, "the field 'tests' must be str, not list"),
        ({name: text for name, text in PROGRAM.items() if name != "suffix"}, "the field 'suffix' is missing"),
        (PROGRAM | {"query": " "}, "the field 'query' is empty"),
        (PROGRAM | {"response": " "}, "the field 'response' is empty"),
        (PROGRAM | {"response": "mat " * 20}, "the field 'response' has .* --max-response-length is 12"),
        (PROGRAM | {"query": "mat " * 20}, "the field 'query' has .* --max-query-length is 12"),
    ],
)
def test_a_broken_program_names_file_line_and_reason(tmp_path, row, reason):
    path = write(tmp_path / "code.train.jsonl", PROGRAM, row)
    with pytest.raises(InputError, match=rf"code.train.jsonl:2: {reason}"):
        load_programs(path, TOKENIZER, 12, 12, needs_response=True)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"query": "a", "response": "b"}, "the field 'label' is missing"),
        ({"query": "a", "response": "b", "label": 1}, "the field 'label' must be bool, not int"),
        ({"query": "a", "response": "b", "label": "true"}, "the field 'label' must be bool, not str"),
        ({"query": "a", "response": "b", "label": None}, "the field 'label' must be bool, not NoneType"),
        ({"query": "a", "response": " ", "label": True}, "the field 'response' is empty"),
        ({"query": "a", "chosen": "b", "rejected": "c", "label": True}, "the field 'response' is missing"),
    ],
)
def test_a_broken_unpaired_row_names_file_line_and_reason(tmp_path, row, reason):
    good = DEMONSTRATION | {"label": False}
    with pytest.raises(InputError, match=f"a:2: {reason}"):
        load_unpaired(write(tmp_path / "a", good, row), TOKENIZER, None, None)


@pytest.mark.parametrize("label", [True, False])
def test_an_unpaired_file_of_one_label_is_refused(tmp_path, label):
    path = write(tmp_path / "a", *[DEMONSTRATION | {"label": label}] * 2)
    with pytest.raises(InputError, match=f"a: every row has the label {str(label).lower()}: KTO needs both"):
        load_unpaired(path, TOKENIZER, None, None)


def test_an_unpaired_row_has_one_response_chosen_or_rejected_by_its_label(tmp_path):
    path = write(tmp_path / "a", *(DEMONSTRATION | {"label": label} for label in (True, False)))
    for _ in range(2):  # tokenised, and from the cache
        good, bad = load_unpaired(path, TOKENIZER, None, None)
        response = response_ids("TL;DR:", "my cat", TOKENIZER)
        assert (good.chosen, good.rejected) == (response, []) and (bad.chosen, bad.rejected) == ([], response)
        assert good.query == bad.query == TOKENIZER.encode("TL;DR:") and bad.record["meta"] == {"id": 7}
    with pytest.raises(InputError, match="a:1: the field 'response' has .* --max-response-length is 2"):
        load_unpaired(path, TOKENIZER, None, 2)


def test_missing_and_empty_files_get_one_sentence(tmp_path):
    with pytest.raises(InputError, match="nothing.jsonl does not exist"):
        load_demonstrations(tmp_path / "nothing.jsonl", TOKENIZER, 9, 9)
    with pytest.raises(InputError, match="is a directory"):
        load_demonstrations(tmp_path, TOKENIZER, 9, 9)
    with pytest.raises(InputError, match="empty.jsonl is empty"):
        load_comparisons(write(tmp_path / "empty.jsonl"), TOKENIZER, 9, 9)
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(gzip.compress(json.dumps(DEMONSTRATION).encode() * 99)[:-12])
    with pytest.raises(InputError, match="damaged.jsonl.gz:1: the gzip file is damaged"):
        load_demonstrations(damaged, TOKENIZER, 9, 9)


def test_lines_end_at_newlines_only(tmp_path):
    rows = [DEMONSTRATION | {"response": f"a{mark}b"} for mark in ("\u2028", "\x85", "\x0b", "\r", "🐈")]
    raw = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + raw)  # a byte-order mark is ignored
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw))
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert read_jsonl(tmp_path / name, {"query": str, "meta": dict}) == rows


def test_types_of_fields_are_checked(tmp_path):
    fields = {"score": float}
    assert read_jsonl(write(tmp_path / "a", {"score": 1}, {"score": 0.5}), fields)[0]["score"] == 1
    for value, reason in (("true", "must be float, not bool"), ("NaN", "is nan"), ('"1"', "must be float, not str")):
        with pytest.raises(InputError, match=f"a:1: the field 'score' {reason}"):
            read_jsonl(write(tmp_path / "a", f'{{"score": {value}}}'), fields)


# ----------------------------------------------------------------------------------------------------------- tokenising
@pytest.mark.parametrize(
    ("query", "response", "text"),
    [
        ("TL;DR:", "my cat", " my cat"),  # summaries in the SFT data
        ("TL;DR:", " my cat", " my cat"),  # summaries in the comparisons
        ("TL;DR:\n", "my cat", "my cat"),  # CNN/DM's template
        ("TL;DR: ", "my cat", "my cat"),
        ("TL;DR:", "\nmy cat", "\nmy cat"),
    ],
)
def test_a_response_gets_a_leading_space_only_if_it_has_none(query, response, text):
    assert response_ids(query, response, TOKENIZER) == TOKENIZER.encode(text) + [TOKENIZER.eos_id]


def test_a_chats_response_is_unchanged():
    assert with_leading_space("<|user|>", "my cat") == " my cat"
    assert with_leading_space("<|user|>", "my cat", chat=True) == "my cat"


def test_rows_contain_separate_ids_with_eos_and_the_record(tmp_path):
    [row] = load_demonstrations(write(tmp_path / "a", DEMONSTRATION), TOKENIZER, 99, 99)
    assert row.query == TOKENIZER.encode("TL;DR:")
    assert row.response == TOKENIZER.encode(" my cat") + [TOKENIZER.eos_id]
    assert row.record == DEMONSTRATION
    [pair] = load_comparisons(write(tmp_path / "a", COMPARISON), TOKENIZER, 99, 99)
    assert (pair.query, pair.chosen) == (row.query, row.response)
    assert pair.rejected == TOKENIZER.encode(" the mat sat on") + [TOKENIZER.eos_id]


def test_the_response_of_a_program_is_tokenised_unchanged_and_may_be_empty_if_not_needed(tmp_path):
    path = write(tmp_path / "code", PROGRAM, PROGRAM | {"response": ""})
    program, empty = load_programs(path, TOKENIZER, None, None, needs_response=False)
    assert program.response == TOKENIZER.encode("return a\n") + [TOKENIZER.eos_id]  # no leading space
    assert TOKENIZER.decode(program.response) == "return a\n"
    assert empty.response == [TOKENIZER.eos_id] and program.query == TOKENIZER.encode("# a")
    assert program.record == PROGRAM


def test_a_row_needs_no_response_if_only_its_query_is_read(tmp_path):
    alone = {"query": "the cat", "meta": {"answer": 3}}
    rows = [DEMONSTRATION, alone, alone | {"response": None}, alone | {"response": ""}]
    path = write(tmp_path / "a", *rows)
    whole, *empty = load_demonstrations(path, TOKENIZER, 99, needs_response=False)
    assert whole.response == TOKENIZER.encode(" my cat") + [TOKENIZER.eos_id]
    assert [row.record for row in empty] == rows[1:]
    assert all(row.query == TOKENIZER.encode("the cat") and row.response == [TOKENIZER.eos_id] for row in empty)
    sentences = ("'response' is missing", "'response' must be str, not NoneType", "'response' is empty")
    for row, sentence in zip(rows[1:], sentences, strict=True):
        path = write(tmp_path / "a", DEMONSTRATION, row)
        with pytest.raises(InputError, match=f"{path}:2: the field {sentence}"):
            load_demonstrations(path, TOKENIZER, 99)
    for row, sentence in (({"query": " "}, "'query' is empty"), (alone | {"response": 3}, "'response' must be str")):
        with pytest.raises(InputError, match=f"the field {sentence}"):
            load_demonstrations(write(tmp_path / "a", row), TOKENIZER, 99, needs_response=False)


def test_special_tokens_are_parsed_in_a_chats_query_but_not_in_its_response(tmp_path):
    query, response = "the<|endoftext|>cat", "mat<|endoftext|>"
    marked = TOKENIZER.encode("the") + [TOKENIZER.eos_id] + TOKENIZER.encode("cat")
    answer = TOKENIZER.encode(response) + [TOKENIZER.eos_id]  # no leading space, and no special token
    assert answer.count(TOKENIZER.eos_id) == 1 and response_ids(query, response, TOKENIZER, chat=True) == answer
    texts = {"query": query, "response": response, "chosen": response, "rejected": "a", "score": 1.0, "chat": True}
    path = write(tmp_path / "a", *(texts | {"chat": chat} for chat in (True, False, True)))
    for load in (load_demonstrations, load_scored):
        first, second, third = load(path, TOKENIZER, None, None)
        assert first.query == third.query == marked and first.response == answer and first.record["chat"] is True
        assert second.query == TOKENIZER.encode(query) and second.response == response_ids(query, response, TOKENIZER)
    pair, plain, _ = load_comparisons(path, TOKENIZER, None, None)
    assert (pair.query, pair.chosen) == (marked, answer) and plain.chosen == second.response
    [program] = load_programs(write(tmp_path / "a", PROGRAM | {"query": query, "chat": True}), TOKENIZER, None, None)
    assert program.query == marked


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chat": 1}, "'chat' must be bool, not int"),
        ({"chat": True, "query": "a[PAD]"}, r"chat's query has \[PAD\]"),
    ],
)
def test_a_broken_chat_names_file_line_and_reason(tmp_path, change, reason):
    with pytest.raises(InputError, match=f"sft:2: the .*{reason}"):
        load_demonstrations(write(tmp_path / "sft", DEMONSTRATION, DEMONSTRATION | change), TOKENIZER, None, None)


def test_limits_are_inclusive_count_eos_and_name_their_flag(tmp_path):
    demonstrations = write(tmp_path / "sft", DEMONSTRATION, DEMONSTRATION)
    comparisons = write(tmp_path / "comparisons", COMPARISON)
    query, response = len(TOKENIZER.encode("TL;DR:")), len(TOKENIZER.encode(" my cat")) + 1
    rejected = len(TOKENIZER.encode(" the mat sat on")) + 1
    assert len(load_demonstrations(demonstrations, TOKENIZER, query, response)) == 2
    assert len(load_demonstrations(demonstrations, TOKENIZER, None, None)) == 2
    for load, path, limits, reason in (
        (load_demonstrations, demonstrations, (query - 1, response), f"'query' has {query} .*--max-query"),
        (load_demonstrations, demonstrations, (query, response - 1), f"'response' has {response} .*--max-response"),
        (load_comparisons, comparisons, (query, rejected - 1), f"'rejected' has {rejected} .*--max-response"),
    ):
        with pytest.raises(InputError, match=rf"{path}:1: the field {reason}-length is \d+\."):
            load(path, TOKENIZER, *limits)


# ---------------------------------------------------------------------------------------------------------- the arrays
def test_rows_slices_and_lengths_equal_lists(tmp_path):
    path = write(tmp_path / "c", *(COMPARISON | {"query": "cat " * (n % 9) + "TL;DR:", "n": n} for n in range(3000)))
    rows = load_comparisons(path, TOKENIZER, None, None)  # more than two chunks
    assert len(rows) == 3000 and rows[-1].record["n"] == 2999 and rows[2999].query == rows[-1].query
    selected = rows[5:2900:700][1:]
    assert [row.record["n"] for row in selected] == [705, 1405, 2105, 2805] and len(selected) == 4
    expected = [[len(row.query), len(row.chosen), len(row.rejected)] for row in selected]
    assert selected.lengths.tolist() == expected and rows.lengths.shape == (3000, 3)
    for row in selected:
        assert row.query == TOKENIZER.encode(row.record["query"])
    with pytest.raises(IndexError):
        rows[3000]


@pytest.mark.slow
def test_a_row_takes_at_most_two_kilobytes(real_data, tmp_path):
    """Measured on TL;DR's posts and summaries, with GPT-NeoX's tokenizer."""
    neox = real_data / "tokenizers" / "gpt_neox_20b" / "20B_tokenizer.json"
    tldr.main(tldr.Args(source=str(real_data / "tldr/reencoded/sft.jsonl"), out=tmp_path, tokenizer=str(neox)))
    rows = load_demonstrations(tmp_path / "sft.train.jsonl", load_tokenizer(neox), 512, 53)
    held = sum(array.nbytes for array in (rows.ids, rows.ends, rows.lines))
    assert rows.ids.dtype == "int32" and len(rows) > 1000 and held / len(rows) < 2048


# ----------------------------------------------------------------------------------------------------------- the cache
@pytest.fixture
def tokenised(monkeypatch) -> list[str]:
    """Record the files that are tokenised, in order."""
    calls, plain = [], dataset.tokenise
    monkeypatch.setattr(dataset, "tokenise", lambda path, *rest: calls.append(path.name) or plain(path, *rest))
    return calls


def queries(rows) -> list[list[int]]:
    return [row.query for row in rows]


def test_a_second_run_maps_the_cache_of_the_first(tmp_path, tokenised):
    path = write(tmp_path / "sft", DEMONSTRATION, DEMONSTRATION | {"query": "the mat TL;DR:"})
    first, second = (load_demonstrations(path, TOKENIZER, None, None) for _ in range(2))
    assert tokenised == ["sft"] and list(first) == list(second)
    limit = len(second[1].query) - 1
    with pytest.raises(InputError, match=f"sft:2: the field 'query' has .* --max-query-length is {limit}"):
        load_demonstrations(path, TOKENIZER, limit, None)  # the cache doesn't depend on limits
    assert [file.suffix for file in (tmp_path / ".tokens").iterdir()] == [".safetensors"]
    with pytest.raises(InputError, match="sft:1: the field 'chosen' is missing"):  # another kind of row
        load_comparisons(path, TOKENIZER, None, None)


def test_a_cache_of_other_data_or_another_tokenizer_is_not_used(tmp_path, tokenised):
    path = write(tmp_path / "sft", DEMONSTRATION)
    load_demonstrations(path, TOKENIZER, None, None)
    before = path.stat()
    write(path, DEMONSTRATION | {"query": "TL;RD:"})  # the same size and modification time
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    [row] = load_demonstrations(path, TOKENIZER, None, None)
    assert row.query == TOKENIZER.encode("TL;RD:") and row.record["query"] == "TL;RD:"
    other = train_tokenizer(["TL;RD: TL;RD:"] * 9, 280)
    [row] = load_demonstrations(path, other, None, None)
    assert row.query == other.encode("TL;RD:") != TOKENIZER.encode("TL;RD:") and len(tokenised) == 3
    load_demonstrations(path, TOKENIZER, None, None)
    assert len(tokenised) == 3  # both are kept


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1], lambda data: b"", lambda data: b"\xff" * 99,
        lambda data: flipped(data, -1),  # an id, an end or a line: arrays of the right shapes
        lambda data: flipped(data, data.index(b'"ids"') + 1), lambda data: data.replace(b'"I32"', b'"F32"'),
        lambda data: data.replace(b"__metadata__", b"__netadata__"),
    ],
)  # fmt: skip
def test_a_damaged_cache_is_rebuilt(tmp_path, tokenised, damage):
    path = write(tmp_path / "sft", DEMONSTRATION)
    undamaged = queries(load_demonstrations(path, TOKENIZER, None, None))
    [cache] = (tmp_path / ".tokens").iterdir()
    cache.write_bytes(damage(cache.read_bytes()))
    assert queries(load_demonstrations(path, TOKENIZER, None, None)) == undamaged and len(tokenised) == 2
    assert queries(load_demonstrations(path, TOKENIZER, None, None)) == undamaged and len(tokenised) == 2


def test_an_unwritable_directory_only_disables_the_cache(tmp_path, tokenised, monkeypatch, capsys):
    path = write(tmp_path / "sft", DEMONSTRATION)
    (tmp_path / ".tokens").write_text("a file in its place")
    [row] = load_demonstrations(path, TOKENIZER, None, None)
    assert row.query == TOKENIZER.encode("TL;DR:") and row.record == DEMONSTRATION
    assert "sft again: " in capsys.readouterr().err
    (tmp_path / ".tokens").unlink()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dataset.os, "replace", full)
        [row] = load_demonstrations(path, TOKENIZER, None, None)
    assert row.query == TOKENIZER.encode("TL;DR:") and "No space left" in capsys.readouterr().err
    assert list((tmp_path / ".tokens").iterdir()) == [] and len(tokenised) == 2


def test_a_cache_half_written_by_a_killed_run_is_removed(tmp_path):
    path = write(tmp_path / "sft", DEMONSTRATION)
    load_demonstrations(path, TOKENIZER, None, None)
    [cache] = (tmp_path / ".tokens").iterdir()
    left, writing = (cache.with_name(f"{cache.name}.node7.{number}.tmp") for number in (1, 2))
    for file in (left, writing):
        file.write_text("half")
    os.utime(left, times=(time.time() - 4000,) * 2)  # more than an hour ago
    cache.unlink()
    load_demonstrations(path, TOKENIZER, None, None)
    assert {*cache.parent.iterdir()} == {cache, writing}


def test_a_broken_row_leaves_no_cache(tmp_path):
    path = write(tmp_path / "sft", DEMONSTRATION, {"query": "a"})
    with pytest.raises(InputError, match="sft:2"):
        load_demonstrations(path, TOKENIZER, None, None)
    assert list(tmp_path.iterdir()) == [path]


def test_a_gzipped_file_gives_the_same_rows(tmp_path):
    plain = write(tmp_path / "sft.jsonl", DEMONSTRATION, DEMONSTRATION | {"query": "the mat TL;DR:"})
    (tmp_path / "sft.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + plain.read_bytes()))
    packed = load_demonstrations(tmp_path / "sft.jsonl.gz", TOKENIZER, None, None)
    assert list(packed) == list(load_demonstrations(plain, TOKENIZER, None, None))


# -------------------------------------------------------------------------------------------------------------- writing
def test_a_file_is_written_atomically(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"text": "ä\u2028🐈"}])

    def rows():
        yield {"text": "new"}
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_jsonl(path, rows())
    assert read_jsonl(path, {"text": str}) == [{"text": "ä\u2028🐈"}]
    assert len(path.read_text().splitlines()) == 1  # even for readers that split lines at U+2028
    assert list(tmp_path.iterdir()) == [path]
    write_jsonl(path, [])
    assert path.read_bytes() == b""


# -------------------------------------------------------------------------------------------------------------- batches
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**40), st.integers(1, 4))
def test_every_row_comes_once_per_epoch_and_no_batch_is_short(num_rows, batch_size, seed, num_epochs):
    num_batches = -(-num_rows * num_epochs // batch_size)
    batches = [batch_indices(num_rows, batch_size, step, seed) for step in range(num_batches)]
    assert all(len(batch) == batch_size for batch in batches)
    stream = sum(batches, [])
    for epoch in range(num_epochs):
        assert sorted(stream[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_a_batch_may_span_two_epochs():
    first, second = batch_indices(5, 5, 0, seed=3), batch_indices(5, 5, 1, seed=3)
    assert batch_indices(5, 4, 1, seed=3) == first[4:] + second[:3]
    assert first != second or batch_indices(5, 5, 2, seed=3) != first  # reshuffled


def test_batches_depend_only_on_the_seed():
    assert batch_indices(1000, 64, 17, seed=1) == batch_indices(1000, 64, 17, seed=1)
    assert batch_indices(1000, 64, 17, seed=1) != batch_indices(1000, 64, 17, seed=2)


def test_slices_of_ranks_are_disjoint_and_cover_the_batch():
    # one global permutation, sliced, not one per rank
    batch = batch_indices(100, 12, 3, seed=1)
    slices = [set(batch[rank * 3 : rank * 3 + 3]) for rank in range(4)]
    assert set.union(*slices) == set(batch) and sum(map(len, slices)) == len(set(batch)) == 12


def test_a_negative_seed_gets_one_sentence():
    with pytest.raises(InputError, match="--seed"):
        batch_indices(5, 2, 0, -1)
