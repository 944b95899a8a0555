"""Encode and decode text: a thin wrapper around `tokenizers` that knows the ids of EOS and [PAD].

[PAD] is a separate token, never EOS: masks are `ids != pad_id`, and with PAD = EOS they would hide
the EOS that the model has to learn. Its id may be outside the embedding (50257 for GPT-2): the
model masks it before the embedding, and no text encodes to it.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from nanorlhf.errors import InputError
from nanorlhf.files import hub_directory, read_bytes, read_object, read_text, write_text
from nanorlhf.pretrained.directories import ADAPTER_CONFIG, other_layout, refuse_gguf, split_adapter

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # otherwise a later fork prints a warning
PAD = "[PAD]"
END_OF_TEXT = "<|endoftext|>"
PROBE = "The cat sat on 3 mats."  # any tokenizer can encode it
# file names of vocabulary and merges, in OpenAI's GPT-2 and in transformers
VOCABULARIES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
ADDED = "added_tokens.json"  # tokens that aren't made by merges, as in CodeT5
TEMPLATE = "chat_template.jinja"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")  # the first that names a token wins
GENERATION = "generation_config.json"
FILES = (
    *(name for pair in VOCABULARIES for name in pair),
    *("tokenizer.json", ADDED, *SETTINGS, TEMPLATE, GENERATION, "config.json", ADAPTER_CONFIG),
)
"""the files that a tokenizer may be read from"""
# if another tokenizer left these files in a directory, they would change how a new one is read
REPLACED = frozenset({"special_tokens_map.json", TEMPLATE, GENERATION})
MAX_IDS = 2**24  # bound on a vocabulary; Gemma's has 262,144 ids


@dataclass(frozen=True)
class Tokenizer:
    backend: tokenizers.Tokenizer
    eos_id: int
    pad_id: int
    bos: str | None = None  # only used by chat templates
    chat_template: str | None = None  # in Jinja, for data.chat
    # generation_config.json, kept for transformers and vLLM; its eos_token_id is a list
    generation: dict | None = field(default=None, hash=False)

    @property
    def eos(self) -> str:
        """The text of EOS; `id_to_token` would return it normalised."""
        return self.backend.get_added_tokens_decoder()[self.eos_id].content

    @property
    def stop_ids(self) -> list[int]:
        """EOS, then the other ids that end a response in the model's generation config."""
        config_ids = self.generation["eos_token_id"] if self.generation else []
        return list(dict.fromkeys([self.eos_id, *config_ids]))

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Return the ids of a text; no special token is added.

        parse_special: for text written by a chat template: the name of a special token becomes that
        token. Otherwise it stays text: `[PAD]` is five characters.
        """
        backend = self._parsing_special if parse_special else self.backend
        with panics_refused():
            return backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str], parse_special: bool = False) -> list[list[int]]:
        """Encode each text like `encode`, on all cores."""
        backend = self._parsing_special if parse_special else self.backend
        with panics_refused():
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_responses(self, texts: list[str], chats: list[str] | None = None) -> list[list[int]]:
        """Encode each text as the continuation of another text.

        SentencePiece tokenizers (Llama 2, Mistral) put a space before every text. For these, return
        the ids that follow a newline, which is never part of another token.

        chats: chat-template texts, each followed by one of the texts. The ids then come from
        encoding both together, because a special token may add or drop a space before the text
        (Phi-3), unless a token spans both or the text contains the name of a special token.
        """
        if chats is not None:
            query_ids = self.encode_batch(chats, parse_special=True)
            joint = self.encode_batch([a + b for a, b in zip(chats, texts, strict=True)], True)
            added = self.backend.get_added_tokens_decoder().items()
            special = {i for i, token in added if token.special}
            return [
                ids[len(query) :]
                if ids[: len(query)] == query and special.isdisjoint(ids[len(query) :])
                else separate_ids
                for query, ids, separate_ids in zip(
                    query_ids, joint, self.encode_responses(texts), strict=True
                )
            ]
        separate = self.encode_batch(texts)
        if not self._puts_space:
            return separate
        newline = self.encode("\n")
        after_newline = self.encode_batch(["\n" + text for text in texts])
        return [
            ids[len(newline) :] if ids[: len(newline)] == newline else separate_ids
            for ids, separate_ids in zip(after_newline, separate, strict=True)
        ]

    @cached_property
    def _puts_space(self) -> bool:
        return self.encode("\na") != self.encode("\n") + self.encode("a")

    @cached_property
    def _parsing_special(self) -> tokenizers.Tokenizer:
        """A copy that parses special tokens; `encode_special_tokens` isn't in tokenizer.json."""
        return tokenizers.Tokenizer.from_str(self.backend.to_str())

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The names that `encode` parses as special tokens with `parse_special`."""
        tokens = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in tokens if token.special)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines the ids of a text."""
        return hashlib.sha256(f"{self.eos_id} {self.backend.to_str()}".encode()).hexdigest()

    def decode(self, ids: list[int]) -> str:
        """Return the text of the ids, without [PAD], EOS and other stop tokens."""
        kept = [i for i in ids if i not in (*self.stop_ids, self.pad_id)]
        return self.backend.decode(kept, skip_special_tokens=False)

    @property
    def vocab_size(self) -> int:
        """Number of rows that an embedding needs: the highest id except [PAD]'s, plus one."""
        ids = self.backend.get_vocab(with_added_tokens=True).values()
        return 1 + max(i for i in ids if i != self.pad_id)

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and, for transformers, tokenizer_config.json.

        The model's generation_config.json is written too, if it has one, with `stop_ids`.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,  # transformers would decode "a ." as "a."
        }
        optional = {"bos_token": self.bos, "chat_template": self.chat_template}
        config |= {name: text for name, text in optional.items() if text is not None}
        files = {
            "tokenizer.json": self.backend.to_str(),
            "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        }
        if self.generation is not None:
            ids = self.stop_ids
            generation = self.generation | {"eos_token_id": ids if len(ids) > 1 else ids[0]}
            files[GENERATION] = json.dumps(generation, indent=2) + "\n"
        for name, text in files.items():
            write_text(directory / name, text)
        for name in REPLACED - files.keys():
            (directory / name).unlink(missing_ok=True)


@contextmanager
def panics_refused() -> Iterator[None]:
    """Raise InputError if the library panics, as when a regular expression takes too many steps.

    A panic isn't an Exception, and its class can't be imported. The library's regular expressions
    give up after 10 million steps at one position of a text, which takes about half a second.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = f"{error!s:.200}"
        raise InputError(f"the tokenizer's settings fail on a text ({reason}).") from error


def load_tokenizer(where: str | Path) -> Tokenizer:
    """Load a tokenizer from a directory, a tokenizer.json, or a Hub id.

    EOS is the `eos_token` of tokenizer_config.json or special_tokens_map.json, else the one id in
    `eos_token_id` of generation_config.json or config.json, else `<|endoftext|>`. The chat template
    is chat_template.jinja, else the `chat_template` of tokenizer_config.json. Texts get the same
    ids as from the file. Raises InputError if there is no tokenizer, it is broken, [PAD] is EOS, or
    there are several EOS ids.
    """
    path = Path(where)
    refuse_gguf(path)
    if not path.exists():
        path = hub_directory(str(where), list(FILES))
    if path.is_file():
        return _finish(_read_backend(path), path)

    if (path / "tokenizer.json").exists():
        backend = _read_backend(path / "tokenizer.json")
    else:
        for vocabulary, merges in VOCABULARIES:
            if (path / vocabulary).exists() and (path / merges).exists():
                backend = _byte_level(path / vocabulary, path / merges)
                if (path / ADDED).exists():
                    _add_tokens(backend, path / ADDED)
                break
        else:
            base, adapter = split_adapter(path)
            if adapter is not None:  # peft saves no tokenizer, but the base model has one
                return load_tokenizer(base)
            if layout := other_layout(path):
                raise InputError(f"{where} has no tokenizer: {layout}.")
            raise InputError(
                f"{where} has no tokenizer (tokenizer.json, encoder.json + vocab.bpe, or "
                "vocab.json + merges.txt): put one there (train_sft.py: or pass --tokenizer)."
            )

    known: list[str | None] = [None] * 3
    for file in (path / name for name in SETTINGS):
        if file.exists():
            named = _settings(read_object(file), file)
            known = [old if old is not None else new for old, new in zip(known, named, strict=True)]
    eos, bos, template = known
    if (path / TEMPLATE).exists():
        template = read_text(path / TEMPLATE)
    generation: dict | None = None
    stop_ids: list[int] = []
    for file in (path / name for name in (GENERATION, "config.json")):
        if file.exists() and not stop_ids:
            config = read_object(file)
            stop_ids = _stop_ids(config, file)
            if eos is None and stop_ids:
                eos = _only_eos(backend, stop_ids, file)
            if file.name == GENERATION:
                generation = config
    if generation is not None or len(stop_ids) > 1:
        generation = (generation or {}) | {"eos_token_id": stop_ids}
    return _finish(backend, path, eos, bos, template, generation)


def files_of_tokenizer(where: str | Path) -> list[Path]:
    """Return the files that `load_tokenizer` reads."""
    path = Path(where)
    if path.is_file():
        return [path]
    directory = path if path.is_dir() else hub_directory(str(where), list(FILES))
    return [directory / name for name in FILES if (directory / name).is_file()]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with `vocab_size` ids, `<|endoftext|>` first, and add [PAD] last."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # all 256 bytes
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _finish(backend, "the trained tokenizer")


def check_vocabulary(tokenizer: Tokenizer, num_embeddings: int, where: str | Path) -> None:
    """Raise InputError if some ids have no row in the embedding, before a forward pass fails."""
    if tokenizer.vocab_size > num_embeddings:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the embedding of {where} has only "
            f"{num_embeddings} rows: use the checkpoint's tokenizer."
        )


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the bytes of each id in decoded text: none for [PAD] and the stop tokens.

    Raises InputError if the tokenizer isn't byte-level BPE.
    """
    if not isinstance(tokenizer.backend.decoder, decoders.ByteLevel):
        raise InputError(
            "the tokenizer isn't byte-level BPE (GPT-2, NeoX, CodeGen), so the bytes of a single "
            "token are unknown."
        )
    alphabet = symbol_bytes()
    pieces = {}
    for symbol, i in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if all(character in alphabet for character in symbol):
            pieces[i] = bytes(alphabet[character] for character in symbol)
        else:  # an added token, such as NeoX's runs of spaces, is stored as text
            pieces[i] = symbol.encode()
    return pieces | dict.fromkeys((*tokenizer.stop_ids, tokenizer.pad_id), b"")


def symbol_bytes() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 is its own byte, U+0100 and up the other bytes."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    printable = [byte for byte in range(256) if chr(byte) in alphabet]
    unprintable = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


def _finish(
    backend: tokenizers.Tokenizer,
    where: str | Path,
    eos: str | None = None,
    bos: str | None = None,
    chat_template: str | None = None,
    generation: dict | None = None,
) -> Tokenizer:
    """Add [PAD] if it is missing, switch off truncation and padding, and look up both ids."""
    if eos is None:
        eos = END_OF_TEXT
    backend.no_truncation()  # tokenizer.json may turn both on
    backend.no_padding()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    highest = max(vocabulary.values(), default=0)
    if highest >= MAX_IDS:  # the library writes a line for each id, used or not
        raise InputError(f"{where}: the tokenizer has token id {highest}, above {MAX_IDS:,}.")
    if backend.token_to_id(eos) is None:
        raise InputError(f"{where}: the tokenizer has no token for its eos_token {eos!r}.")
    if eos == PAD:
        raise InputError(f"{where}: {PAD} is the tokenizer's EOS, so a mask would hide both.")
    if bos is not None and backend.token_to_id(bos) is None:
        bos = None  # chat templates then write nothing for it
    # Mark them as special even if the file doesn't: only special tokens can be kept out of texts.
    # Keep their other flags, which affect the ids of a text, and ids that are in the vocabulary. A
    # new [PAD] gets the next free id, 50257 for GPT-2.
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    names = [eos, PAD] if bos is None else [eos, PAD, bos]
    for name in names:
        backend.add_special_tokens([added.get(name, AddedToken(name, normalized=False))])
    eos_id = backend.token_to_id(eos)
    pad_id = backend.token_to_id(PAD)
    assert eos_id is not None and pad_id is not None
    if PAD not in vocabulary and pad_id in vocabulary.values():
        raise InputError(
            f"{where}: the tokenizer's ids have gaps, so the next free one, {pad_id}, isn't free "
            f"for {PAD}."
        )
    tokenizer = Tokenizer(backend, eos_id, pad_id, bos, chat_template, generation)
    marked = "".join(f"{PROBE} {name} " for name in names)
    try:
        with panics_refused():
            marked_ids = backend.encode(marked, add_special_tokens=False).ids
        # a special token's name in a text stays text; tokenizer.json can't store this
        backend.encode_special_tokens = True
        if tokenizer.decode(tokenizer.encode(PROBE)).split() == []:
            raise ValueError("it has no tokens for it")
    except Exception as error:  # the library raises no narrower class
        reason = f"{error!s:.200}"
        raise InputError(f"{where}: the tokenizer can't encode {PROBE!r} ({reason}).") from error
    # the next stage loads what this one saves; a tokenizer with [PAD] has been saved before
    if PAD not in added and tokenizer.encode(marked, parse_special=True) != marked_ids:
        raise InputError(
            f"{where}: the tokenizer encodes {marked!r} to other ids after saving and loading it."
        )
    return tokenizer


def _byte_level(vocabulary_file: Path, merges_file: Path) -> tokenizers.Tokenizer:
    """Build GPT-2's tokenizer: bytes are printable symbols, a space belongs to the next word."""
    vocabulary = read_object(vocabulary_file)
    merges = _read_merges(merges_file)
    for symbol, i in vocabulary.items():
        if type(i) is not int or not 0 <= i < 2**31:
            raise InputError(
                f"{vocabulary_file}: the id of {symbol!r:.80} is {i!r:.80}, expected an integer "
                "below 2^31."
            )
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    except Exception as error:  # the library raises no narrower class
        reason = f"{error!s:.200}"
        raise InputError(f"{merges_file} doesn't match {vocabulary_file} ({reason}).") from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, path: Path) -> None:
    """Add the tokens of added_tokens.json with their ids; T5's sentinels as special tokens.

    Raises InputError unless the ids continue the vocabulary's.
    """
    tokens = read_object(path)
    if not all(type(i) is int for i in tokens.values()):
        raise InputError(f"{path}: the id of each token must be an integer.")
    for token in sorted(tokens, key=tokens.__getitem__):
        if backend.token_to_id(token) is None:
            is_special = re.fullmatch(r"<extra_id_\d+>", token) is not None
            backend.add_tokens([AddedToken(token, special=is_special, normalized=False)])
        if backend.token_to_id(token) != tokens[token]:
            raise InputError(
                f"{path}: the id of {token!r:.80} is {tokens[token]}, but the next free one is "
                f"{backend.token_to_id(token)}."
            )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if "model" not in read_object(path):
        raise InputError(f"{path} isn't a tokenizer.json: the field 'model' is missing.")
    try:
        return tokenizers.Tokenizer.from_buffer(read_bytes(path))
    except Exception as error:  # the library raises no narrower class
        raise InputError(f"{path} isn't a valid tokenizer ({error!s:.200}).") from error


def _read_merges(path: Path) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.startswith("#version") or not line.strip():
            continue
        symbols = tuple(line.split(" "))
        if len(symbols) != 2:
            raise InputError(
                f"{path}:{number}: expected two symbols separated by a space, got {line!r:.80}."
            )
        merges.append(symbols)
    return merges


def _settings(settings: dict, where: Path) -> tuple[str | None, str | None, str | None]:
    """Return EOS, BOS and (default) chat template of tokenizer_config.json."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = (item for item in template if isinstance(item, dict))
        template = next((x.get("template") for x in named if x.get("name") == "default"), None)
    if not isinstance(template, str | None):
        raise InputError(f"{where}: chat_template is {template!r:.80}, expected a string.")
    eos = _token_text(settings, "eos_token", where)
    bos = _token_text(settings, "bos_token", where)
    return eos, bos, template


def _stop_ids(settings: dict, where: Path) -> list[int]:
    """Return the ids in `eos_token_id` of generation_config.json or config.json."""
    value = settings.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i < MAX_IDS for i in ids):
        raise InputError(
            f"{where}: eos_token_id is {value!r:.80}, expected an id or a list of ids."
        )
    return ids


def _only_eos(backend: tokenizers.Tokenizer, ids: list[int], where: Path) -> str:
    """Return the EOS token. Raises InputError if there are several ids, or no such token."""
    tokens = {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}
    names = [tokens.get(i) for i in dict.fromkeys(ids)]
    if len(names) > 1:
        raise InputError(
            f"{where}: eos_token_id is {ids} ({', '.join(map(str, names))}), but a response ends "
            "in one token: set it as eos_token in tokenizer_config.json."
        )
    if names[0] is None:
        raise InputError(f"{where}: eos_token_id is {ids[0]}, but no token has this id.")
    return names[0]


def _token_text(settings: dict, key: str, where: Path) -> str | None:
    """Return a token of tokenizer_config.json: a string, or an object with it in `content`."""
    token = settings.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not (isinstance(text, str) and text.isprintable()):
        raise InputError(f"{where}: {key} is {token!r:.80}, expected a string.")
    return text
