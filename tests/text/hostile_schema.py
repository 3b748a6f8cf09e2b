"""JSON Schemas that take a library long, or much memory. As a module: what their trials cost."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from clowder_aimage.errors import UsageError
from clowder_aimage.model.llama.grammar import Grammars


def nest(count: int, leaf: Any, **fields: Any) -> Any:
    for _ in range(count):
        leaf = {"type": "array", "items": leaf, **fields}
    return leaf


def double(depth: int, width: int) -> Any:
    """Return definitions of objects, each of which has the next one ``width`` times."""
    names = [f"p{number}" for number in range(width)]
    definitions: dict[str, Any] = {
        f"d{level}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{level + 1}"} for name in names},
            "required": names,
        }
        for level in range(depth)
    }
    definitions[f"d{depth}"] = {"type": "string"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def objects(count: int, name: str) -> list[Any]:
    return [
        {"type": "object", "properties": {f"{name}{at}": {"minLength": at}}, "required": [name]}
        for at in range(count)
    ]


def match(pattern: str, **fields: Any) -> Any:
    return {"type": "string", "pattern": pattern, **fields}


SCHEMAS: dict[str, Any] = {
    # Numbers
    **{
        f"multipleOf {number}": {"type": "integer", "multipleOf": number, "minimum": 0}
        for number in (99_991, 999_983, 9_999_991, 99_999_989, 4_294_967_291)
    },
    "multipleOf of decimals": {"type": "number", "multipleOf": 0.0999983},
    "multipleOf of small decimals": {"type": "number", "multipleOf": 1e-30},
    "multipleOf often": {
        "allOf": [{"type": "integer", "multipleOf": n} for n in (997, 1009, 1013)]
    },
    "multipleOf nested": {"properties": {f"a{n}": {"multipleOf": 99_991 + n} for n in range(99)}},
    "multipleOf in a list": nest(3, {"type": "integer", "multipleOf": 9_999_991}),
    "a huge bound": {"type": "integer", "minimum": 10**300},
    "many bounds": {
        "properties": {f"n{n}": {"type": "integer", "maximum": n} for n in range(2000)}
    },
    # Counts
    "maxItems": {"type": "array", "maxItems": 10**9, "items": {"type": "string"}},
    "minItems": {"type": "array", "minItems": 10**9, "items": {"type": "string"}},
    "minItems nested": nest(4, {"type": "string"}, minItems=999, maxItems=999),
    "minItems as a float": {"type": "array", "minItems": 1e9, "items": {}},
    "maxLength": {"type": "string", "minLength": 10**9, "maxLength": 10**9},
    "maxLength of 2^63": {"type": "string", "maxLength": 2**63},
    "minProperties": {"type": "object", "minProperties": 10**7},
    "uniqueItems": {"type": "array", "uniqueItems": True, "items": {"enum": list(range(500))}},
    # References
    "references to itself": {"$ref": "#"},
    "references in a circle": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "all of itself": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "any of itself": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "references that double": double(30, 8),
    "references to a file": {"$ref": "file:///etc/passwd"},
    "references to a server": {"$ref": "http://127.0.0.1:1/"},
    # Alternatives
    "products of alternatives": {"allOf": [{"anyOf": objects(20, f"a{n}")} for n in range(8)]},
    "products of two": {"allOf": [{"oneOf": objects(2, f"a{n}")} for n in range(20)]},
    "enum of 10^5": {"enum": list(range(100_000))},
    "enum of 9000": {"enum": list(range(9000))},
    "enum of long texts": {"enum": ["x" * 30_000, "y" * 30_000]},
    "a deep constant": {"const": json.loads("[" * 200 + "]" * 200)},
    "deep lists": nest(900, {"type": "object"}),
    "deep negations": json.loads('{"not":' * 200 + "{}" + "}" * 200),
    "optional properties": {"properties": {f"k{n}": {} for n in range(2000)}},
    "required properties": {"type": "object", "required": [f"k{n}" for n in range(3000)]},
    "patterns of properties": {"patternProperties": {"^(a|aa)+" + "a?" * n: {} for n in range(60)}},
    # Patterns
    "nested repetitions": match("^((((a+)+)+)+)+$"),
    "nested ranges": match("^" + "(" * 12 + "a" + "{1,99})" * 12 + "$"),
    "products of ranges": match("^((((a{99}){99}){99}){99})$"),
    "a range": match("^[\\s\\S]{999999}$"),
    "a late choice": match("^[ab]*a[ab]{24}$"),
    "late choices": match("^(.*a.{20}b.*){9}$"),
    "alternatives": match("^(" + "|".join(f"a{n}.*b" for n in range(5000)) + ")*$"),
    "optional letters": match("^" + "a?" * 9000 + "a{9000}$"),
    "a long pattern": match("a" * 60_000),
    "classes of characters": match("^(\\p{L}{50}){50}(\\p{N}{50}){50}$"),
    "a negated class": match("^([^\\p{L}\\p{N}]{0,999}){0,999}$"),
    "a look ahead": match("^(?=(a+)+$)(?!b)x$"),
    "a look behind": match("(?<=(a|b)*)c"),
    "a back reference": match("^(a*)\\1$"),
    "open brackets": match("^" + "(" * 9000),
    "intersections": {"allOf": [match(f"^.*{chr(97 + n)}.*$") for n in range(20)]},
    "long intersections": {"allOf": [match(f".*{chr(97 + n)}", minLength=300) for n in range(20)]},
    # The library's own options
    "own separators": {
        "x-guidance": {"item_separator": "(a{9000}){99}", "whitespace_pattern": "(a|b)*a(a|b){30}"},
        "type": "object",
    },
    "unknown options": {"x-guidance": 5, "type": "object"},
    "rules in names": {"properties": {'"\n\\"start: /.*/ %ignore': {}}, "title": "x\nstart: /./"},
    "halves of characters": {"enum": ["\ud800"]},
    "not a number": {"const": float("nan")},
}


def main() -> None:
    """Write the name of each schema, the reason why it is refused, and what its trial took."""
    grammars, before = Grammars(), 0.0
    for name, schema in SCHEMAS.items():
        try:
            grammar = grammars.build(schema)
            reason, seconds = "", grammar.seconds
        except UsageError as error:
            reason, seconds = error.message, 0.0
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = usage.ru_utime + usage.ru_stime
        trial = {"trial": spent - before, "peak": usage.ru_maxrss * 1024}
        line = json.dumps({"name": name, "reason": reason, "prepare": seconds, **trial})
        sys.stdout.write(f"{line}\n")
        before = spent


if __name__ == "__main__":
    main()
