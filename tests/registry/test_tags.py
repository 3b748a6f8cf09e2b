"""Tag lists: pagination and malformed pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import FormatError, NotFoundError, RegistryError, VerificationError
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions, Repository, listing
from tests.scripted import Answer, ScriptedRegistry, skip_waiting


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_waiting(monkeypatch)


def page(tags: list[Any] | None, link: str | None = None) -> Answer:
    headers = {"Content-Type": "application/json"}
    if link is not None:
        headers["Link"] = link
    return Answer(200, headers, json.dumps({"name": "x", "tags": tags}).encode())


def tags(script: Callable[[Any], Answer], tmp_path: Path) -> tuple[list[str], list[str]]:
    """List the tags of a scripted repository; return them and the request paths."""
    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/team/x")
        with Repository(reference, ClientOptions(docker_config=tmp_path)) as repository:
            return repository.list_tag_names(), registry.asked("GET")


def test_all_pages_are_listed_in_order(tmp_path: Path) -> None:
    pages = {
        "/v2/team/x/tags/list": page(["b", "a"], '</v2/team/x/tags/list?last=a&n=2>; rel="next"'),
        "/v2/team/x/tags/list?last=a&n=2": page(["10", "a"], '<list?last=9>; rel="next"'),
        "/v2/team/x/tags/list?last=9": page([]),
    }
    found, asked = tags(lambda seen: pages[seen.path], tmp_path)
    assert found == ["b", "a", "10"]
    assert asked == list(pages)


def test_an_absolute_link_is_followed(tmp_path: Path) -> None:
    def script(seen: Any) -> Answer:
        if "last" in seen.path:
            return page(["b"])
        here = f"http://{seen.headers['Host']}/v2/team/x/tags/list?last=a"
        return page(["a"], f'<{here}>; rel="next"')

    assert tags(script, tmp_path)[0] == ["a", "b"]


@pytest.mark.parametrize("none", [None, []])
def test_no_tags(none: list[Any] | None, tmp_path: Path) -> None:
    assert tags(lambda _: page(none), tmp_path)[0] == []


def test_a_link_to_another_host_is_not_followed(tmp_path: Path) -> None:
    with ScriptedRegistry(lambda _: page(["stolen"])).running() as other:
        link = f'<http://{other.host}/v2/stolen/tags/list?last=a>; rel="next"'
        with pytest.raises(RegistryError, match="is at another host"):
            tags(lambda _: page(["a"], link), tmp_path)
    assert not other.seen


def test_a_link_to_the_internal_name_of_the_registry_is_read(tmp_path: Path) -> None:
    """Its query is that of the next page; the host is not contacted."""

    def script(seen: Any) -> Answer:
        link = '<http://registry.internal:5000/v2/team/x/tags/list?last=a&n=1>; rel="next"'
        return page(["b"]) if "last=a&n=1" in seen.path else page(["a"], link)

    assert tags(script, tmp_path)[0] == ["a", "b"]


@pytest.mark.parametrize("link", ["//evil.example/x", "http://["])
def test_invalid_links_are_refused(link: str, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="is at another host"):
        tags(lambda _: page(["a"], f'<{link}>; rel="next"'), tmp_path)


def test_circular_pages_fail(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="form a cycle"):
        tags(lambda seen: page(["a"], f'<{seen.path}>; rel="next"'), tmp_path)


@pytest.mark.parametrize("limit", ["MAX_PAGES", "MAX_LIST_SIZE"])
def test_endless_pages_fail(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, limit, 5)
    count = iter(range(100))
    with pytest.raises(RegistryError, match="the list exceeds"):
        tags(lambda _: page(["a"], f'<list?last={next(count)}>; rel="next"'), tmp_path)
    assert next(count) <= 6


@pytest.mark.parametrize(
    "body",
    [b"[]", b'{"tags": "a"}', b'{"tags": ["a\\nb"]}'],
)
def test_an_invalid_tag_list_is_refused(body: bytes, tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        tags(lambda _: Answer(200, {}, body), tmp_path)


def test_an_oversized_tag_list_is_refused(tmp_path: Path) -> None:
    body = b'{"tags": ["' + b"a" * (4 << 20) + b'"]}'
    with pytest.raises(VerificationError, match="exceeds"):
        tags(lambda _: Answer(200, {}, body), tmp_path)


def test_a_transient_error_between_pages_is_retried(tmp_path: Path) -> None:
    left = [1]

    def script(seen: Any) -> Answer:
        if "last" not in seen.path:
            return page(["a"], '<list?last=a>; rel="next"')
        return Answer(503) if left and left.pop() else page(["b"])

    assert tags(script, tmp_path)[0] == ["a", "b"]


def test_a_missing_repository_fails(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        tags(lambda _: Answer(404), tmp_path)
