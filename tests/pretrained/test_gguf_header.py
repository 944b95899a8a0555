"""A GGUF file's header: compared with the library's reader, and errors for false counts, types and offsets."""

import struct
import time
import tracemalloc
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from nanorlhf.errors import InputError
from nanorlhf.pretrained.gguf import gguf_settings, gguf_tensors, gguf_tokenizer
from nanorlhf.pretrained.gguf_header import open_gguf

gguf = pytest.importorskip("gguf", reason="no GGUF without its library: pip install gguf")
F32, F16, Q4_K, I32 = (gguf.GGMLQuantizationType[name].value for name in ("F32", "F16", "Q4_K", "I32"))


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return u64(len(data)) + data


def number(name: str, value: int) -> bytes:
    return string(name) + u32(4) + u32(value)


def text(name: str, value: str | bytes) -> bytes:
    return string(name) + u32(8) + string(value)


def array(name: str, kind: int, length: int, elements: bytes = b"") -> bytes:
    return string(name) + u32(9) + u32(kind) + u64(length) + elements


def tensor(name: str | bytes, shape: tuple[int, ...], kind: int = F32, offset: int = 0, dimensions: int = -1) -> bytes:
    """Return an entry of the tensor table; the shape has the fastest dimension first."""
    dimensions = len(shape) if dimensions < 0 else dimensions
    return string(name) + u32(dimensions) + b"".join(map(u64, shape)) + u32(kind) + u64(offset)


@dataclass(frozen=True)
class Raw:
    """The pieces of a file; a test replaces one of them."""

    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_fields: int | None = None
    fields: list[bytes] = field(default_factory=lambda: [text("general.architecture", "llama")])
    tensors: list[bytes] = field(default_factory=lambda: [tensor("token_embd.weight", (8, 4))])
    data: bytes = bytes(8 * 4 * 4)

    def write(self, path: Path) -> Path:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_fields = len(self.fields) if self.num_fields is None else self.num_fields
        head = self.magic + u32(self.version) + u64(num_tensors) + u64(num_fields)
        head += b"".join(self.fields) + b"".join(self.tensors)
        path.write_bytes(head + bytes(-len(head) % 32) + self.data)
        return path


GOOD = Raw()
MORE = [text("general.architecture", "llama")]
LIES = {
    "no magic": (replace(GOOD, magic=b"GGML"), "doesn't start with GGUF"),
    "version 1": (replace(GOOD, version=1), "version 1 isn't 2 or 3"),
    "big-endian": (replace(GOOD, version=3 << 24), "version 50331648 isn't 2 or 3"),
    "2^62 tensors": (replace(GOOD, num_tensors=2**62), "number of tensors is 4,611,686,018,427,387,904, too large"),
    "2^63 fields": (replace(GOOD, num_fields=2**63), "number of fields is 9,223,372,036,854,775,808, too large"),
    "a tensor more": (replace(GOOD, num_tensors=2, data=bytes(200)), "the name of a tensor is ''"),
    "a field more": (replace(GOOD, num_fields=2), "unknown type|bytes, but only .* are left"),
    "an array of 2^62": (
        replace(GOOD, fields=[*MORE, array("x", 0, 2**62)]), "field x has 4,611,686,018,427,387,904 elements",
    ),
    "an array of 2^64 - 1": (replace(GOOD, fields=[*MORE, array("x", 12, 2**64 - 1)]), "field x has .* elements"),
    "an array of 60 million": (
        replace(GOOD, fields=[*MORE, array("x", 0, 60_000_000, bytes(60_000_000))]), "field x has 60,000,000 elements",
    ),
    "two arrays that are too long together": (
        replace(GOOD, fields=[*MORE, *(array(x, 0, 5_000_000, bytes(5_000_000)) for x in "xy")]),
        "field y has 5,000,000 elements: more than 8,388,608 in total",
    ),
    "an array longer than the file": (
        replace(GOOD, fields=[*MORE, array("x", 0, 8_000_000)]), "field x needs 8,000,000 bytes, but only [0-9]+ are",
    ),
    "strings longer than the file": (
        replace(GOOD, fields=[*MORE, array("x", 8, 4, 4 * u64(2**61))]), "field x needs 2,305,843,009,213,693,952",
    ),
    "an array of arrays": (replace(GOOD, fields=[*MORE, array("x", 9, 1, u32(0))]), "array of unsupported type 9"),
    "an array of type 99": (replace(GOOD, fields=[*MORE, array("x", 99, 1)]), "array of unsupported type 99"),
    "a field of type 99": (replace(GOOD, fields=[*MORE, string("x") + u32(99)]), "field x has the unknown type 99"),
    "a string of 2^63": (replace(GOOD, fields=[*MORE, string("x") + u32(8) + u64(2**63)]), "field x needs"),
    "a string that is no UTF-8": (replace(GOOD, fields=[*MORE, text("x", b"\xff")]), "field x: not UTF-8"),
    "a name that is no UTF-8": (replace(GOOD, fields=[*MORE, text(b"\xff", "x")]), "name of a field: not UTF-8"),
    "a name with a newline": (replace(GOOD, fields=[*MORE, text("x\ny", "x")]), r"the name of a field is 'x\\ny'"),
    "a name of 2^40": (replace(GOOD, fields=[*MORE, u64(2**40)]), "the name of a field needs 1,099,511,627,776 bytes"),
    "a field twice": (replace(GOOD, fields=[*MORE, *MORE]), "field general.architecture appears twice"),
    "an alignment of 0": (replace(GOOD, fields=[*MORE, number("general.alignment", 0)]), "power of two, got 0"),
    "an alignment of 24": (replace(GOOD, fields=[*MORE, number("general.alignment", 24)]), "power of two, got 24"),
    "an alignment of 2^31": (replace(GOOD, fields=[*MORE, number("general.alignment", 2**31)]), "two, got 2147483648"),
    "an alignment that is a text": (replace(GOOD, fields=[*MORE, text("general.alignment", "32")]), "of two, got '32'"),
    "a tensor twice": (replace(GOOD, tensors=2 * [tensor("a", (8,))]), "tensor a appears twice"),
    "no dimensions": (replace(GOOD, tensors=[tensor("a", ())]), "tensor a has 0 dimensions"),
    "five dimensions": (replace(GOOD, tensors=[tensor("a", (1,) * 5)]), "tensor a has 5 dimensions"),
    "2^32 - 1 dimensions": (replace(GOOD, tensors=[tensor("a", (8,), dimensions=2**32 - 1)]), "has 4294967295 dim"),
    "a dimension of 0": (replace(GOOD, tensors=[tensor("a", (8, 0))]), r"shape \(0, 8\), which is invalid for F32"),
    "sizes that overflow": (replace(GOOD, tensors=[tensor("a", (2**32, 2**32))]), "tensor a ends at byte"),
    "half a block": (replace(GOOD, tensors=[tensor("a", (100, 2), Q4_K)]), r"shape \(2, 100\), which is invalid"),
    "a type of 99": (replace(GOOD, tensors=[tensor("a", (8,), 99)]), "tensor a has the unknown type 99"),
    "an offset of 2^64 - 1": (replace(GOOD, tensors=[tensor("a", (8,), offset=2**64 - 1)]), "at byte 18,446,744,073"),
    "an offset at the end": (replace(GOOD, tensors=[tensor("a", (8,), offset=128)]), "at byte 128 .* instead of 0"),
    "tensors at one offset": (replace(GOOD, tensors=[tensor(x, (8,)) for x in "ab"]), "b starts at byte 0 .* of 32"),
    "tensors that overlap by a byte": (
        replace(GOOD, tensors=[tensor("b", (9,), offset=32), tensor("a", (9,))]), "tensor b starts at byte 32 .* of 64",
    ),
    "a gap, as a smaller type leaves": (
        replace(GOOD, tensors=[tensor("a", (16,), F16), tensor("b", (8,), offset=64)]), "b starts at byte 64 .* of 32",
    ),
    "data that is missing": (replace(GOOD, data=bytes(100)), "token_embd.weight ends at byte .*, but the file has"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_one_sentence_before_memory_or_time_is_spent(tmp_path, lie) -> None:
    raw, sentence = LIES[lie]
    path = raw.write(tmp_path / "m.gguf")
    start = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(InputError, match=sentence) as error:
        open_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert time.perf_counter() - start < 5 and peak < 2**28


def metadata(**values: bytes) -> list[bytes]:
    """Return the fields of a small Llama; `values` replaces or adds some, by the last part of their names."""
    fields = {"architecture": text("general.architecture", "llama")} | values
    return [*fields.values()]


WRONG_KINDS = {
    "an architecture that is a list": (
        metadata(architecture=array("general.architecture", 8, 1, string("llama"))), gguf_settings,
        r"general.architecture must be str, not \['llama'\]",
    ),
    "a number of heads per layer": (
        metadata(heads=array("llama.attention.head_count", 4, 2, u32(2) + u32(4))), gguf_settings,
        r"llama.attention.head_count must be int or float, not \[2, 4\]",
    ),
    "a rope scaling that is a list": (
        metadata(rope=array("llama.rope.scaling.type", 4, 0)), gguf_settings, "scaling.type must be str",
    ),
    "pre as a list": (
        metadata(model=text("tokenizer.ggml.model", "gpt2"), pre=array("tokenizer.ggml.pre", 8, 1, string("smollm"))),
        gguf_tokenizer, r"tokenizer.ggml.pre must be str, not \['smollm'\]",
    ),
    "tokens as a text": (
        metadata(model=text("tokenizer.ggml.model", "gpt2"), tokens=text("tokenizer.ggml.tokens", "abc")),
        gguf_tokenizer, "tokenizer.ggml.tokens must be list, not 'abc'",
    ),
    "tokens that are numbers": (
        metadata(
            model=text("tokenizer.ggml.model", "gpt2"), tokens=array("tokenizer.ggml.tokens", 0, 2, b"ab"),
            types=array("tokenizer.ggml.token_type", 0, 2, b"\1\1"), merges=array("tokenizer.ggml.merges", 8, 0),
        ), gguf_tokenizer, "its tokenizer can't be read",
    ),
    "no merges": (
        metadata(model=text("tokenizer.ggml.model", "gpt2"), tokens=array("tokenizer.ggml.tokens", 8, 1, string("a"))),
        gguf_tokenizer, "its tokenizer can't be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_KINDS)
def test_a_field_of_another_kind_is_named(tmp_path, case) -> None:
    fields, read, sentence = WRONG_KINDS[case]
    path = replace(GOOD, fields=fields).write(tmp_path / "m.gguf")
    with pytest.raises(InputError, match=sentence) as error:
        read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("table", [[tensor("token_embd.weight", (8,))], [tensor("other.weight", (8, 4))]])
def test_an_embedding_has_two_dimensions(tmp_path, table) -> None:
    path = replace(GOOD, tensors=table).write(tmp_path / "m.gguf")
    with pytest.raises(InputError, match="has no two-dimensional token_embd.weight"):
        gguf_settings(path)


def test_a_type_that_is_no_weight_is_named(tmp_path) -> None:
    words = {
        "context_length": 8, "embedding_length": 8, "feed_forward_length": 8, "block_count": 1,
        "attention.head_count": 2, "attention.head_count_kv": 2,
    }  # fmt: skip
    epsilon = string("llama.attention.layer_norm_rms_epsilon") + u32(6) + struct.pack("<f", 1e-5)
    fields = [*MORE, *(number(f"llama.{name}", value) for name, value in words.items()), epsilon]
    path = replace(GOOD, fields=fields, tensors=[tensor("token_embd.weight", (8, 4), I32)]).write(tmp_path / "m.gguf")
    with pytest.raises(InputError, match="token_embd.weight has the unsupported type I32"):
        gguf_tensors(path)
    rows = [tensor("token_embd.weight", (8, 4), F16), tensor("blk.0.attn_q.weight", (1, 5), F16, offset=64)]
    path = replace(GOOD, fields=fields, tensors=rows).write(tmp_path / "rows.gguf")
    with pytest.raises(InputError, match="blk.0.attn_q.weight has 5 rows, not divisible by 2 heads"):
        gguf_tensors(path)


def test_a_header_is_what_the_library_reads(tmp_path) -> None:
    """For numbers of each type, strings, lists, and tensors of several types and shapes."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64"):
        getattr(writer, f"add_{kind}")(kind, 1.5 if "float" in kind else 101)
    writer.add_bool("yes", True)
    writer.add_array("numbers", [3, -4, 5])
    writer.add_array("texts", ["Ġa", "", "bc"])
    writer.add_array("fractions", [0.5, -1.25])
    writer.add_custom_alignment(64)
    rng = np.random.default_rng(0)
    for name, shape in {"a": (3, 64), "b": (7,), "c": (2, 3, 32)}.items():
        values = rng.normal(size=shape).astype(np.float32)
        for kind in ("F32", "F16", "Q8_0") if shape[-1] % 32 == 0 else ("F32",):
            kind = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"{name}.{kind.name}", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = open_gguf(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    expected = {name: value.contents() for name, value in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.fields == expected and [*ours.fields] == [*expected]
    assert [*ours.tensors] == [entry.name for entry in theirs.tensors]
    for entry in theirs.tensors:
        our_tensor = ours.tensors[entry.name]
        assert our_tensor.kind == entry.tensor_type and our_tensor.shape == tuple(entry.shape.tolist()[::-1])
        assert np.array_equal(our_tensor.data.ravel(), entry.data.view(np.uint8).ravel())
