"""GGUF files: extracted metadata and refusals, compared with the reference reader."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import ContentError, FormatError, ModelError, UsageError
from clowder_aimage.formats.detection import detect
from clowder_aimage.formats.gguf import take
from clowder_aimage.formats.gguf_header import read_header
from clowder_aimage.oci.mediatype import AIMAGE_GGUF, AIMAGE_LORA
from tests.importer import formats_gguf as made
from tests.importer.formats_gguf import ARRAY, BOOL, FLOAT32, LLAMA, STRING, UINT32, WEIGHTS, gguf
from tests.importer.formats_mutate import cuts, memory_of, mutants, survives

PARAMETERS = 256 * 3 + 5 + 32 * 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def refused(path: Path, raw: bytes, *said: str, kind: type[ContentError] = FormatError) -> Any:
    path.write_bytes(raw)
    with pytest.raises(kind) as caught:
        take(path)
    for word in (path.name, *said):
        assert word in caught.value.message
    return caught.value


def without(key: str) -> list[made.Pair]:
    return [pair for pair in LLAMA if pair[0] != key]


# -- one file


def test_metadata_of_a_file_are_read(path: Path) -> None:
    path.write_bytes(gguf())
    taken = take(path)
    assert taken.facts == {
        "format": "gguf",
        "architecture": "llama",
        "name": "Small Llama",
        "parameters": PARAMETERS,
        "quantization": "Q4_K_M",
        "context": 4096,
    }
    assert taken.license == "apache-2.0"
    (file,) = taken.files
    assert (file.name, file.path, file.media_type) == ("model.gguf", path, AIMAGE_GGUF)
    assert file.size == path.stat().st_size
    assert file.modified == path.stat().st_mtime_ns


@pytest.mark.parametrize(("version", "alignment"), [(2, 8), (3, 4096)])
def test_supported_versions_and_alignments_are_read(
    path: Path, version: int, alignment: int
) -> None:
    path.write_bytes(gguf(version=version, alignment=alignment))
    assert take(path).facts["parameters"] == PARAMETERS


@pytest.mark.parametrize(
    ("said", "known"), [(18, "Q6_K"), (38, "MXFP4_MOE"), (1024 + 15, "Q4_K_M")]
)
def test_the_file_type_is_named(path: Path, said: int, known: str) -> None:
    path.write_bytes(gguf([*without("general.file_type"), ("general.file_type", UINT32, said)]))
    assert take(path).facts["quantization"] == known


@pytest.mark.parametrize("said", [None, 1024])
def test_an_unknown_file_type_is_derived_from_most_elements(path: Path, said: int | None) -> None:
    pairs = without("general.file_type")
    if said is not None:
        pairs.append(("general.file_type", UINT32, said))
    path.write_bytes(gguf(pairs))
    assert take(path).facts["quantization"] == "Q4_K"


def test_missing_or_unprintable_metadata_are_omitted(path: Path) -> None:
    path.write_bytes(gguf([("general.name", STRING, "a\x1b[31mb"), ("x.y", UINT32, 1)], []))
    assert take(path).facts == {"format": "gguf"}
    path.write_bytes(gguf([("general.name", STRING, "n" * 5000)], []))
    assert take(path).facts == {"format": "gguf"}


def test_nested_lists_are_skipped(path: Path) -> None:
    nested = (ARRAY, [(STRING, ["a", "b"]), (UINT32, [1, 2, 3]), (ARRAY, [(BOOL, [1])])])
    path.write_bytes(gguf([("a.b", ARRAY, nested), *LLAMA]))
    assert take(path).facts["parameters"] == PARAMETERS


def test_a_named_link_is_followed(tmp_path: Path, path: Path) -> None:
    elsewhere = tmp_path / "blobs"
    elsewhere.mkdir()
    (elsewhere / "sha256-abc").write_bytes(gguf())
    path.symlink_to(elsewhere / "sha256-abc")
    assert take(path).files[0].name == "model.gguf"


# -- adapters and projectors


def test_an_adapter_is_recognised(path: Path) -> None:
    path.write_bytes(gguf(made.ADAPTER, made.LORA))
    taken = take(path)
    assert taken.facts["adapter"] == {
        "type": "lora",
        "rank": 4,
        "alpha": 16,
        "targets": ["attn_q", "ffn_up"],
        "base": "Llama 2 7B",
    }
    assert taken.files[0].media_type == AIMAGE_LORA


def test_an_adapter_of_another_kind_is_refused(path: Path) -> None:
    pairs = [("adapter.type", STRING, "x") if p[0] == "adapter.type" else p for p in made.ADAPTER]
    refused(path, gguf(pairs, made.LORA), "'x'", kind=ModelError)


def test_an_adapter_with_an_invalid_alpha_is_refused(path: Path) -> None:
    pairs = [p for p in made.ADAPTER if p[0] != "adapter.lora.alpha"]
    for alpha in (float("nan"), float("inf")):
        bad = [*pairs, ("adapter.lora.alpha", FLOAT32, alpha)]
        refused(path, gguf(bad, made.LORA), "alpha")
    refused(path, gguf([*pairs, ("adapter.lora.alpha", STRING, "16")], made.LORA), "alpha")


def test_a_projector_is_packed_with_its_model(tmp_path: Path) -> None:
    projector = [("general.type", STRING, "mmproj"), ("general.architecture", STRING, "clip")]
    (tmp_path / "model.gguf").write_bytes(gguf())
    (tmp_path / "mmproj.gguf").write_bytes(gguf(projector, [("v.weight", 1, (4, 4))]))
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    taken = take(tmp_path)
    assert [file.name for file in taken.files] == ["mmproj.gguf", "model.gguf"]
    assert {file.media_type for file in taken.files} == {AIMAGE_GGUF}
    assert taken.facts["architecture"] == "llama"
    assert taken.facts["parameters"] == PARAMETERS + 16
    assert taken.license == "apache-2.0"
    (tmp_path / "model.gguf").unlink()
    alone = take(tmp_path)
    assert (alone.facts["architecture"], alone.license) == ("clip", "mit")


def test_two_models_in_a_directory_are_refused(tmp_path: Path) -> None:
    for name in ("a-Q4.gguf", "a-Q8.gguf"):
        (tmp_path / name).write_bytes(gguf())
    with pytest.raises(UsageError, match=r"a-Q4\.gguf, a-Q8\.gguf") as caught:
        take(tmp_path)
    assert caught.value.hint


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no GGUF file"):
        take(tmp_path)


def test_links_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc" / "Q4_K_M"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, raw in enumerate(made.split(2), 1):
        (blobs / str(number)).write_bytes(raw)
        (snapshot / f"m-{number:05}-of-00002.gguf").symlink_to(blobs / str(number))
    for path in (snapshot, snapshot / "m-00002-of-00002.gguf"):
        assert detect(path) == "gguf"
        assert take(path).facts["parameters"] == PARAMETERS


# -- split models


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    paths = []
    for number, raw in enumerate(made.split(3), 1):
        paths.append(tmp_path / f"m-{number:05}-of-00003.gguf")
        paths[-1].write_bytes(raw)
    return paths


@pytest.mark.parametrize("number", [1, None])
def test_a_split_model_is_complete_from_any_part(parts: list[Path], number: int | None) -> None:
    taken = take(parts[0].parent if number is None else parts[number])
    assert [file.name for file in taken.files] == [part.name for part in parts]
    assert taken.facts["name"] == "Small Llama"
    assert taken.facts["parameters"] == PARAMETERS


def test_missing_parts_are_reported(parts: list[Path]) -> None:
    parts[0].unlink()
    parts[2].unlink()
    with pytest.raises(FormatError) as caught:
        take(parts[1])
    assert f"{parts[0].name}, {parts[2].name}" in caught.value.message


def test_parts_in_another_order_are_refused(parts: list[Path]) -> None:
    first, second = parts[1].read_bytes(), parts[2].read_bytes()
    parts[1].write_bytes(second)
    parts[2].write_bytes(first)
    with pytest.raises(FormatError, match=r"part 2 \(from 0\) of 3, its name part 1"):
        take(parts[0])


def test_a_part_under_another_name_is_refused(parts: list[Path], path: Path) -> None:
    refused(path, parts[1].read_bytes(), "of 3", "of 1")


def test_a_whole_model_named_like_a_part_is_refused(parts: list[Path]) -> None:
    parts[1].write_bytes(gguf())
    with pytest.raises(FormatError, match="of 1, its name part 1 of 3"):
        take(parts[0])


def test_parts_with_a_wrong_tensor_count_are_refused(parts: list[Path]) -> None:
    said = [("split.no", 2, 2), ("split.count", 2, 3), ("split.tensors.count", 5, 3)]
    parts[2].write_bytes(gguf(said, []))
    with pytest.raises(FormatError, match="count is 3, the parts contain 2"):
        take(parts[0])
    parts[2].write_bytes(gguf(said, WEIGHTS[:1]))
    with pytest.raises(FormatError, match="duplicate tensor"):
        take(parts[0])


def test_a_part_linked_to_another_directory_is_refused(parts: list[Path], tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside.gguf"
    parts[1].rename(outside)
    parts[1].symlink_to(outside)
    with pytest.raises(ModelError, match="outside the model directory"):
        take(parts[0])


def test_an_invalid_part_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m-00004-of-00003.gguf"
    refused(path, gguf(), "part number 4 of 3", kind=ModelError)


# -- invalid files


def test_files_that_are_not_gguf_are_refused(path: Path) -> None:
    refused(path, b"PK\x03\x04" + bytes(100), "not a GGUF file")
    refused(path, b"", "truncated")
    refused(path, b"tjgg\1\0\0\0" + bytes(100), "GGML")
    refused(path, b"version https://git-lfs.github.com/spec/v1\n", "Git LFS", kind=ModelError)


def test_big_endian_files_are_reported(path: Path) -> None:
    raw = b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
    error = refused(path, raw, "big-endian")
    assert error.hint == "convert it with gguf-convert-endian"
    refused(path, b"FUGG" + struct.pack(">IQQ", 3, 0, 0), "big-endian")


@pytest.mark.parametrize("version", [1, 4])
def test_unknown_versions_are_refused(path: Path, version: int) -> None:
    refused(path, gguf(version=version), "at byte 4", f"version {version}")


def test_missing_files_and_dangling_links_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        take(path)
    path.symlink_to(tmp_path / "nothing")
    with pytest.raises(ModelError, match="broken link"):
        take(path)


HEAD = b"GGUF" + struct.pack("<I", 3)
END = 2**64 - 1


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (HEAD + struct.pack("<QQ", 2**20, 0), "tensors do not fit in"),
        (HEAD + struct.pack("<QQ", 0, END), "metadata"),
        (HEAD + struct.pack("<QQQ", 0, 1, END) + bytes(20), "a key has"),
        (HEAD + struct.pack("<QQQ", 0, 1, 60_000) + bytes(20), "takes 60000 bytes"),
    ],
)
def test_counts_and_lengths_beyond_the_file_are_refused(path: Path, raw: bytes, said: str) -> None:
    refused(path, raw, said, "at byte")


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (("a", 13, b""), "unknown type: 13"),
        (("a", BOOL, 2), "not true or false"),
        (("general.alignment", UINT32, 24), "alignment"),
        (("general.alignment", UINT32, 4), "alignment"),
        (("general.alignment", STRING, "32"), "alignment"),
        (("general.url", STRING, b"\xff"), "general.url is not UTF-8"),
        (("llama.context_length", UINT32, 1), "duplicate key"),
        (("größe", UINT32, 1), "invalid or duplicate key"),
        (("a", ARRAY, (13, [])), "unknown type: 13"),
    ],
)
def test_invalid_metadata_are_refused(
    path: Path, pair: tuple[str, int, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(made._CODES, 13, "0s")
    refused(path, gguf([*LLAMA, pair]), said)


def test_lists_too_deep_or_too_long_are_refused(path: Path) -> None:
    deep: Any = (UINT32, [1])
    for _ in range(6):
        deep = (ARRAY, [deep])
    refused(path, gguf([("a", ARRAY, deep)]), "nested more than")
    raw = HEAD + struct.pack("<QQ", 0, 1) + made.text("a") + struct.pack("<I", ARRAY)
    for kind in (STRING, ARRAY, UINT32):
        for count in (END, 2**40, 3_000_000):
            refused(path, raw + struct.pack("<IQ", kind, count) + bytes(50), "do not fit in")


def test_many_empty_strings_are_refused_early(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clowder_aimage.formats.gguf_header.MAX_ITEMS", 1000)
    refused(path, gguf([("a", ARRAY, (STRING, [""] * 1001))]), "do not fit in")
    twice = [("a", ARRAY, (STRING, [""] * 600)), ("b", ARRAY, (STRING, [""] * 600))]
    refused(path, gguf(twice), "more than 1000 items")


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (("n" * 128, 0, (1,)), "has 128 bytes"),
        (("", 0, (1,)), "empty tensor name"),
        (("output.weight", 0, (1,)), "duplicate or empty"),
        (("t", 0, (1, 1, 1, 1, 1)), "5 dimensions"),
        (("t", 2, (33,)), "not whole blocks of Q4_0"),
    ],
)
def test_invalid_tensors_are_refused(
    path: Path, tensor: tuple[str, int, tuple[int, ...]], said: str
) -> None:
    refused(path, gguf(tensors=[*WEIGHTS, tensor]), said)


@pytest.mark.parametrize("kind", [4, 43])
def test_unknown_types_of_tensors_are_refused(path: Path, kind: int) -> None:
    raw = HEAD + struct.pack("<QQ", 1, 0) + made.info_of(("t", kind, (32,)), 0) + bytes(99)
    refused(path, raw, f": {kind}", "removed" if kind < 43 else "unknown type")


@pytest.mark.parametrize(
    ("offset", "shape", "said"),
    [(1, (4,), "multiple of 32"), (64, (4,), "ends at byte"), (0, (2**62, 4), "ends at byte")],
)
def test_tensors_outside_of_the_file_are_refused(
    path: Path, offset: int, shape: tuple[int, ...], said: str
) -> None:
    raw = HEAD + struct.pack("<QQ", 1, 0) + made.info_of(("t", 0, shape), offset)
    refused(path, made.padded(raw, 32) + bytes(32), said)


def test_overlapping_tensors_are_refused(path: Path) -> None:
    raw = HEAD + struct.pack("<QQ", 2, 0)
    raw += made.info_of(("a", 0, (9,)), 0) + made.info_of(("b", 0, (1,)), 32)
    refused(path, made.padded(raw, 32) + bytes(64), "b overlaps another")


def test_a_scalar_without_dimensions_is_one_element(path: Path) -> None:
    path.write_bytes(gguf(tensors=[("t", 0, ())]))
    assert take(path).facts["parameters"] == 1


def test_a_missing_last_byte_is_refused(path: Path) -> None:
    raw = gguf()
    padding = -made.size_of(WEIGHTS[-1]) % 32
    path.write_bytes(raw[:-padding])
    assert take(path).facts["parameters"] == PARAMETERS
    refused(path, raw[: -padding - 1], "output.weight ends at byte")


# -- arbitrary bytes


def test_a_truncated_file_is_refused_wherever_it_ends(path: Path) -> None:
    raw = gguf()
    took, refused = survives(take, path, cuts(raw[: -(-made.size_of(WEIGHTS[-1]) % 32)]))
    assert (took, refused > 100) == (0, True)


@pytest.mark.integration
def test_damaged_files_are_refused_with_a_message(path: Path) -> None:
    took, refused = survives(take, path, mutants(gguf(), 3000))
    assert took > 100
    assert refused > 1000


def test_damaged_adapters_are_refused_with_a_message(path: Path) -> None:
    took, refused = survives(take, path, mutants(gguf(made.ADAPTER, made.LORA), 400))
    assert took > 20
    assert refused > 100


def test_a_false_length_costs_no_memory(path: Path) -> None:
    raw = HEAD + struct.pack("<QQ", 0, 1) + made.text("general.name") + struct.pack("<I", STRING)
    with path.open("wb") as file:
        file.write(raw + struct.pack("<Q", 2**31))
        file.truncate(2**31)
    assert memory_of(take, path) < 1 << 20


# -- the reference reader


def read_by_gguf(path: Path) -> dict[str, Any]:
    reader = pytest.importorskip("gguf").GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {
        tensor.name: (
            tensor.tensor_type.name,
            tuple(map(int, tensor.shape)),
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )
        for tensor in reader.tensors
    }
    return {"fields": fields, "tensors": tensors}


def read_by_us(path: Path) -> Any:
    with path.open("rb") as file:
        return read_header(file, path.stat().st_size)


def compare(path: Path) -> None:
    theirs, ours = read_by_gguf(path), read_by_us(path)
    assert theirs["tensors"] == {
        tensor.name: (tensor.type, tensor.shape, tensor.offset, tensor.nbytes)
        for tensor in ours.tensors
    }
    for key, value in ours.metadata.items():
        assert theirs["fields"][key] == value
    assert ours.version == theirs["fields"]["GGUF.version"]


@pytest.mark.parametrize("alignment", [8, 256])
def test_the_gguf_package_reads_the_same_of_our_files(path: Path, alignment: int) -> None:
    path.write_bytes(gguf(alignment=alignment))
    compare(path)


def test_files_of_the_gguf_package_are_read(path: Path) -> None:
    np = pytest.importorskip("numpy")
    package = pytest.importorskip("gguf")
    writer = package.GGUFWriter(path, "qwen3")
    writer.add_name("Real Model")
    writer.add_license("mit")
    writer.add_context_length(32768)
    writer.add_file_type(package.LlamaFileType.MOSTLY_Q8_0)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_array("x.y", [1, 2, 3])
    rng = np.random.default_rng(7)
    weights = rng.standard_normal((4, 64)).astype(np.float32)
    for kind in ("Q8_0", "Q4_0", "Q5_1", "BF16", "F16"):
        quantized = package.quants.quantize(weights, package.GGMLQuantizationType[kind])
        raw_dtype = None if kind == "F16" else package.GGMLQuantizationType[kind]
        writer.add_tensor(f"blk.0.{kind}.weight", quantized, raw_dtype=raw_dtype)
    writer.add_tensor("norm.weight", np.ones(7, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    compare(path)
    taken = take(path)
    assert taken.license == "mit"
    assert taken.facts == {
        "format": "gguf",
        "architecture": "qwen3",
        "name": "Real Model",
        "parameters": 5 * 256 + 7,
        "quantization": "Q8_0",
        "context": 32768,
    }


def test_parts_split_by_the_gguf_package_are_read(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    package = pytest.importorskip("gguf")
    writer = package.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    for number in range(5):
        writer.add_tensor(f"blk.{number}.weight", np.zeros((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    taken = take(tmp_path)
    assert [file.name for file in taken.files] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert taken.facts["parameters"] == 30


def test_type_sizes_match_the_gguf_package() -> None:
    package = pytest.importorskip("gguf")
    from clowder_aimage.formats.gguf import FILES
    from clowder_aimage.formats.gguf_header import TENSORS

    for kind, (block, size) in package.GGML_QUANT_SIZES.items():
        assert TENSORS[int(kind)] == (kind.name, block, size)
    for kind in package.LlamaFileType:
        if kind.name != "GUESSED":
            assert FILES[int(kind)] == kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")
