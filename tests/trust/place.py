"""A model in a registry and in a store, a policy about it, and its signer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clowder_aimage.content.gate import GATES
from tests.process import Aimage
from tests.trust.key_files import write_key


def write_policy(path: Path, pattern: str, key: Path, **rule: Any) -> None:
    document = {"rules": [{"pattern": pattern, "keys": [str(key)], **rule}]}
    path.write_text(json.dumps(document))


class Place:
    """A model in a registry and in a store, a policy about it, and its signer."""

    def __init__(self, pushed: Any, tmp_path: Path, machine: Path) -> None:
        self.here, self.name = pushed, str(pushed.name)
        self.repository = self.name.rpartition(":")[0]
        self.empty = Aimage(tmp_path, tmp_path / "empty")
        self.private, self.public = write_key(tmp_path, "signer")
        self.digest = pushed("resolve", self.name).line
        self.machine = machine
        manifest = json.loads(pushed("manifest", "fetch", self.name).out)
        self.config = manifest["config"]["digest"]

    def enforce(self, pattern: str = "", **rule: Any) -> None:
        write_policy(self.machine, pattern or f"{self.repository}*", self.public, **rule)

    def lift(self) -> None:
        """Remove the policy, for processes that begin afterwards."""
        self.machine.unlink(missing_ok=True)
        GATES.clear()

    def sign(self, *options: object) -> None:
        self.here("sign", self.name, "--key", self.private, "-q", *options)

    def place(self, call: tuple[str, ...]) -> list[str]:
        words = {
            "NAME": self.name,
            "OTHER": f"{self.repository}-other:v1",
            "REPOSITORY@DIGEST": f"{self.repository}@{self.digest}",
            "REPOSITORY@BLOB": f"{self.repository}@{self.config}",
        }
        return [words.get(word, word) for word in call]
