"""The verb ``trust check``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.option import (
    VerbGroup,
    common_options,
    get_settings,
    login_connection_options,
)
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.cli.console.stored_name import stored_argument
from clowder_aimage.errors import AImageError, NotFoundError, PolicyError, UsageError
from clowder_aimage.oci import Descriptor, Digest, Reference

if TYPE_CHECKING:
    from clowder_aimage.registry import ClientOptions, Repository
    from clowder_aimage.trust.gate import PolicyGate


@click.group(cls=VerbGroup)
def trust() -> None:
    """Explain the policy of signatures and licences."""


@examples(f"aimage trust check {NAME}")
@common_options
@trust.command(short_help="Tell which rule decides about REF.")
@stored_argument()
@login_connection_options
def check(reference: Reference) -> int:
    """Tell which rules of the policy decide about REF, and whether REF is accepted.

    REF is looked up in the store, else in its registry. A rule for any name that REF has or came by
    counts. The licences that REF states are read only if it has the signature that it needs. The
    exit code is 5 if REF is refused.
    """
    from clowder_aimage.config.trust_policy import read_policy
    from clowder_aimage.config.user_directory import get_user_files
    from clowder_aimage.trust.gate import PolicyGate

    policy = read_policy(get_user_files())
    if policy is None:
        print_result(
            {"reference": str(reference), "policy": None, "rules": [], "accepted": True},
            "there is no policy: everything is accepted",
        )
        return 0
    chosen = get_settings()
    layout, connection = chosen.layout, chosen.build_client_options()
    digest: Digest | None = None
    failure: AImageError | None = None
    gate = PolicyGate(policy, lambda: connection)
    try:
        content = layout.resolve(reference)
        digest = content.digest
        gate.admit_asked(layout, content, reference)
    except NotFoundError:
        if connection.expand(reference).registry is None:
            raise
        digest, failure = _check_remote(gate, connection.expand(reference), connection)
    except PolicyError as error:
        failure = error
    rules = gate.explain(layout, connection.expand(reference), digest)
    licenses = gate.find_licenses(digest) if digest else None
    value = {
        "reference": str(reference),
        "digest": str(digest) if digest else None,
        "policy": policy.version,
        "rules": rules,
        **({"licenses": list(licenses)} if licenses is not None else {}),
        "accepted": failure is None,
        **({"reason": failure.message} if failure else {}),
    }
    print_result(value, _format(value, failure))
    return 0 if failure is None else failure.exit_code


def _check_remote(
    gate: PolicyGate, reference: Reference, connection: ClientOptions
) -> tuple[Digest, PolicyError | None]:
    """Decide about all manifests that a pull would read; return the digest of the last one."""
    from clowder_aimage.content.gate import decided_by
    from clowder_aimage.content.verified_reader import read_all
    from clowder_aimage.pull import find_pulled
    from clowder_aimage.registry import Repository

    with Repository(reference, connection) as repository:
        content = repository.resolve(reference)
        raw = read_all(repository.open(content), content)
        found = content
        try:
            gate.admit_remote(repository, reference, content, raw)
            for selected in _list_selectable(repository, reference, content):
                found = selected
                with decided_by(gate):
                    found = find_pulled(repository, reference, selected)
        except PolicyError as error:
            return found.digest, error
        return found.digest, None


def _list_selectable(
    repository: Repository, reference: Reference, root: Descriptor
) -> list[Descriptor]:
    """Return the manifest that a pull selects; or those from which it needs a choice."""
    from clowder_aimage.content.graph import read_document
    from clowder_aimage.content.platform import ANY, list_candidates, select
    from clowder_aimage.oci import Index

    try:
        return [select(repository, root, reference, ANY)[0]]
    except UsageError:
        document = read_document(repository, root)
        if not isinstance(document, Index):
            raise
        return [entry.descriptor for entry in list_candidates(repository, document)]


def _format(value: dict[str, Any], failure: AImageError | None) -> list[str]:
    lines = [f"{value['reference']}: {'accepted' if failure is None else 'refused'}"]
    for entry in value["rules"]:
        rule = f"{entry['mode']}, by {entry['rule']}" if "rule" in entry else "no rule"
        lines.append(f"  {entry['name']}: {rule}")
        lines += [
            f"  {entry['name']}: licences: {each['mode']}, by {each['rule']}"
            for each in entry["licenses"]
        ]
    if "licenses" in value:
        lines.append(f"  stated licence: {', '.join(value['licenses']) or 'none'}")
    return [*lines, *([f"  {failure.message}"] if failure else [])]
