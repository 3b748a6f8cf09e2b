"""The permissions of the shipped configuration of NATS, on a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet import role_matrix, shipped_nats
from tests.fleet.role_matrix import MATRIX, PAGES, format_matrix, measure, replace_table


@pytest.mark.parametrize("path", shipped_nats.WORKERS, ids=lambda path: path.parent.name)
def test_the_users_of_the_shipped_configurations_are_those_of_the_program(path: Path) -> None:
    assert path.read_text() == shipped_nats.build_configuration(path)


@pytest.mark.integration
def test_a_server_refuses_what_the_matrix_says() -> None:
    assert format_matrix(measure()) == MATRIX.read_text(), (
        f"if that is intended, write it: python -m {role_matrix.__name__}"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_documentation_has_the_table_of_the_matrix(page: Path) -> None:
    assert replace_table(page.read_text()) == page.read_text()
