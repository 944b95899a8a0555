import json

import pytest
import tokenizers
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorlhf import files
from nanorlhf.dataset import response_ids
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer, token_bytes, train_tokenizer

TEXTS = ["the cat sat on the mat", "TL;DR: my cat sold the mat.", "the mat, the cat and the cat's hat"] * 3
TRAINED = train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module", params=["gpt2", "gpt_neox_20b/20B_tokenizer.json"])
def published(request, real_data):
    return load_tokenizer(real_data / "tokenizers" / request.param)


def save_with(directory, **settings):
    """Write a tokenizer directory whose tokenizer_config.json has `settings`."""
    TRAINED.save(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


# ------------------------------------------------------------------------------------------------- EOS and [PAD] [N+ 2]
def test_gpt2s_pad_is_outside_its_embedding(real_data):
    tokenizer = load_tokenizer(real_data / "tokenizers" / "gpt2")
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (50256, 50257, 50257)
    check_vocabulary(tokenizer, 50257, "gpt2")  # [PAD] needs no row of the embedding


def test_pythias_pad_is_inside_its_padded_head(real_data):
    tokenizer = load_tokenizer(real_data / "tokenizers" / "gpt_neox_20b" / "20B_tokenizer.json")
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (0, 50277, 50277)
    assert tokenizer.pad_id < 50304  # rows of Pythia's head: the model must not sample it


def test_pad_is_never_eos_and_never_an_id_of_a_text(published):
    for tokenizer in (TRAINED, published):
        assert tokenizer.pad_id != tokenizer.eos_id
        ids = tokenizer.encode("a [PAD] b<|endoftext|>[PAD]<|endoftext|> <|padding|> [PAD]")
        assert not {tokenizer.pad_id, tokenizer.eos_id} & set(ids)
        assert tokenizer.decode(ids) == "a [PAD] b<|endoftext|>[PAD]<|endoftext|> <|padding|> [PAD]"


def test_a_plain_pad_token_in_a_file_becomes_special(tmp_path):
    backend = json.loads(TRAINED.backend.to_str())
    assert backend["added_tokens"][-1]["content"] == "[PAD]"
    backend["added_tokens"][-1]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.pad_id == TRAINED.pad_id
    assert tokenizer.pad_id not in tokenizer.encode("a [PAD] b")


def test_a_pad_token_of_the_vocabulary_keeps_its_id(tmp_path):
    backend = json.loads(TRAINED.backend.to_str())
    backend["added_tokens"] = []
    backend["model"]["vocab"]["[PAD]"] = TRAINED.pad_id
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    assert load_tokenizer(tmp_path).pad_id == TRAINED.pad_id


def test_decode_drops_pad_and_eos_only(published):
    for tokenizer in (TRAINED, published):
        ids = [tokenizer.pad_id] * 2 + tokenizer.encode(" the cat .") + [tokenizer.eos_id, tokenizer.pad_id]
        assert tokenizer.decode(ids) == " the cat ."  # the space before the full stop is kept


def test_eos_that_is_pad_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"\[PAD\] is the tokenizer's EOS"):
        load_tokenizer(save_with(tmp_path, eos_token="[PAD]"))


def test_eos_is_read_from_the_first_file_that_names_it(tmp_path):
    TRAINED.save(tmp_path)
    named = {
        "tokenizer_config.json": {"eos_token": {"content": TRAINED.backend.id_to_token(5)}},
        "special_tokens_map.json": {"eos_token": TRAINED.backend.id_to_token(6)},
        "generation_config.json": {"eos_token_id": [7, 7]},
        "config.json": {"eos_token_id": 8},
    }
    for name, tokens in named.items():
        (tmp_path / name).write_text(json.dumps(tokens))
    for eos_id, name in zip((5, 6, 7, 8), named, strict=True):
        assert load_tokenizer(tmp_path).eos_id == eos_id
        (tmp_path / name).write_text('{"eos_token": null, "eos_token_id": null}')  # names no EOS
    assert load_tokenizer(tmp_path).eos_id == TRAINED.eos_id


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            [5, 0],
            r"eos_token_id is \[5, 0\] \(.*, <.endoftext.>\), but a response ends in one token: set it as eos_token",
        ),
        (3000, "eos_token_id is 3000, but no token has this id"),
        (-1, "eos_token_id is -1, expected an id or a list of ids"),
        ("<|endoftext|>", "eos_token_id is '<.endoftext.>', expected an id or a list of ids"),
        ([True], r"eos_token_id is \[True\], expected an id or a list of ids"),
    ],
)
def test_an_ambiguous_eos_is_rejected(tmp_path, file, value, sentence):
    save_with(tmp_path)
    (tmp_path / file).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(InputError, match=f"{file}: {sentence}"):
        load_tokenizer(tmp_path)


def test_vocabulary_larger_than_the_embedding_is_refused():
    check_vocabulary(TRAINED, TRAINED.vocab_size, "model")
    with pytest.raises(
        InputError,
        match=rf"{TRAINED.vocab_size} ids, but the embedding of runs/x has only .*: use the checkpoint's tokenizer",
    ):
        check_vocabulary(TRAINED, TRAINED.vocab_size - 1, "runs/x")


@pytest.fixture
def codet5(tmp_path):
    """Write the files of CodeT5's tokenizer, with few merges."""
    backend = train_tokenizer(TEXTS, 320).backend
    model = json.loads(backend.to_str())["model"]
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    symbols = [symbol for symbol, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    vocabulary = [*special, *(symbol for symbol in symbols if symbol != "<|endoftext|>")]
    (tmp_path / "vocab.json").write_text(json.dumps({symbol: i for i, symbol in enumerate(vocabulary)}))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    sentinels = {f"<extra_id_{99 - i}>": len(vocabulary) + i for i in range(100)}
    (tmp_path / "added_tokens.json").write_text(json.dumps(sentinels))
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token", "mask_token"), special, strict=True))
    settings = names | {"cls_token": "<s>", "sep_token": "</s>", "tokenizer_class": "RobertaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_codet5s_ids_equal_transformers(codet5):
    """It is byte-level BPE with T5's special tokens; their names in a text are text."""
    ours, theirs = load_tokenizer(codet5), pytest.importorskip("transformers").RobertaTokenizer.from_pretrained(codet5)
    for text in ("the cat's hat: 3 ≠ 4\n\tx", " sold the mat", "int[] a = {1};"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == text
    size = len(json.loads((codet5 / "vocab.json").read_text()))
    assert (ours.eos_id, ours.bos, ours.pad_id, ours.vocab_size) == (2, "<s>", size + 100, size + 100)
    sentinels = [ours.backend.token_to_id(f"<extra_id_{i}>") for i in (99, 0)]
    assert sentinels == [size, size + 99] == theirs.convert_tokens_to_ids(["<extra_id_99>", "<extra_id_0>"])
    ids = ours.encode("a <extra_id_0> b</s><s>")
    assert not {*range(5), *range(size, size + 101)} & set(ids) and ours.decode(ids) == "a <extra_id_0> b</s><s>"
    pieces = token_bytes(ours)
    assert pieces[ours.eos_id] == b"" and b"".join(pieces[i] for i in ids) == b"a <extra_id_0> b</s><s>"
    ours.save(codet5 / "ours")
    again = load_tokenizer(codet5 / "ours")
    assert again.fingerprint == ours.fingerprint and (again.pad_id, again.eos_id) == (ours.pad_id, ours.eos_id)


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ({"<extra_id_0>": 4000}, "the id of '<extra_id_0>' is 4000, but the next free one is"),
        ({"<extra_id_0>": "7"}, "the id of each token must be an integer"),
        (["<extra_id_0>"], "added_tokens.json"),
    ],
)
def test_invalid_added_tokens_give_one_sentence(codet5, tokens, sentence):
    (codet5 / "added_tokens.json").write_text(json.dumps(tokens))
    with pytest.raises(InputError, match=sentence):
        load_tokenizer(codet5)


# ------------------------------------------------------------------------------------------------------------------ ids
def test_published_tokenizers_give_their_well_known_ids(real_data):
    assert load_tokenizer(real_data / "tokenizers" / "gpt2").encode("Hello world") == [15496, 995]
    assert load_tokenizer(real_data / "tokenizers" / "gpt_neox_20b" / "20B_tokenizer.json").encode("Hello world") == [
        12092,
        1533,
    ]


def test_separate_and_joint_tokenisation_agree(published, real_data):
    with (real_data / "tldr" / "reencoded" / "sft.jsonl").open() as file:
        rows = [json.loads(line) for line, _ in zip(file, range(300), strict=False)]
    for row in rows:
        summary = row["summary"]  # has no leading space
        for query in (f"POST: {row['post']}\n\nTL;DR:", f"Article:\n{row['post']}\n\nTL;DR:\n"):
            separator = "" if query.endswith("\n") else " "
            apart = published.encode(query) + response_ids(query, summary, published)[:-1]
            assert apart == published.encode(query + separator + summary)


def test_without_the_leading_space_they_would_not_agree(published):
    # the space is needed because a token may span colon and word
    query, response = "TL;DR:", "//"  # "://" is a token of both
    assert published.encode(query) + published.encode(response) != published.encode(query + response)


@given(st.lists(st.text(alphabet="ab é🐈[PAD]<|endoftext|>\n", max_size=40), max_size=8))
def test_a_batch_has_the_ids_of_its_texts(texts):
    assert TRAINED.encode_batch(texts) == [TRAINED.encode(text) for text in texts]


@given(st.text(max_size=60))
def test_every_text_survives_the_trained_tokenizer(text):
    ids = TRAINED.encode(text)
    assert TRAINED.decode(ids) == text
    assert all(0 <= i < TRAINED.vocab_size for i in ids)


@settings(max_examples=50)
@given(st.text(alphabet="ab [PAD]<|endoftext|>\n", max_size=60))
def test_no_text_yields_a_special_id(text):
    assert not {TRAINED.pad_id, TRAINED.eos_id} & set(TRAINED.encode(text))


def test_training_is_reproducible_and_puts_pad_last():
    again = train_tokenizer(TEXTS, 300)
    assert again.backend.to_str() == TRAINED.backend.to_str()
    assert TRAINED.eos_id == 0
    assert TRAINED.pad_id == TRAINED.vocab_size <= 300


def test_saved_tokenizer_loads_in_transformers_and_here(tmp_path, published):
    published.save(tmp_path)
    judge = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    text = "  the cat's   hat sold .\n\nTL;DR: ünïcode"
    assert judge(text, add_special_tokens=False).input_ids == published.encode(text)
    assert (judge.eos_token_id, judge.pad_token_id) == (published.eos_id, published.pad_id)
    assert judge.decode(published.encode(text)) == published.decode(published.encode(text))
    again = load_tokenizer(tmp_path)
    assert again.encode(text + "[PAD]") == published.encode(text + "[PAD]")
    assert (again.eos_id, again.pad_id, again.vocab_size) == (published.eos_id, published.pad_id, published.vocab_size)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_truncation_and_padding_of_a_file_are_switched_off(tmp_path):
    backend = TRAINED.backend.from_str(TRAINED.backend.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(TEXTS[0]) == TRAINED.encode(TEXTS[0])


def test_vocabulary_and_merges_give_the_ids_of_tokenizer_json(tmp_path):
    model = json.loads(TRAINED.backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    assert load_tokenizer(tmp_path).encode(TEXTS[1]) == TRAINED.encode(TEXTS[1])


# ------------------------------------------------------------------------------------ special tokens and chat templates
def test_special_tokens_are_parsed_only_in_template_text():
    text, eos = "the<|endoftext|>cat", TRAINED.eos_id
    assert TRAINED.encode(text, parse_special=True) == TRAINED.encode("the") + [eos] + TRAINED.encode("cat")
    assert TRAINED.encode_batch([text, "cat"], parse_special=True) == [
        TRAINED.encode(text, parse_special=True),
        TRAINED.encode("cat"),
    ]
    assert eos not in TRAINED.encode(text) and TRAINED.encode(text) == TRAINED.encode_batch([text])[0]
    assert TRAINED.special_tokens == {"<|endoftext|>", "[PAD]"}


def sentencepiece(kind):
    """Make a tokenizer like SentencePiece's, which puts a space before a text: Llama 2's or a later one."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    special = ["<unk>", "<s>", "</s>", "[PAD]", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(split=True)
    backend.train_from_iterator(TEXTS, trainer)
    settings = json.loads(backend.to_str())
    if kind == "prepend":
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        settings["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
        settings["pre_tokenizer"] = None
    else:
        settings["pre_tokenizer"] |= {"prepend_scheme": kind, "split": False}
    settings["added_tokens"] = [token for token in settings["added_tokens"] if not token["content"].startswith("<0x")]
    return settings


@pytest.mark.parametrize("kind", ["prepend", "first", "always", "never"])
@pytest.mark.parametrize(("query", "response"), [("TL;DR:", "my cat"), ("TL;DR:", " my cat"), ("a\n", "the cat\nsat"),
                                                 ("a\n", "\nthe cat"), ("the cat", "\n\n the cat")])  # fmt: skip
def test_a_response_has_the_ids_it_has_after_its_query(tmp_path, kind, query, response):
    (tmp_path / "tokenizer.json").write_text(json.dumps(sentencepiece(kind)))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = load_tokenizer(tmp_path)
    separator = "" if (query + response[0])[-2:].split() != [(query + response[0])[-2:]] else " "
    joint = tokenizer.encode(query + separator + response)
    assert tokenizer.encode(query) + response_ids(query, response, tokenizer)[:-1] == joint


TEXT = "a <|endoftext|>the cat\n<|endoftext|> sat  <|endoftext|><|endoftext|>\n\nend"


@pytest.mark.parametrize("kind", ["prepend", "first", "always", "never", "prefix"])
def test_marked_ids_equal_transformers(tmp_path, kind):
    eos = "<|endoftext|>" if kind == "prefix" else "</s>"
    settings = json.loads(TRAINED.backend.to_str()) if kind == "prefix" else sentencepiece(kind)
    if kind == "prefix":
        settings["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    tokenizer, text = load_tokenizer(tmp_path), TEXT.replace("<|endoftext|>", eos)
    judge = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    transformers = pytest.importorskip("transformers")
    judge = transformers.PreTrainedTokenizerFast(tokenizer_object=judge, eos_token=eos, pad_token="[PAD]")
    assert tokenizer.encode(text, parse_special=True) == judge(text, add_special_tokens=False).input_ids
    assert tokenizer.encode(text, parse_special=True).count(tokenizer.eos_id) == 4


def test_marked_ids_of_published_tokenizers_equal_transformers(tmp_path, published):
    published.save(tmp_path)
    judge = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    assert published.encode(TEXT, parse_special=True) == judge(TEXT, add_special_tokens=False).input_ids


MESSAGES = [{"role": "user", "content": "the cat"}]
SOURCE = "{{ bos_token }}{% for m in messages %}{{ m.content ~ eos_token }}{% endfor %}"
NAMED = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": SOURCE}]


@pytest.mark.parametrize("where", ["a text", "a list of named ones", "a file"])
def test_a_chat_template_is_read_and_saved_for_transformers(tmp_path, where):
    template = {"a text": SOURCE, "a list of named ones": NAMED, "a file": "an older one"}[where]
    save_with(tmp_path, eos_token="the", bos_token={"content": "cat"}, chat_template=template)
    backend = json.loads((tmp_path / "tokenizer.json").read_text())
    assert {"the", "cat"} <= set(backend["model"]["vocab"]) and backend["added_tokens"][0]["id"] == 0
    if where == "a file":
        (tmp_path / "chat_template.jinja").write_text(SOURCE)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.chat_template, tokenizer.bos) == (SOURCE, "cat")
    tokenizer.save(tmp_path / "again")
    judge = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path / "again")
    assert judge.apply_chat_template(MESSAGES, tokenize=False) == "catthe catthe"
    bos, eos = (tokenizer.backend.token_to_id(name) for name in ("cat", "the"))
    ids = judge.apply_chat_template(MESSAGES, return_dict=False)
    assert tokenizer.encode("catthe catthe", parse_special=True) == ids and ids[0] == bos and ids[-1] == eos
    again = load_tokenizer(tmp_path / "again")
    assert again.fingerprint == tokenizer.fingerprint and again.chat_template == SOURCE


def test_an_unknown_bos_is_dropped_and_a_non_string_template_is_rejected(tmp_path):
    assert load_tokenizer(save_with(tmp_path, bos_token="<nowhere>", chat_template=[])).bos is None
    assert load_tokenizer(tmp_path).chat_template is None
    for template in (3, {"default": "x"}, [{"name": "default", "template": 3}]):
        with pytest.raises(InputError, match="tokenizer_config.json: chat_template is .*, expected a string"):
            load_tokenizer(save_with(tmp_path, chat_template=template))


def test_a_hub_model_is_downloaded_with_its_template(monkeypatch, tmp_path):
    patterns = []

    def download(hub_id, allow_patterns, **_):
        patterns.extend(allow_patterns)
        return str(save_with(tmp_path, chat_template=SOURCE))

    monkeypatch.setattr(files, "snapshot_download", download)
    assert load_tokenizer("some/model").chat_template == SOURCE
    assert {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"} <= set(patterns)


# ------------------------------------------------------------------------------------------- bytes of a single token
@given(ids=st.lists(st.integers(0, TRAINED.pad_id), max_size=40))
def test_bytes_of_tokens_join_to_the_decoded_text(ids):
    pieces = token_bytes(TRAINED)
    assert b"".join(pieces[i] for i in ids).decode(errors="replace") == TRAINED.decode(ids)


def test_bytes_of_published_vocabularies_join_to_the_decoded_text(published):
    pieces = token_bytes(published)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(published.vocab_size, (200, 50), generator=generator).tolist()
    rows.append(list(range(published.vocab_size - 300, published.vocab_size)))  # NeoX adds runs of spaces there
    for ids in rows:
        assert b"".join(pieces[i] for i in ids).decode(errors="replace") == published.decode(ids)


def test_eos_and_pad_have_no_bytes(published):
    for tokenizer in (TRAINED, published):
        pieces = token_bytes(tokenizer)
        assert pieces[tokenizer.eos_id] == pieces[tokenizer.pad_id] == b""


def test_a_word_level_tokenizer_has_no_token_bytes():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<|endoftext|>": 1, "[PAD]": 2}, unk_token="a"))
    with pytest.raises(InputError, match="byte-level"):
        token_bytes(Tokenizer(backend, 1, 2))


# ------------------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "has no tokenizer .*--tokenizer"),
        ({"encoder.json": "{}"}, "has no tokenizer .*--tokenizer"),
        ({"tokenizer.json": "{"}, "tokenizer.json:1: malformed JSON"),
        ({"tokenizer.json": "[]"}, "tokenizer.json: expected a JSON object"),
        ({"tokenizer.json": '{"a": 0}'}, "tokenizer.json isn't a tokenizer.json"),
        ({"encoder.json": '{"a": 0}', "vocab.bpe": "#version: 0.2\na b c\n"}, "vocab.bpe:2: expected two symbols"),
        ({"encoder.json": '{"a": 0}', "vocab.bpe": "#version: 0.2\n"}, "no token for its eos_token '<|endoftext|>'"),
    ],
)
def test_broken_directories_get_one_sentence(tmp_path, files, sentence):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=sentence):
        load_tokenizer(tmp_path)


def test_a_vocabulary_given_as_tokenizer_gets_one_sentence(tmp_path):
    (tmp_path / "encoder.json").write_text('{"a": 0}')
    with pytest.raises(InputError, match="encoder.json isn't a tokenizer.json"):
        load_tokenizer(tmp_path / "encoder.json")


def test_hub_id_without_network_gets_one_sentence(monkeypatch):
    def no_network(*_, **__):
        raise LocalEntryNotFoundError("Name or service not known.\nmore lines")

    monkeypatch.setattr(files, "snapshot_download", no_network)
    with pytest.raises(InputError) as error:
        load_tokenizer("EleutherAI/pythia-1b")
    assert str(error.value).startswith(
        "EleutherAI/pythia-1b: no such file or directory, and downloading it as a model from the Hub failed"
    )
    assert "\n" not in str(error.value)


def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id():
    with pytest.raises(InputError, match="runs/no/such/dir: no such file or directory, and not a Hub id"):
        load_tokenizer("runs/no/such/dir")


def test_an_endless_regular_expression_gives_one_sentence(tmp_path):
    TRAINED.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    value = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, value["pre_tokenizer"]]}
    path.write_text(json.dumps(value))
    tokenizer = load_tokenizer(tmp_path)
    for encode in (lambda: tokenizer.encode("a" * 99), lambda: tokenizer.encode_batch(["x", "a" * 40], True)):
        with pytest.raises(InputError, match=r"the tokenizer's settings fail on a text \(.*retry-limit-in-match"):
            encode()
    assert tokenizer.decode(tokenizer.encode("a cat")) == "a cat"


def test_saving_removes_the_previous_tokenizers_template(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("another's")
    TRAINED.save(tmp_path)
    assert load_tokenizer(tmp_path).chat_template is None


def test_an_absurdly_large_id_is_rejected_before_allocation(tmp_path):
    TRAINED.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    value = json.loads(path.read_text())
    value["model"]["vocab"]["far"] = 10**9
    path.write_text(json.dumps(value))
    with pytest.raises(InputError, match="token id 1000000000, above 16,777,216"):
        load_tokenizer(tmp_path)
