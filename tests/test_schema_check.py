"""The check without jsonschema decides as jsonschema does."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from clowder_aimage.document.schema import _build_validator, is_valid
from clowder_aimage.document.schema_check import SchemaCheck, UnknownKeywordError
from tests.process import run

RULE = {
    "pattern": "registry.example.com/*",
    "mode": "warn",
    "keys": ["signer.pub"],
    "identities": [{"subject": "*@example.com", "issuer": "https://issuer.example.com"}],
    "formats": ["bundle", "oms"],
    "offline": True,
}
HOST = {
    "plainHttp": True,
    "mirrors": ["mirror.example.com"],
    "concurrency": 4,
    "certFile": "ca.pem",
}
# By schema: documents that are valid, or nearly
DOCUMENTS: dict[str, list[Any]] = {
    "trust": [{"mode": "enforce", "rules": [RULE, {"pattern": "*", "mode": "off"}]}],
    "config": [
        {"trust": {"rules": [RULE]}, "registries": {"registry.example.com:5000": HOST}},
        {"names": {"drawings": "team/drawings:v3"}, "run": {"steps": 4}, "store": {}},
        {"worker": {"port": 8080, "host": "127.0.0.1"}, "registries": {"default": "example.com"}},
    ],
    "names": [{"models": {"drawings": {"reference": "team/drawings:v3"}}}],
    "desired": [["registry.example.com/team/x:v1"], {"models": ["x"]}, [{"reference": "x"}]],
}
OTHERS: list[Any] = [None, True, 1, 1.0, -3, 10**9, "", "x", "a/b:c\n", "x" * 600, [], {}, [1, 1]]
OTHERS += [["x", "x"], {"unknown": 1}, {"pattern": "x"}]


def iter_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all containers of a value with their keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in list(items):
        yield value, key
        if isinstance(each, dict | list):
            yield from iter_places(each)


def change(document: Any, chance: random.Random) -> Any:
    changed = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 2))):
        places = list(iter_places(changed))
        if not places:
            return chance.choice(OTHERS)
        container, key = chance.choice(places)
        other = copy.deepcopy(chance.choice(OTHERS))
        if isinstance(container, dict) and chance.random() < 0.3:
            container[chance.choice(("unknown", "mode", "offline", "A B"))] = other
        elif chance.random() < 0.2:
            del container[key]
        else:
            container[key] = other
    return changed


@pytest.mark.parametrize("name", DOCUMENTS)
def test_both_decide_alike(name: str) -> None:
    judge, chance = _build_validator(name), random.Random(name)
    seen = set()
    for document in DOCUMENTS[name]:
        for each in (document, *(change(document, chance) for _ in range(60))):
            expected = judge.is_valid(each)
            assert is_valid(name, each) is expected, each
            seen.add(expected)
    assert seen == {True, False}


def test_what_is_not_known_is_left_to_jsonschema() -> None:
    for schema in ({"if": True}, {"items": {"format": "uri"}}, {"enum": [[1]]}, {"$ref": "x"}):

        def refuse(url: str) -> Any:
            raise UnknownKeywordError(url)

        with pytest.raises(UnknownKeywordError):
            SchemaCheck(schema, refuse).accepts(["x"])
    deep: Any = {}
    for _ in range(10_000):
        deep = {"x": deep}
    assert not is_valid("trust", {"rules": deep})


def test_a_valid_policy_needs_no_jsonschema() -> None:
    code = (
        "import sys; from clowder_aimage.document.schema import validate;"
        f"validate('config', {{'trust': {{'rules': [{RULE}]}}}});"
        "sys.exit('jsonschema' in sys.modules)"
    )
    run([sys.executable, "-c", code], check=True)
