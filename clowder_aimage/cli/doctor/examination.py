"""The examination of a machine: all checks, and their findings."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from clowder_aimage.cli.doctor.finding import Check, Finding, Level, Stage
from clowder_aimage.errors import AImageError

# Seconds that the checks of the network may take, all together.
PATIENCE = 3.0
_REPORT = "this is a defect: report it with the output of 'aimage doctor --json'"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The name of a check, and its findings."""

    name: str
    findings: tuple[Finding, ...]


def examine(
    checks: Sequence[Check], *, is_offline: bool = False, patience: float | None = None
) -> Iterator[CheckResult]:
    """Yield the result of each check, in order.

    The checks of the network run at the same time, while the others run. What does not end within
    ``patience`` seconds, by default PATIENCE, is left behind. Offline there are none of them.
    """
    runs = [_Run(check) for check in checks if not is_offline or check.stage is Stage.MACHINE]
    deadline = time.monotonic() + (PATIENCE if patience is None else patience)
    for run in _at(runs, Stage.NETWORK):
        threading.Thread(target=run.work, name="aimage-doctor", daemon=True).start()
    for run in _at(runs, Stage.MACHINE):
        run.work()
    for run in _at(runs, Stage.NETWORK):
        run.done.wait(max(0.0, deadline - time.monotonic()))
    for run in _at(runs, Stage.AFTER):
        run.work()
    for run in runs:
        yield run.take()


def _at(runs: Iterable[_Run], stage: Stage) -> Iterator[_Run]:
    return (run for run in runs if run.check.stage is stage)


@dataclass(slots=True, eq=False)
class _Run:
    """A check and its findings so far; a thread may still work on it."""

    check: Check
    findings: tuple[Finding, ...] = ()
    done: threading.Event = field(default_factory=threading.Event)

    def work(self) -> None:
        found = list[Finding]()
        try:
            found.extend(self.check.run())
        except (AImageError, OSError) as error:
            found.append(Finding.of_error(error))
        except Exception as error:
            # A check must not hide what the others find.
            message = f"the check ended with {type(error).__name__}: {str(error)[:200]}"
            found.append(Finding(Level.ERROR, message, _REPORT))
        self.findings = tuple(found)
        self.done.set()

    def take(self) -> CheckResult:
        findings = self.findings if self.done.is_set() else (self.check.late,)
        return CheckResult(self.check.name, findings)
