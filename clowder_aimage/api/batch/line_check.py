"""The lines of a batch before the first is sent, and the ids in the lines of its answers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.engine.batch_line import MAX_LINES, read_line
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import read_json

# Malformed lines in the errors of a batch
MAX_ERRORS = 20
# A line of answers, as a run writes it: the rest, which may be large, is not parsed
_ANSWER = re.compile(
    rb'\{"id": "batch_req_[0-9a-f]{24}", "custom_id": ("[^"\\]*(?:\\.[^"\\]*)*"), "response": '
)


@dataclass(slots=True)
class LineCheck:
    """The faults of the first malformed lines of a batch, and the number of its lines."""

    endpoint: str
    number: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)
    _custom_ids: set[str] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        """True if no more lines are to be checked."""
        return len(self.faults) >= MAX_ERRORS or self.number > MAX_LINES

    def check(self, lines: list[bytes]) -> None:
        """Check the next lines. It may take seconds."""
        for line in lines:
            if self.is_over:
                return
            self.number += 1
            if self.number > MAX_LINES:
                message = f"the file has more than {MAX_LINES} requests"
                self.add("too_many_requests", message)
            else:
                self._check_line(line)

    def _check_line(self, line: bytes) -> None:
        try:
            request = read_line(line)
        except FormatError as error:
            self.add("invalid_request", error.message)
            return
        if request.custom_id in self._custom_ids:
            self.add("duplicate_custom_id", "another line has this custom_id", "custom_id")
        if request.url != self.endpoint:
            self.add("mismatched_endpoint", "url must be that of the batch", "url")
        self._custom_ids.add(request.custom_id)

    def add(self, code: str, message: str, param: str | None = None) -> None:
        """Add a fault of the current line."""
        fault = {"code": code, "line": self.number, "message": message, "param": param}
        self.faults.append(fault)


def read_custom_ids(lines: list[bytes]) -> list[str]:
    """Return the ids of the requests in lines of answers. Raises FormatError."""
    matches = [_ANSWER.match(line) for line in lines]
    if None in matches:
        raise FormatError("an answer is malformed")
    return [read_json(match[1], "an id", len(match[1])) for match in matches if match is not None]
