"""Signatures travel with what they sign, also by other tools, and cost few requests."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.oci.manifest import encode
from clowder_aimage.registry import ClientOptions, Repository
from tests.process import run
from tests.trust.key_files import write_key


def test_a_copy_asks_few_times_for_signatures(pushed: Any, registry: Any, repository: str) -> None:
    def count(*words: str) -> dict[str, int]:
        mark = registry.mark()
        pushed("copy", *words, "-q")
        return {key: n for key, n in registry.count(mark, repository).items() if "GET" in key}

    # The list of referrers, here with the tag that replaces it, and the tag of older signatures
    assert count(pushed.name, f"{repository}-copy:v1") == {"GET manifest": 3, "GET referrer": 1}
    # One repository has them.
    assert count(pushed.name, f"{repository}:v2") == {"GET manifest": 1}
    # The list of tags shows that there are none of the two.
    mark = registry.mark()
    pushed("copy", "-a", repository, f"{repository}-all", "-q")
    counts = registry.count(mark, repository)
    assert (counts["GET manifest"], counts["GET referrer"]) == (2, 1)


@pytest.mark.parametrize("form", ["bundle", "cosign-tag", "oms"])
def test_signatures_travel_with_all_tags_and_all_manifests(
    pushed: Any, repository: str, tmp_path: Path, form: str
) -> None:
    private, public = write_key(tmp_path, "signer")
    child = ImageLayout(pushed.store).resolve(Reference.parse(pushed.name))
    index = push_index(repository, child, tmp_path)
    pushed("sign", f"{repository}@{child.digest}", "--key", private, "--as", form, "-q")
    if form != "oms":
        # The index alone, as cosign signs it; its manifest is signed by its own digest.
        pushed("sign", f"{repository}:all", "--key", private, "--as", form, "-q")
    pushed("copy", "-a", repository, f"{repository}-all", "-q")
    pushed("copy", f"{repository}:all", f"{repository}-one:all", "-q")
    for copied in (f"{repository}-all", f"{repository}-one"):
        for target in (child.digest, *((index.digest,) if form != "oms" else ())):
            name = f"{copied}@{target}"
            pushed("verify", name, "--signature", "--key", public, "--form", form)


def push_index(repository: str, child: Descriptor, directory: Path) -> Descriptor:
    """Push an index of one manifest as ``all``."""
    raw = encode(
        {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": [child.to_json()]}
    )
    content = Descriptor.of(mediatype.OCI_INDEX, raw)
    name = Reference.parse(f"{repository}:all")
    with Repository(name, ClientOptions(docker_config=directory)) as opened:
        opened.push(content, build_bytes_body(raw), name)
    return content


@pytest.mark.integration
@pytest.mark.parametrize("form", ["bundle", "cosign-tag", "oms"])
def test_a_copy_by_oras_still_verifies(
    pushed: Any, repository: str, tmp_path: Path, form: str
) -> None:
    # Debian does not have it
    if (oras := shutil.which("oras")) is None:
        pytest.skip("oras is not installed")
    private, public = write_key(tmp_path, "signer")
    pushed("sign", pushed.name, "--key", private, "--as", form)
    target = f"{repository}-copy"
    flags = ("--from-plain-http", "--to-plain-http", "--no-tty")
    # Older signatures are under a tag, which a copy of the referrers does not have.
    tag = pushed("resolve", pushed.name).line.replace(":", "-") + ".sig"
    for copied in ("v1", tag) if form == "cosign-tag" else ("v1",):
        run([oras, "cp", "-r", *flags, f"{repository}:{copied}", f"{target}:{copied}"])
    pushed("verify", f"{target}:v1", "--signature", "--key", public, "--form", form)


@pytest.mark.integration
def test_a_copy_by_skopeo_still_verifies(
    pushed: Any, skopeo: str, repository: str, tmp_path: Path
) -> None:
    private, public = write_key(tmp_path, "signer")
    pushed("sign", pushed.name, "--key", private, "--as", "cosign-tag")
    digest = pushed("resolve", pushed.name).line
    old = digest.replace(":", "-") + ".sig"
    source, target = pushed.name.rpartition(":")[0], f"{repository}-copy"
    flags = ("--src-tls-verify=false", "--dest-tls-verify=false", "-q")
    for tag in ("v1", old):
        run([skopeo, "copy", *flags, f"docker://{source}:{tag}", f"docker://{target}:{tag}"])
    pushed("verify", f"{target}:v1", "--signature", "--key", public)
