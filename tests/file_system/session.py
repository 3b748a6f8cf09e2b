"""Run verbs on a store whose file system refuses calls: ``python -m tests.file_system.session``.

The process is started with ``refuse.c`` preloaded. It reads orders from stdin, a JSON object per
line: ``refuse`` and ``top`` for the library, ``home`` and ``host`` for the verbs; with ``large`` an
index of any size is a large one. Each order runs in a process forked from this one. The answer is a
JSON list: verb, exit code, stdout and stderr.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.crash.recorder import make_large
from tests.process import Aimage

# Every verb that touches a store; {host} is a registry, {home} a directory on the file system.
VERBS = """
create m:v1 {model}
create m:whole {model} --whole-files
ls
show m:v1
tag m:v1 {host}/t/m:v1
pin m:v1
pin
unpin m:v1
du
df --json
verify
verify --repair
diff m:v1 m:whole
convert m:v1 m:f32 --dtype f32
save m:v1 m:whole -o {home}/m.tar
load {home}/m.tar --store {home}/loaded
export m:v1 {home}/model
export m:whole {home}/links --links
push {host}/t/m:v1
attach {host}/t/m:v1 {home}/m.tar --type application/x-test
referrers {host}/t/m:v1
copy {host}/t/m:v1 {host}/t/m:v2
resolve {host}/t/m:v2
manifest fetch {host}/t/m:v2 -o {home}/manifest.json
pull {host}/t/m:v2
pull {host}/t/m:v2 --store {home}/pulled
pull {host}/t/m:v2 --store {home}/pulled
rm m:f32 {host}/t/m:v2
gc --grace 0
gc --grace 0 --max-size 1 --keep m:v1
verify
ls --json
index
index --store {home}/loaded
index --store {home}/pulled
""".strip().splitlines()


def run(order: dict[str, str], **environment: str) -> list[list[object]]:
    """Run all verbs, and return their results; refuse calls of those after ``first`` only."""
    home = Path(order["home"])
    aimage = Aimage(home, home / "store", environment)
    results = list[list[object]]()
    for line in VERBS:
        if line == order.get("first", VERBS[0]):
            os.environ["REFUSE"] = order.get("refuse", "")
        words = [word.format(**order) for word in line.split(" ")]
        done = aimage.attempt(*words)
        results.append([line, done.code, done.out, done.err])
    return results


def main() -> None:
    """Answer the orders from stdin."""
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            os.environ["REFUSE_TOP"] = order["home"]
            if order.get("large"):
                make_large(3600.0)
            Path(order["answer"]).write_text(json.dumps(run(order)))
            os._exit(0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
