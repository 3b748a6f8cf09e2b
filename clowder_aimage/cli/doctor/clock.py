"""The clock of this machine: tokens, certificates and signatures depend on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from clowder_aimage.cli.doctor.finding import Finding, Level, Stage
from clowder_aimage.cli.doctor.server_time import ServerTimes

# Seconds. The signatures of a fleet are refused at larger differences.
_TOLERATED = 30.0
_ADVICE = (
    "sudo sntp -sS time.apple.com" if sys.platform == "darwin" else "sudo timedatectl set-ntp true"
)


@dataclass(frozen=True, slots=True)
class ClockCheck:
    """It compares the clock with those of the servers that answered other checks."""

    times: ServerTimes
    name = "clock"
    stage = Stage.AFTER
    late = Finding(Level.ERROR, "does not end")

    def run(self) -> Iterator[Finding]:
        skews = self.times.list_skews()
        facts = {"skews": {skew.server: round(skew.seconds) for skew in skews}}
        if not skews:
            yield Finding(Level.OK, "not compared: no server stated its time", facts=facts)
            return
        # One server may be wrong: the clock is, if it differs from most of them.
        by_size = sorted(skews, key=lambda skew: abs(skew.seconds))
        median = by_size[(len(by_size) - 1) // 2]
        if abs(median.seconds) <= _TOLERATED:
            servers = ", ".join(skew.server for skew in skews)
            message = f"differs by less than {_TOLERATED:.0f} s from {servers}"
            wrong = [skew for skew in skews if abs(skew.seconds) > _TOLERATED]
            yield Finding(Level.OK, message, facts=facts)
            for skew in wrong:
                text = f"the clock of {skew.server} differs by {abs(skew.seconds):.0f} s"
                yield Finding(Level.WARNING, text, "set the clock of that machine", facts)
            return
        side = "behind" if median.seconds > 0 else "ahead of"
        message = f"{abs(median.seconds):.0f} s {side} {median.server}: signatures may be refused"
        yield Finding(Level.WARNING, message, _ADVICE, facts)
