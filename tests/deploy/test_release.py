"""The wheel has man pages and completions, and the release's workflow and formula are valid."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from clowder_aimage.cli.main import ALIASES
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
def files() -> dict[str, str]:
    """Return the generated files, as the wheel has them."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, str] = module.files()
    return found


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
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
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
