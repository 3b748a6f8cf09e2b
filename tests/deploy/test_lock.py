"""The packages of the images are pinned, with digests, and can be audited offline."""

from __future__ import annotations

import json
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.deploy.lock import CONTENTS, IMAGES, main, pins, unmet, vulnerable, wanted
from tests.deploy.written import DOCKERFILES, ROOT, instructions

DIGEST = "sha256:" + "a" * 64
TEXT = f"""\
one==1.5 \\
    --hash={DIGEST}
    # via two
two==2.0 ; python_version < '3.12' \\
    --hash={DIGEST}
"""


def test_the_pinned_packages_satisfy_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert capsys.readouterr().out.count(" 0 findings") == len(CONTENTS)
    assert {path.name for path in IMAGES.glob("*.lock")} == set(CONTENTS)


def test_what_builds_the_wheel_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    text = (IMAGES / "build.in").read_text("utf-8")
    found = sorted(str(each) for each in wanted(project, (), text))
    assert found == sorted(project["build-system"]["requires"])


def test_the_images_install_only_pinned_packages() -> None:
    for path in DOCKERFILES:
        for word, rest in instructions(path):
            if word == "RUN" and " install " in rest and "pip" in rest:
                assert "--require-hashes" in rest or "--no-deps /wheels/" in rest, rest
            if "pip wheel" in rest:
                assert "--no-build-isolation" in rest


def test_a_requirement_that_is_not_satisfied_is_found() -> None:
    project = {"project": {"name": "x", "dependencies": ["one>=1.5", "two>=1"]}}
    requirements = wanted(
        project | {"project": project["project"] | {"optional-dependencies": {"a": ["three"]}}},
        ("a",),
        "One<1.5",
    )
    found = set(unmet(requirements, pins(TEXT)))
    assert "one<1.5 is not one 1.5" in {each.lower() for each in found}
    assert any(each.startswith("three is not pinned for") for each in found)
    assert any(each.startswith("two>=1 is not pinned for") and "3.13" in each for each in found)
    assert list(unmet([], pins("one==1.5\n"))) == ["one 1.5 has no digest"]
    with pytest.raises(ValueError, match="not pinned"):
        pins("one>=1.5\n")


@pytest.mark.parametrize(
    ("events", "is_affected"),
    [
        ([{"introduced": "0"}, {"fixed": "1.5"}], False),
        ([{"introduced": "0"}, {"fixed": "1.6"}], True),
        ([{"introduced": "0"}, {"last_affected": "1.5"}], True),
        ([{"fixed": "1.2"}, {"introduced": "0"}, {"introduced": "1.4"}], True),
        ([{"introduced": "1.6"}], False),
    ],
)
def test_an_advisory_is_applied_to_its_versions(
    tmp_path: Path, events: list[dict[str, str]], is_affected: bool
) -> None:
    package = {"ecosystem": "PyPI", "name": "One"}
    affected = {"package": package, "ranges": [{"type": "ECOSYSTEM", "events": events}]}
    listed = {"package": package, "versions": ["1.5"]}
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name, entry, more in (
            ("A-1", affected, {}),
            ("A-2", listed, {}),
            ("A-3", listed, {"withdrawn": "2026-01-01T00:00:00Z"}),
            ("A-4", listed | {"package": package | {"ecosystem": "npm"}}, {}),
        ):
            advisory = {"id": name, "summary": "bad", "affected": [entry], **more}
            archive.writestr(f"{name}.json", json.dumps(advisory))
    found = list(vulnerable(pins(TEXT), tmp_path / "all.zip"))
    assert found == [f"one 1.5: A-{number}: bad" for number in ([1, 2] if is_affected else [2])]
