"""A catalog that reads what changed has the names of one that reads everything."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.distribution.catalog import Catalog
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.index import edit_index
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.oci import Digest, Reference, mediatype

DIGESTS = [Digest.of(bytes([number])) for number in range(5)]
NAMES = ["a/b:v1", "a/b:v2", "a/b", "a/b:latest", f"a/b@{DIGESTS[0]}", "base/c:v1", "base/a/b:v1"]
FOREIGN = ["Not A Name", "", 7]


def random_entry(rng: random.Random) -> Any:
    media_type = rng.choice([mediatype.OCI_MANIFEST, mediatype.OCI_INDEX])
    name = rng.choice([*NAMES, *NAMES, *FOREIGN])
    value: dict[str, Any] = {
        "mediaType": media_type,
        "digest": str(rng.choice(DIGESTS)),
        "size": 3,
        "annotations": {mediatype.REF_NAME: name},
    }
    return rng.choice([value, value, value, value, value, value | {"size": "x"}, None])


def change(rng: random.Random, root: Path) -> None:
    kind = rng.randrange(6)
    if kind == 0:
        (root / "index.json").write_text(
            json.dumps({"manifests": [random_entry(rng) for _ in range(rng.randrange(5))]})
        )
        return
    with edit_index(root) as index:
        entries = index["manifests"]
        position = rng.randrange(len(entries) + 1)
        if kind < 4:
            entries[position : position + rng.randrange(2)] = [random_entry(rng)]
        elif len(entries) > 2 or kind == 4:
            del entries[position:]


def describe(catalog: Catalog) -> Any:
    references = [
        *(
            Reference(None, name, tag)
            for name in ("a/b", "c", "base/c")
            for tag in ("v1", "latest")
        ),
        *(Reference(None, "a/b", None, digest) for digest in DIGESTS),
    ]
    repositories = sorted(catalog.list_repositories())
    return (
        repositories,
        [sorted(map(str, catalog.list_entries(name))) for name in repositories],
        [[str(entry.name) for entry in catalog.find_entries(each)] for each in references[:6]],
        [catalog.find(each) for each in references[:6]],
        [sorted(entry.name for entry in catalog.find_entries(each)) for each in references[6:]],
        [catalog.find(each) is not None for each in references[6:]],
    )


@pytest.mark.parametrize("seed", range(6))
def test_changes_lead_to_the_same_names_as_the_whole(tmp_path: Path, seed: int) -> None:
    rng, roots = random.Random(seed), [tmp_path / "first", tmp_path / "second"]
    for root in roots:
        root.mkdir()
    stores: Sequence[ImageLayout] = [ImageLayout(roots[0]), LayeredStore(roots)]
    bases = ("", "base") if seed % 2 else ("",)
    catalogs = [(store, base, Catalog(store, base)) for store in stores for base in bases]
    for _ in range(12):
        change(rng, rng.choice(roots))
        for store, base, catalog in catalogs:
            assert describe(catalog) == describe(Catalog(store, base))


def test_only_changed_names_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    value = {"mediaType": mediatype.OCI_MANIFEST, "digest": str(DIGESTS[0]), "size": 3}
    with edit_index(root) as index:
        for number in range(200):
            annotations = {mediatype.REF_NAME: f"a/b:v{number}"}
            index["manifests"].append(value | {"annotations": annotations})
    catalog, parsed = Catalog(ImageLayout(root)), list[str]()
    assert len(catalog.list_entries("a/b")) == 200
    parse = Reference.parse

    def record(text: str) -> Reference:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(Reference, "parse", record)
    for number in (0, 77, 199):
        with edit_index(root, [f"a/b:v{number}"]) as index:
            index["manifests"][0] = index["manifests"][0] | {"size": 5}
        del parsed[:]
        found = catalog.find(Reference(None, "a/b", f"v{number}"))
        assert found is not None
        assert found.size == 5
        assert len(parsed) <= 4
    del parsed[:]
    catalog.find(Reference(None, "a/b", "v3"))
    assert parsed == []
