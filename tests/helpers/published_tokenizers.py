"""Miniatures of published tokenizers: their kind, special tokens, flags and settings, with a small vocabulary."""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = ["the cat sat on the mat", "user assistant system model 3", "my cat, sold: the mat."] * 3
BLANK = "▁"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


class Shape(NamedTuple):
    kind: str  # bytes, prepend, first, gemma or unigram
    tokens: dict[str, dict]  # added tokens and their flags that aren't false; special is true
    settings: dict  # tokenizer_config.json
    eos: str  # what load_tokenizer finds
    bos: str | None = None
    stops: tuple[str, ...] = ()  # tokens besides EOS at which the model stops
    generation: dict | None = None  # generation_config.json, ids as names
    config: dict | None = None  # config.json, ids as names
    tokens_map: dict | None = None  # special_tokens_map.json


def named(content: str, **flags: bool) -> dict:
    """Return a token in the format of tokenizer_config.json."""
    defaults = dict.fromkeys(("lstrip", "rstrip", "single_word"), False) | {"normalized": True}
    return {"__type": "AddedToken", "content": content} | defaults | flags


def plain(*names: str) -> dict[str, dict]:
    return {name: {} for name in names}


N = {"normalized": True}
END = "<|endoftext|>"
GPT2 = {"bos_token": END, "eos_token": END, "unk_token": END}
LLAMA2 = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA3 = plain(
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"
)
GEMMA = plain("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
SMOLLM2 = plain(END, "<|im_start|>", "<|im_end|>")
STRIPPED = {"rstrip": True}

SHAPES = {
    # no tokenizer_config.json names a token; the older files mark theirs as normalised
    "gpt2": Shape("bytes", {END: N}, {"model_max_length": 1024}, END, None, (), {"bos_token_id": END,
                  "eos_token_id": END, "_from_model_config": True}, {"bos_token_id": END, "eos_token_id": END}),
    "gpt-neo": Shape("bytes", {END: N}, {name: named(END) for name in GPT2}, END, END, tokens_map=GPT2),
    "gpt-j": Shape("bytes", {END: N, "<|extratoken_1|>": N | {"special": False}},
                   {name: named(END) for name in GPT2}, END, END),
    "codegen": Shape("bytes", {END: N, "   ": N | {"special": False}, "  ": N | {"special": False}}, GPT2, END, END,
                     config={"bos_token_id": 1, "eos_token_id": END}),
    "pythia": Shape("bytes", plain(END, "<|padding|>") | {"  ": N | {"special": False}}, GPT2, END, END,
                    config={"bos_token_id": END, "eos_token_id": END}),
    "t5": Shape("unigram", plain("<pad>", "</s>", "<unk>", "<extra_id_0>"),
                {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}, "</s>", None, (),
                {"decoder_start_token_id": "<pad>", "eos_token_id": "</s>", "pad_token_id": "<pad>"}),
    "llama-1": Shape("prepend", {"<unk>": N, "<s>": N, "</s>": N}, {name: named(token) for name, token in
                     LLAMA2.items()}, "</s>", "<s>", generation={"bos_token_id": "<s>", "eos_token_id": "</s>"}),
    "llama-2-chat": Shape("prepend", plain("<unk>", "<s>", "</s>"), LLAMA2, "</s>", "<s>", (),
                          {"eos_token_id": "</s>", "temperature": 0.6, "top_p": 0.9}),
    "tinyllama": Shape("prepend", plain("<unk>", "<s>", "</s>"), LLAMA2 | {"pad_token": "</s>"}, "</s>", "<s>"),
    "mistral-0.1": Shape("prepend", plain("<unk>", "<s>", "</s>"), LLAMA2 | {"pad_token": None}, "</s>", "<s>"),
    "mistral-0.3": Shape("first", plain("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), LLAMA2, "</s>", "<s>"),
    "llama-3": Shape("bytes", LLAMA3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
                     "<|end_of_text|>", "<|begin_of_text|>", config={"eos_token_id": "<|end_of_text|>"}),
    "llama-3.1-instruct": Shape(
        "bytes", LLAMA3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, "<|eot_id|>",
        "<|begin_of_text|>", ("<|end_of_text|>", "<|eom_id|>"),
        {"bos_token_id": "<|begin_of_text|>", "eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
         "do_sample": True, "temperature": 0.6, "top_p": 0.9},
        {"bos_token_id": "<|begin_of_text|>", "eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]}),
    "smollm2": Shape("bytes", SMOLLM2, GPT2, END, END),
    "smollm2-instruct": Shape(
        "bytes", SMOLLM2, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>",
        "unk_token": END, "chat_template": CHATML}, "<|im_end|>", "<|im_start|>", (),
        {"bos_token_id": "<|im_start|>", "eos_token_id": "<|im_end|>", "pad_token_id": "<|im_end|>"}),
    "qwen2.5": Shape("bytes", SMOLLM2, {"bos_token": None, "eos_token": END, "pad_token": END}, END, None, (),
                     {"bos_token_id": END, "eos_token_id": END, "max_new_tokens": 2048}),
    "qwen2.5-instruct": Shape(
        "bytes", SMOLLM2, {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": END, "chat_template": CHATML},
        "<|im_end|>", None, (END,), {"pad_token_id": END, "eos_token_id": ["<|im_end|>", END], "top_k": 20},
        {"bos_token_id": END, "eos_token_id": "<|im_end|>"}),
    "olmo2": Shape("bytes", plain(END, "<|pad|>"), GPT2 | {"pad_token": "<|pad|>"}, END, END, (),
                   {"eos_token_id": END, "pad_token_id": "<|pad|>"}),
    "phi-3": Shape(
        "prepend", plain("<unk>", "<s>", END) | {"</s>": STRIPPED, "<|assistant|>": STRIPPED, "<|end|>": STRIPPED,
        "<|user|>": STRIPPED}, {"bos_token": "<s>", "eos_token": END, "pad_token": END, "chat_template": PHI3}, END,
        "<s>", ("<|assistant|>", "<|end|>"), {"eos_token_id": [END, "<|assistant|>", "<|end|>"],
        "pad_token_id": END}, {"eos_token_id": END}),
    "phi-4": Shape("bytes", {END: {"lstrip": True, "rstrip": True}, "<|im_start|>": STRIPPED, "<|im_end|>": STRIPPED},
                   {"bos_token": END, "eos_token": "<|im_end|>", "pad_token": END, "chat_template": CHATML},
                   "<|im_end|>", END),
    "gemma-2-it": Shape("gemma", GEMMA, {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
                        "chat_template": TURNS}, "<eos>", "<bos>", ("<end_of_turn>",),
                        config={"bos_token_id": "<bos>", "eos_token_id": ["<eos>", "<end_of_turn>"]}),
    "gemma-3-it": Shape("gemma", GEMMA, {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TURNS}, "<eos>",
                        "<bos>", ("<end_of_turn>",), {"eos_token_id": ["<eos>", "<end_of_turn>"], "top_k": 64}),
    "granite": Shape("bytes", plain("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
                     dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|end_of_text|>"), "<|end_of_text|>",
                     "<|end_of_text|>"),
    # made-up models whose normalisers change the names of special tokens in a text
    "lowercase": Shape("lower", {"[EOS]": N, "[BOS]": N}, {"bos_token": "[BOS]"}, "[EOS]", "[BOS]",
                       config={"eos_token_id": "[EOS]"}),
    "nfkc": Shape("nfkc", {"<｜end｜>": N | STRIPPED, "<｜begin｜>": N}, {}, "<｜end｜>", "<｜begin｜>",
                  tokens_map={"eos_token": named("<｜end｜>"), "bos_token": named("<｜begin｜>")}),
    "one word": Shape("bytes", {"EOS": {"single_word": True, "lstrip": True}}, {"eos_token": "EOS"}, "EOS"),
    "not special": Shape("bytes", {"<eos>": {"special": False, "rstrip": True}}, {}, "<eos>",
                         config={"eos_token_id": "<eos>"}),
}  # fmt: skip


@cache
def vocabulary(kind: str) -> str:
    """Return the tokenizer.json of a kind, without added tokens."""
    if kind in ("bytes", "lower", "nfkc"):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
        )
        backend.train_from_iterator(TEXTS, trainer)
        backend.normalizer = {"lower": normalizers.Lowercase(), "nfkc": normalizers.NFKC()}.get(kind)
        return backend.to_str()
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first" if kind == "first" else "always", split=False)
    if kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
        trainer = trainers.UnigramTrainer(
            vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
    else:
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=names, show_progress=False)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    backend.train_from_iterator(TEXTS, trainer)
    backend.pre_tokenizer = metaspace
    backend.decoder = decoders.Metaspace()
    if kind in ("prepend", "gemma"):
        steps = [normalizers.Replace(" ", BLANK)]
        first = [normalizers.Prepend(BLANK)] if kind == "prepend" else []
        backend.normalizer = normalizers.Sequence([*first, *steps])
        backend.pre_tokenizer = None if kind == "prepend" else pre_tokenizers.Split(" ", "merged_with_previous")
        pieces = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*pieces, *([decoders.Strip(" ", 1, 0)] if first else [])])
    settings = json.loads(backend.to_str())
    settings["added_tokens"] = []
    return json.dumps(settings)


def publish(directory: Path, shape: Shape) -> Tokenizer:
    """Write a tokenizer's files as they are published, and load them."""
    backend = Tokenizer.from_str(vocabulary(shape.kind))
    for name, flags in shape.tokens.items():
        backend.add_tokens([AddedToken(name, **{"normalized": False, "special": True} | flags)])
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))

    def as_id(value):
        if isinstance(value, list):
            return [as_id(item) for item in value]
        return backend.token_to_id(value) if isinstance(value, str) else value

    ids = [
        settings and {name: as_id(value) for name, value in settings.items()}
        for settings in (shape.generation, shape.config)
    ]
    names = ("tokenizer_config", "special_tokens_map", "generation_config", "config")
    for name, settings in zip(names, (shape.settings, shape.tokens_map, *ids), strict=True):
        if settings is not None:
            (directory / f"{name}.json").write_text(json.dumps(settings))
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
