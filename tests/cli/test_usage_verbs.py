"""``aimage du`` and ``aimage df``: disk usage of names, and what their removal would free."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.gc import Collector
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.oci import Digest, Reference, mediatype
from clowder_aimage.usage import NameUsage, UsageReport, measure_disk_usage, measure_usage
from tests.process import Aimage

BLOB = "application/vnd.example.blob"


class Store:
    """A layout written directly, as another tool may write it."""

    def __init__(self, root: Path) -> None:
        self.entries: list[Any]
        self.root, self.entries = root, []
        (root / "blobs" / "sha256").mkdir(parents=True)
        (root / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        self.save()

    def save(self) -> None:
        index = {"schemaVersion": 2, "manifests": self.entries}
        (self.root / "index.json").write_text(json.dumps(index))

    def blob(self, data: bytes, media_type: str = BLOB) -> dict[Any, Any]:
        digest = Digest.of(data)
        self.path(str(digest)).write_bytes(data)
        return {"mediaType": media_type, "digest": str(digest), "size": len(data)}

    def document(self, value: dict[Any, Any], media_type: str) -> Any:
        raw = json.dumps({"schemaVersion": 2, "mediaType": media_type} | value).encode()
        return self.blob(raw, media_type)

    def manifest(self, config: Any, *layers: Any, **fields: Any) -> Any:
        value = {"config": config, "layers": list(layers)} | fields
        return self.document(value, mediatype.OCI_MANIFEST)

    def name(self, entry: int | dict[str, Any] | None, name: str | None = None) -> None:
        """Tag it; without a name it is only listed in the index."""
        said = {"annotations": {mediatype.REF_NAME: name}} if name else {}
        self.entries.append(entry | said if isinstance(entry, dict) else entry)
        self.save()

    def path(self, digest: str) -> Path:
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    @property
    def layout(self) -> ImageLayout:
        return ImageLayout(self.root)

    @property
    def usage(self) -> UsageReport:
        return measure_usage(self.layout, [self.root])

    def share(self, name: str) -> NameUsage:
        (share,) = [share for share in self.usage.shares if name in share.names]
        return share

    @property
    def sizes(self) -> dict[Any, Any]:
        """Return the sizes of all blobs by digest."""
        paths = (self.root / "blobs" / "sha256").iterdir()
        return {f"sha256:{path.name}": path.stat().st_size for path in paths}

    def collected(self) -> int:
        """Return the bytes that a collection would free now."""
        return Collector(self.layout, grace=0, dry_run=True).run().size


@pytest.fixture
def maker(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def two(stocked: Callable[[], Aimage], tiny: Path) -> Aimage:
    """Return two AImages that share all layers, one of them with two names."""
    here = stocked()
    here("create", "y", tiny, "--license", "mit")
    here("tag", "x", "also")
    return here


def on_disk(here: Aimage) -> Any:
    return sum(path.stat().st_size for path in (here.store / "blobs" / "sha256").iterdir())


def gc_size(here: Aimage) -> Any:
    return here("--json", "gc", "--dry-run", "--grace", "0").value["size"]


def test_each_blob_counts_once_in_the_total(two: Aimage) -> None:
    value = two("--json", "du").value
    assert value["total"]["size"] == value["total"]["freed"] == on_disk(two)
    for row in [*value["manifests"], value["total"]]:
        assert row["size"] == row["unique"] + row["shared"]
    assert value["total"]["unique"] == sum(row["unique"] for row in value["manifests"])
    shared = {row["shared"] for row in value["manifests"]}
    assert shared == {value["total"]["shared"]}  # the layers, which both share


def test_unique_equals_the_bytes_freed_by_rm_and_gc(two: Aimage) -> None:
    (row,) = two("--json", "du", "y").value["manifests"]
    assert 0 < row["unique"] < row["shared"]
    two("rm", "y")
    assert gc_size(two) == row["unique"]


def test_two_names_of_one_manifest_are_one_row(two: Aimage) -> None:
    (row,) = two("--json", "du", "x", "also").value["manifests"]
    assert row["references"] == ["also:latest", "x:latest"]
    two("rm", "x")
    assert gc_size(two) == 0
    two("rm", "also")
    assert gc_size(two) == row["unique"]


def test_several_names_report_what_they_free_together(two: Aimage) -> None:
    total = two("--json", "du", "x", "y").value["total"]
    assert total["freed"] == total["size"] > total["unique"]
    value = two("--json", "du", "x").value
    assert value["total"]["freed"] == value["manifests"][0]["unique"]


def test_du_table(two: Aimage) -> None:
    lines = two("du").out.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "UNIQUE", "SHARED"]
    assert lines[lines.index("  and x:latest") - 1].startswith("also:latest  ")
    assert {line.split()[0] for line in lines[1:]} == {"y:latest", "also:latest", "and", "total"}
    assert lines[-1].startswith("total")
    assert "freed if all of these were removed: " in two("du", "x").out.splitlines()[-1]


def test_rows_are_sorted_by_unique_size(maker: Store) -> None:
    config = maker.blob(b"{}")
    for name, count in (("b", 500), ("c", 1000), ("a", 500)):
        maker.name(maker.manifest(config, maker.blob(name.encode() * count)), name)
    assert [share.names for share in maker.usage.shares] == [("c",), ("a",), ("b",)]


def test_du_of_an_unknown_name_fails(two: Aimage) -> None:
    assert "z:latest not found in the store" in two("du", "x", "z", code=3).err


def test_a_missing_store_is_not_created(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    assert here("--json", "du").value["total"]["size"] == 0
    assert here("du").out.splitlines()[1].split() == ["total", *["0", "B"] * 3]
    (row,) = here("--json", "df").value
    assert (row["names"], row["blobs"], row["size"]) == (0, 0, 0)
    assert row["free"] > 0
    assert not here.store.exists()


def test_a_store_that_is_a_file_fails(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    here.store.write_text("?")
    for verb in ("du", "df"):
        assert "is not a directory" in here(verb, code=1).err


def test_du_and_df_import_no_network_modules(two: Aimage) -> None:
    from tests.cli.test_startup import HEAVY, imported

    for verb in ("du", "df"):
        modules = imported("--store", str(two.store), verb)
        assert "clowder_aimage.usage" in modules
        assert not {module for module in modules if module.partition(".")[0] in HEAVY}


# -- partly pulled


def test_missing_layers_are_reported_and_not_counted(two: Aimage) -> None:
    before = two("--json", "du", "x").value["manifests"][0]
    manifest = json.loads(
        (two.store / "blobs" / "sha256" / before["digest"].partition(":")[2]).read_bytes()
    )
    layers = {layer["digest"]: layer["size"] for layer in manifest["layers"]}
    gone = list(layers)[:3]
    for digest in gone:
        (two.store / "blobs" / "sha256" / digest.removeprefix("sha256:")).unlink()
    bytes_ = sum(layers[digest] for digest in gone)
    value = two("--json", "du").value
    for row in value["manifests"]:  # they share the layers
        assert row["missing"] == {"blobs": 3, "size": bytes_}
    assert value["total"]["size"] == on_disk(two)
    (after,) = two("--json", "du", "x").value["manifests"]
    assert after["size"] == before["size"] - bytes_
    table = two("du").out.splitlines()
    assert table[0].split()[-1] == "MISSING"
    assert "  3 blobs, " in table[1]


def test_a_missing_manifest_or_config_is_reported(maker: Store) -> None:
    config, layer = maker.blob(b"{}" * 50), maker.blob(b"layer")
    maker.name(maker.manifest(config, layer), "x")
    maker.path(config["digest"]).unlink()
    assert (maker.share("x").missing, maker.share("x").missing_size) == (1, 100)
    manifest = maker.entries[0]
    maker.path(manifest["digest"]).unlink()
    share = maker.share("x")
    assert (share.size, share.missing, share.missing_size) == (0, 1, manifest["size"])


def test_a_truncated_blob_counts_with_its_actual_size(maker: Store) -> None:
    layer = maker.blob(b"layer" * 100)
    maker.name(maker.manifest(maker.blob(b"{}"), layer), "x")
    before = maker.share("x").size
    maker.path(layer["digest"]).write_bytes(b"layer")
    assert maker.share("x").size == before - 495


# -- stores of other tools


def test_an_index_includes_the_blobs_of_its_children(maker: Store) -> None:
    config = maker.blob(b"{}")
    here = maker.manifest(config, maker.blob(b"a" * 1000))
    absent = {"mediaType": mediatype.OCI_MANIFEST, "digest": "sha256:" + "b" * 64, "size": 7}
    index = maker.document({"manifests": [here, absent]}, mediatype.OCI_INDEX)
    maker.name(index, "x")
    assert maker.share("x").size == sum(maker.sizes.values())
    assert maker.share("x").missing == 0  # a variant that was never fetched is not missing
    maker.name(here, "y")
    assert maker.share("y").unique == 0
    assert maker.share("x").unique == index["size"]
    maker.path(maker.manifest(config, maker.blob(b"c"))["digest"])
    maker.path(here["digest"]).unlink()
    assert maker.share("x").size == index["size"]


@pytest.mark.parametrize("outer_first", [True, False])
def test_nested_indexes_are_counted_in_any_order(outer_first: bool, maker: Store) -> None:
    """The result does not depend on the order of the indexes, whatever their depth."""
    document = maker.manifest(maker.blob(b"{}"), maker.blob(b"layer" * 99))
    chain = [document]
    for number in range(9):
        value = {"manifests": [chain[-1]] * 30, "n": number}
        chain.append(maker.document(value, mediatype.OCI_INDEX))
    names = list(enumerate(chain))
    for number, document in reversed(names) if outer_first else names:
        maker.name(document, f"n{number}")
    sizes = [document["size"] for document in chain]
    model = 2 + 5 * 99
    for number in range(10):
        assert maker.share(f"n{number}").size == model + sum(sizes[: number + 1])


def test_foreign_entries_are_counted(maker: Store) -> None:
    config = maker.blob(b"{}")
    kinds = ("application/vnd.example.odd", "", mediatype.DOCKER_MANIFEST)
    for number, kind in enumerate(kinds):
        value = {"config": config, "layers": [maker.blob(b"%d" % number * 99)], "n": number}
        maker.name(maker.document(value, kind), f"n{number}")
    for entry in (7, None, {}, {"digest": "x"}, {"annotations": {}, "size": 1}):
        maker.name(entry)
    maker.name(maker.blob(b"no manifest at all " * 9), "text")
    maker.name(maker.blob(b'{"layers": 7, "config": [], "manifests": {"digest": 1}}'), "odd")
    maker.name(maker.blob(b'{"manifests": [7, {"digest": "sha256:x"}, {}], "x": 1}'), "index")
    maker.name(maker.blob(b"[" * 5000), "deep")
    found = maker.usage
    assert found.size == sum(maker.sizes.values()) == measure_disk_usage(maker.layout).size
    assert len(found.shares) == 7
    assert maker.share("text").unique == 19 * 9


def test_entries_without_a_name_are_listed(aimage: Callable[..., Aimage], tmp_path: Path) -> None:
    here = aimage()
    maker = Store(here.store)
    config = maker.blob(b"{}")
    one, other = (maker.manifest(config, maker.blob(data * 99)) for data in (b"a", b"b"))
    maker.name(one)
    maker.name(other)
    maker.name(other, "named\nin two lines")
    lines = here("du").out.splitlines()
    assert f"(no name) {one['digest'][7:19]}" in lines[1] + lines[2] + lines[3]
    assert any(line.startswith("named in two lines ") for line in lines)
    value = {row["digest"]: row for row in here("--json", "du").value["manifests"]}
    assert (value[one["digest"]]["references"], value[one["digest"]]["unnamed"]) == ([], True)
    assert value[other["digest"]]["references"] == ["named\nin two lines"]
    assert value[other["digest"]]["unnamed"]  # ``rm`` alone frees nothing
    assert here("--json", "df").value[0]["names"] == 1


def test_a_compressed_layer_and_its_decompressed_blob_are_counted(maker: Store) -> None:
    """The config references both, and a collection keeps both."""
    plain = maker.blob(b"plain" * 99)
    config = maker.blob(json.dumps({"rootfs": {"diff_ids": [plain["digest"]]}}).encode())
    maker.name(maker.manifest(config, maker.blob(b"compressed")), "x")
    assert maker.share("x").size == sum(maker.sizes.values())


def scramble(maker: Store, seed: int) -> None:
    """Store documents that reference each other at random; return the names of some."""
    draw = random.Random(seed)
    known = [maker.blob(b"%d" % number * draw.randrange(1, 99)) for number in range(25)]
    documents = []
    for number in range(25):
        some = draw.sample(known, draw.randrange(6))
        kind = draw.choice(["manifest", "index", "mention", "escaped", "config"])
        absent = {"mediaType": BLOB, "digest": "sha256:" + f"{number:02}" * 32, "size": 5}
        value = {"n": number, "layers": [*some, absent], "config": draw.choice(known)}
        if kind == "index":
            value = {"n": number, "manifests": [*some, absent, *draw.sample(known, 2)]}
        if kind == "mention":
            value = {"n": number, "annotations": {"base": draw.choice(known)["digest"]}}
        if kind == "config":
            ids = [one["digest"] for one in some]
            value |= {"config": maker.blob(json.dumps({"n": number, "ids": ids}).encode())}
        raw = json.dumps(value).encode()
        if kind == "escaped":
            raw = json.dumps(value | {"config": known[0]}).encode()
            raw = raw.replace(b"sha256", b"sh\\u0061256")
        documents.append(maker.blob(raw, mediatype.OCI_MANIFEST))
        known.append(documents[-1])
    for number, document in enumerate(draw.sample(documents, 10)):
        for name in draw.choice([[f"n{number}"], [f"n{number}"], ["", f"n{number}"], ["x", "y"]]):
            maker.name(document, name and f"{name}-{number}")


@pytest.mark.parametrize("seed", range(4))
def test_unique_equals_the_bytes_freed_by_collect(seed: int, maker: Store) -> None:
    """``unique`` is freed when all entries of a manifest are removed, whatever they reference."""
    scramble(maker, seed)
    found, entries, before = maker.usage, maker.entries, maker.collected()
    filled = measure_disk_usage(maker.layout)
    assert filled.unneeded_size == before
    assert filled.size == found.size + before
    assert (filled.blobs, filled.names) == (len(maker.sizes), sum(map(len, names_of(found))))
    assert any(share.unique for share in found.shares)
    for share in found.shares:
        maker.entries = [entry for entry in entries if entry["digest"] != str(share.digest)]
        maker.save()
        assert maker.collected() - before == share.unique, share
    together = [share.digest for share in found.shares[:4]]
    maker.entries = entries
    maker.save()
    freed = measure_usage(maker.layout, [maker.root], together).freed
    maker.entries = [entry for entry in entries if Digest.parse(entry["digest"]) not in together]
    maker.save()
    assert maker.collected() - before == freed


def names_of(found: UsageReport) -> list[Any]:
    return [[name for name in share.names if name] for share in found.shares]


# -- the store as a whole


def test_df_reports_the_usage_of_a_store(two: Aimage) -> None:
    (row,) = two("--json", "df").value
    files = list((two.store / "blobs" / "sha256").iterdir())
    assert row["store"] == str(two.store)
    assert (row["names"], row["blobs"], row["size"]) == (3, len(files), on_disk(two))
    assert row["allocated"] == sum(path.stat().st_blocks * 512 for path in files)
    assert row["unneeded"] == {"blobs": 0, "size": 0}
    (unique,) = {r["unique"] for r in two("--json", "du", "y").value["manifests"]}
    two("rm", "y")
    (row,) = two("--json", "df").value
    assert row["unneeded"] == {"blobs": 2, "size": unique}
    text = two("df").out.splitlines()
    assert text[0] == f"store       {two.store}"
    assert text[4].startswith("unneeded    2 blobs, ")


def test_a_sparse_blob_allocates_less_than_its_size(maker: Store) -> None:
    path = maker.path("sha256:" + "c" * 64)
    with path.open("wb") as file:
        file.truncate(1 << 30)
    found = measure_disk_usage(maker.layout)
    assert found.size == found.unneeded_size == 1 << 30
    assert found.allocated == path.stat().st_blocks * 512 < 1 << 20


def test_df_reports_unfinished_downloads(maker: Store) -> None:
    ingest = maker.root / ".aimage" / "ingest"
    ingest.mkdir(parents=True)
    with (ingest / ("d" * 64)).open("wb") as file:
        file.truncate(1 << 30)
        file.write(b"x" * 100_000)
        file.flush()
        os.fsync(file.fileno())
        taken = os.fstat(file.fileno()).st_blocks * 512
    (ingest / ("d" * 64 + ".journal")).write_text("\n0-100000\n")
    found = measure_disk_usage(maker.layout)
    assert (found.partials, found.partial_size) == (1, taken)
    assert 100_000 <= taken < 1 << 20


def test_files_that_are_not_blobs_are_not_counted(maker: Store) -> None:
    blobs = maker.root / "blobs"
    maker.blob(b"one")
    (blobs / "sha256" / "notes.txt").write_text("x")
    (blobs / "sha256" / os.fsdecode(b"\xff")).write_text("x")
    (blobs / "sha256" / ("e" * 64)).symlink_to(blobs / "sha256" / "notes.txt")
    (blobs / "sha256" / ("f" * 64)).mkdir()
    (blobs / "md5").mkdir()
    (blobs / "md5" / ("f" * 32)).write_text("x")
    assert (measure_disk_usage(maker.layout).blobs, measure_disk_usage(maker.layout).size) == (1, 3)


def test_df_lists_several_stores(aimage: Callable[..., Aimage], tiny: Path, tmp_path: Path) -> None:
    first, second = aimage("first"), aimage("second")
    second("create", "x", tiny)
    first("create", "y", tiny, "--license", "mit")
    both = aimage("first")
    both.environment["AIMAGE_STORE"] = f"{first.store}{os.pathsep}{second.store}"
    rows = both("--json", "df").value
    assert [row["store"] for row in rows] == [str(first.store), str(second.store)]
    assert [row["names"] for row in rows] == [1, 1]
    value = both("--json", "du").value
    assert sorted(row["references"][0] for row in value["manifests"]) == ["x:latest", "y:latest"]
    assert len({row["shared"] for row in value["manifests"]}) == 1
    layout = LayeredStore([first.store, second.store])
    assert measure_usage(layout, [first.store, second.store]).size == value["total"]["size"]
    assert value["total"]["size"] < on_disk(first) + on_disk(second)  # one of two copies


# -- cost


def test_each_document_is_read_once(maker: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    config = maker.blob(b"{}")
    for number in range(20):
        manifest = maker.manifest(config, maker.blob(b"%d" % number))
        maker.name(manifest, f"a{number}")
        maker.name(manifest, f"b{number}")
        maker.name(maker.document({"manifests": [manifest]}, mediatype.OCI_INDEX), f"c{number}")
    names = record_reads(monkeypatch)
    assert len(maker.usage.shares) == 40
    documents = [name for name in names if name != config["digest"].removeprefix("sha256:")]
    assert len(documents) == len(set(documents)) == 40
    assert len(names) == 41


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the blobs that are read from now on."""
    names, real = list[str](), OpenDirectory.read

    def record(self: OpenDirectory, name: str, limit: int) -> bytes:
        names.append(name)
        return real(self, name, limit)

    monkeypatch.setattr(OpenDirectory, "read", record)
    return names


@pytest.fixture
def forty(maker: Store) -> Store:
    """Return a store of forty manifests with one config and a shared layer."""
    config, shared = maker.blob(b"{}"), maker.blob(b"shared")
    for number in range(40):
        maker.name(maker.manifest(config, shared, maker.blob(b"own %d" % number)), f"n{number}")
    return maker


def test_documents_of_many_manifests_are_not_read_again(
    forty: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, filled = forty.usage, measure_disk_usage(forty.layout)
    names = record_reads(monkeypatch)
    assert forty.usage == first
    assert measure_disk_usage(forty.layout).unneeded_size == filled.unneeded_size == 0
    assert names == []
    forty.name(forty.manifest(forty.blob(b"{}"), forty.blob(b"another")), "another")
    assert forty.share("another").unique > 0
    assert len(names) == 2


def test_what_changes_after_needs_were_kept_counts(forty: Store) -> None:
    before = {share.names: share for share in forty.usage.shares}
    own = [f"sha256:{Digest.of(b'own %d' % number).encoded}" for number in range(3)]
    forty.path(own[0]).unlink()
    forty.path(own[1]).write_bytes(b"own 1, longer")
    forty.path(forty.entries[2]["digest"]).unlink()
    after = {share.names: share for share in forty.usage.shares}
    assert (after["n0",].missing, after["n0",].missing_size) == (1, 5)
    assert after["n0",].size == before["n0",].size - 5
    assert after["n1",].unique == before["n1",].unique + 8
    assert (after["n2",].size, after["n2",].missing) == (0, 1)
    assert after["n3",] == before["n3",]


def test_a_damaged_manifest_is_scanned_again_once_it_is_repaired(forty: Store) -> None:
    path = forty.path(forty.entries[0]["digest"])
    raw = path.read_bytes()
    path.write_bytes(raw[:100])
    assert forty.share("n0").size == 100
    path.write_bytes(raw)
    assert forty.share("n0").size == len(raw) + 2 + 6 + 5


@pytest.mark.slow
def test_du_of_a_thousand_aimages_with_1200_layers(aimage: Callable[..., Aimage]) -> None:
    """90 % of the layers are shared: 120,000 blobs, 400 MB of manifests."""
    here = aimage()
    maker = Store(here.store)
    shared = [maker.blob(b"shared %d" % number) for number in range(1080)]
    entries = []
    for number in range(1000):
        own = [maker.blob(b"own %d of %d" % (layer, number)) for layer in range(120)]
        layers = [
            layer
            | {"annotations": {mediatype.NAME: f"transformer/layers.{i}.attention.to_q.weight"}}
            for i, layer in enumerate(shared + own)
        ]
        config = maker.blob(b'{"n":%d}' % number)
        entry = maker.manifest(config, *layers)
        entries.append(entry | {"annotations": {mediatype.REF_NAME: f"team/m{number}:v1"}})
    maker.entries = entries
    maker.save()
    value = here("--json", "du").value
    assert len(value["manifests"]) == 1000
    assert value["total"]["blobs"] == 1080 + 1000 * 122
    assert Reference.parse(value["manifests"][0]["references"][0]).repository.startswith("team/")


def test_other_files_beside_the_blobs_do_not_matter(maker: Store) -> None:
    maker.name(maker.manifest(maker.blob(b"{}"), maker.blob(b"one")), "a")
    before = maker.usage
    blobs = maker.root / "blobs"
    (blobs / "sha1").write_bytes(b"a file")
    (blobs / "sha256.old").mkdir()
    (blobs / "sha256" / "README").write_bytes(b"no digest")
    (blobs / "sha256" / ("a" * 63)).write_bytes(b"short")
    assert maker.usage == before
    assert measure_disk_usage(maker.layout).blobs == before.blobs == 3
