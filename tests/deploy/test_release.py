"""The wheel has man pages, completions and a description; the release's workflow is valid."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Callable
from email.message import Message
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from clowder_aimage.cli.main import ALIASES
from tests.deploy.release import LINK, check, list_faults
from tests.deploy.test_deploy import output
from tests.deploy.written import DEPLOY, ROOT
from tests.docs.test_docs_names import VERBS, mentioned, options
from tests.process import Aimage, run
from tests.program import find_program

pytest.importorskip("hatchling", reason="hatchling is not installed")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FORMULA = DEPLOY / "homebrew" / "aimage.rb.in"


@pytest.fixture(scope="module")
def build_hook() -> ModuleType:
    """Return the module that generates files of the distributions."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def files(build_hook: ModuleType) -> dict[str, str]:
    """Return the generated files, as the wheel has them."""
    found: dict[str, str] = build_hook.files()
    return found


def read_workflow(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    workflow: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows" / name).read_text())
    return workflow


def test_every_verb_has_a_man_page_with_its_options(files: dict[str, str]) -> None:
    for verb, command in VERBS.items():
        page = files[f"man/man1/{verb.replace(' ', '-')}.1"].replace("\\-", "-")
        assert page.startswith(f'.TH "{verb.upper().replace(" ", "-")}" 1 ')
        assert not options(command) - mentioned(page)
        assert verb == "aimage" or ".SH EXAMPLES" in page or ".SH COMMANDS" in page
    assert len([name for name in files if name.startswith("man/")]) == len(VERBS)
    assert not any(f"man/man1/aimage-{alias}.1" in files for alias in ALIASES)


def test_the_man_pages_are_rendered_without_warnings(files: dict[str, str], tmp_path: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    pages = []
    for name, text in files.items():
        if name.startswith("man/"):
            pages.append(tmp_path / Path(name).name)
            pages[-1].write_text(text)
    done = run(["groff", "-man", "-Tascii", "-ww", *pages], text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "aimage pull registry.example.com/team/shapes:v1" in done.stdout


def test_the_wheel_has_the_completion_of_each_shell(
    files: dict[str, str], aimage: Callable[..., Aimage]
) -> None:
    for shell, name in {
        "bash": "bash-completion/completions/aimage",
        "zsh": "zsh/site-functions/_aimage",
        "fish": "fish/vendor_completions.d/aimage.fish",
    }.items():
        assert files[name] == aimage()("completion", shell).out
    assert files["zsh/site-functions/_aimage"].startswith("#compdef aimage\n")


def test_the_help_needs_no_package_but_click() -> None:
    """The build has no other."""
    code = (
        "import sys\nfrom tests.docs.test_docs_names import VERBS\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(names - set(sys.stdlib_module_names)))"
    )
    done = run([sys.executable, "-I", "-c", f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n{code}"])
    found = set(done.stdout.decode().split())
    assert {"click", "clowder_aimage"} <= found, done.stderr
    assert not found & {"yaml", "requests", "oras", "rich", "tenacity", "jsonschema", "urllib3"}


def test_the_workflows_match_their_schema() -> None:
    assert len(WORKFLOWS) >= 2
    output(
        find_program("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", *WORKFLOWS
    )


def test_the_forms_of_issues_match_their_schemas() -> None:
    config = [path for path in FORMS if path.stem == "config"]
    forms = [path for path in FORMS if path not in config]
    for kind, files in (("config", config), ("forms", forms)):
        assert files
        schema = f"vendor.github-issue-{kind}"
        output(find_program("check-jsonschema"), "--builtin-schema", schema, *files)


def test_hooks_of_commits_use_programs_of_the_environment() -> None:
    """They fetch nothing, and a program that is missing would fail each commit."""
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    repositories = yaml.safe_load(text)["repos"]
    assert [each["repo"] for each in repositories] == ["local"]
    for hook in repositories[0]["hooks"]:
        program = Path(hook["entry"].split()[0])
        assert program.parent == Path(".venv/bin")
        assert shutil.which(program.name, path=Path(sys.executable).parent)


def test_the_workflow_fills_in_the_formula(tmp_path: Path) -> None:
    """Run its own commands."""
    workflow = read_workflow("release.yml")
    steps = workflow["jobs"]["distributions"]["steps"]
    (script,) = (step["run"] for step in steps if step.get("name") == "Fill in the formula")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "clowder_aimage-0.1.0.tar.gz").write_bytes(b"")
    (tmp_path / "deploy").symlink_to(DEPLOY)
    script = "set -eu\nURL=https://git.example.com/v0.1.0\n" + script
    if shutil.which("ruby") is None:
        script = script.replace("ruby -c", ": ")
    assert run(["bash", "-c", script], cwd=tmp_path).returncode == 0
    text = (tmp_path / "aimage.rb").read_text("utf-8")
    assert 'url "https://git.example.com/v0.1.0/clowder_aimage-0.1.0.tar.gz"' in text
    assert f'sha256 "{sha256(b"").hexdigest()}"' in text
    assert "@" not in text.replace("python@", "").partition("class")[2]


def test_the_formula_links_the_files_of_the_wheel(files: dict[str, str]) -> None:
    text = FORMULA.read_text("utf-8")
    for name in files:
        if not name.startswith("man/"):
            assert f'libexec/"share/{name}"' in text
    assert 'Dir[libexec/"share/man/man1/aimage*.1"]' in text


def list_steps(job: dict[str, Any]) -> list[str]:
    """Return the actions and commands of a job."""
    return [str(step.get("uses") or step.get("run")) for step in job["steps"]]


def test_a_release_is_published_without_a_token_and_attested_before() -> None:
    """The identity of the workflow (OIDC) is given to jobs that run no code of packages."""
    text = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    workflow = read_workflow("release.yml")
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"}
    assert set(re.findall(r"secrets\.(\w+)", text)) == {"GITHUB_TOKEN"}
    assert "password" not in jobs["publish"]["steps"][-1].get("with", {})
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"] == "release"
    assert list_steps(jobs["publish"])[-1].startswith("pypa/gh-action-pypi-publish@")
    attesting = {
        name: job["permissions"]
        for name, job in jobs.items()
        if any(step.startswith("actions/attest-build-provenance@") for step in list_steps(job))
    }
    assert attesting.keys() == {"attest", "images"}
    for permissions in attesting.values():
        assert permissions["id-token"] == permissions["attestations"] == "write"
    # Nothing is published that is not attested.
    assert set(jobs["publish"]["needs"]) == attesting.keys()
    assert jobs["release"]["needs"] == "publish"
    named = {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})}
    assert named == attesting.keys() | {"publish"}
    for name in ("attest", "publish"):
        assert not any("run" in step for step in jobs[name]["steps"])


def test_what_is_attested_is_what_is_built() -> None:
    jobs = read_workflow("release.yml")["jobs"]
    download, attest = jobs["attest"]["steps"]
    assert download["with"] == {"merge-multiple": True, "path": "files/"}
    assert attest["with"] == {"subject-path": "files/*"}
    image = jobs["images"]["steps"][-1]["with"]
    (built,) = (step for step in jobs["images"]["steps"] if step.get("id") == "push")
    assert image["subject-digest"] == "${{ steps.push.outputs.digest }}"
    assert built["uses"].startswith("docker/build-push-action@")
    (made,) = (
        step for step in jobs["distributions"]["steps"] if "make dist" in step.get("run", "")
    )
    assert "tests.deploy.release dist --absolute" in made["run"] and made["env"]["SOURCE_URL"]


@pytest.mark.parametrize(
    ("text", "base", "linked"),
    [
        ("[a](docs/a.md#b) and", "https://x/v1", "[a](https://x/v1/docs/a.md#b) and"),
        ("[a](docs/a.md) [b](https://b) [c](#c)", "", "a [b](https://b) [c](#c)"),
        ("![A picture](a.png)", "https://x", "![A picture](https://x/a.png?raw=true)"),
        ("![A picture](a.png)\n", "", "\n"),
        ("[`a [b]`] (c)", "https://x", "[`a [b]`] (c)"),
    ],
)
def test_links_of_the_description_lead_to_the_files_of_the_release(
    build_hook: ModuleType, text: str, base: str, linked: str
) -> None:
    assert build_hook.link_elsewhere(text, base) == linked


@pytest.mark.parametrize("base", ["", "https://git.example.com/blob/v1"])
def test_the_description_has_no_relative_link(build_hook: ModuleType, base: str) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    text = build_hook.link_elsewhere(readme, base)
    targets = LINK.findall(text)
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert len(targets) == (len(LINK.findall(readme)) if base else 0)
    for target in targets:
        path = target.removeprefix(f"{base}/").partition("#")[0].removesuffix("?raw=true")
        assert (ROOT / path).exists()


def describe(**changes: str) -> Message:
    """Return the metadata of a correct distribution with changes; an empty value removes one."""
    fields = {
        "Name": "x",
        "Version": "1",
        "Summary": "s",
        "Author": "a",
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Requires-Python": ">=3.11",
        "Project-URL": "Homepage, https://x",
        "Description-Content-Type": "text/markdown",
    } | {name.replace("_", "-"): value for name, value in changes.items()}
    body = fields.pop("body", "text " * 300)
    message = Message()
    for name, value in fields.items():
        if value:
            message[name] = value
    for prefix in ("Development Status", "Operating System", "Programming Language :: Python"):
        message["Classifier"] = f"{prefix} :: x"
    for extra in ("all", "mlx", "torch", "worker", "fleet"):
        message["Provides-Extra"] = extra
    message.set_payload(body)
    return message


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"Summary": ""}, "Summary is missing"),
        ({"License_File": "COPYING"}, "the licence is not among the files"),
        ({"Project_URL": "Homepage, http://x"}, "the URLs are not all https"),
        ({"Description_Content_Type": "text/plain"}, "not declared as Markdown"),
        ({"body": "short"}, "the description is missing"),
        ({"body": "text " * 300 + "[a](docs/a.md)"}, "relative: ['docs/a.md']"),
    ],
)
def test_a_fault_of_the_metadata_is_found(changes: dict[str, str], fault: str | None) -> None:
    faults = list(list_faults(describe(**changes), is_absolute=False))
    assert len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]
    linked = [*list_faults(describe(**changes), is_absolute=True)]
    assert any("set SOURCE_URL" in each for each in linked)


def test_a_directory_with_two_wheels_is_not_released(tmp_path: Path) -> None:
    for name in ("a.whl", "b.whl", "a.tar.gz"):
        (tmp_path / name).touch()
    assert check(tmp_path, is_absolute=False) == [
        f"{tmp_path} has 2 wheels and 1 sdists, not one of each"
    ]
