"""Commands of aimage and of the tools that it is compared with.

A pull goes into an empty directory. skopeo, oras, crane and aimage write an OCI image layout and
verify every byte. oras-py does neither: it writes the layers one after the other to files, named by
digest if a layer has no title.

curl is used in its fastest way to push: four workers with equal shares of the bytes. A worker is
one curl for the HEADs and POSTs, and one for the PUTs to the returned locations; each keeps its
connection. It pushes the layers and the config, but no manifest.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.shapes import Descriptor, blob_path, content

AIMAGE = str(Path(sys.executable).with_name("aimage"))
OURS = "aimage pull"
PULLS = {
    "skopeo": "skopeo copy",
    "oras-py": "oras-py pull",
    "oras": "oras copy",
    "crane": "crane pull",
}
PUSHES = {"skopeo": "skopeo copy", "oras": "oras copy", "crane": "crane push"}
PUSH, PUSH_CURL = "aimage push", "curl, 4 at a time"
WORKERS = 4
ORAS_PULL = """
import sys
from oras.provider import Registry
Registry(insecure=True).pull(sys.argv[1], outdir=sys.argv[2])
"""
CURL_PUSH = """
set -o pipefail
worker() {
  curl -K "begin-$1" | awk -v blobs="blobs-$1" '
    BEGIN { print "fail-early\\nsilent\\nshow-error\\nfail\\nheader = \\"Expect:\\"" }
    tolower($1) == "location:" {
      sub("\\r", "", $2)
      getline path < blobs
      digest = path
      sub(".*/", "", digest)
      query = index($2, "?") ? "&" : "?"
      printf "url = \\"%s%sdigest=sha256:%s\\"\\n", $2, query, digest
      printf "upload-file = \\"%s\\"\\noutput = \\"/dev/null\\"\\n", path
    }' > "put-$1" && curl -K "put-$1"
}
cd "$1" && shift
pids=()
for each; do worker "$each" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""


def known_peers() -> list[str]:
    """Return the available tools to compare pulls with."""
    has_oras_py = importlib.util.find_spec("oras") is not None
    return [name for name in PULLS if (has_oras_py if name == "oras-py" else shutil.which(name))]


def pull_commands(
    peers: list[str], name: str, target: Path, authority: Path | None = None
) -> dict[str, list[str]]:
    """Map names of tools to commands that pull ``name`` (with a host) into ``target``.

    With the file of an ``authority`` by TLS; other tools read it from SSL_CERT_FILE.
    """
    theirs = {
        "skopeo": [
            *("skopeo", "copy", "-q", *([] if authority else ["--src-tls-verify=false"])),
            *(f"docker://{name}", f"oci:{target}:{name.rpartition(':')[2]}"),
        ],
        "oras-py": [sys.executable, "-c", ORAS_PULL, name, str(target)],
        "oras": [
            *("oras", "copy", "--no-tty", *([] if authority else ["--from-plain-http"]), name),
            *("--to-oci-layout", f"{target}:{name.rpartition(':')[2]}"),
        ],
        "crane": [
            *("crane", "pull", *([] if authority else ["--insecure"])),
            *("--format", "oci", name, str(target)),
        ],
    }
    commands = {PULLS[peer]: theirs[peer] for peer in peers}
    ours = [AIMAGE, "-q", "--store", str(target), "pull", *_trust(authority), name]
    return commands | {OURS: ours}


def _trust(authority: Path | None) -> list[str]:
    return [] if authority is None else ["--ca-file", str(authority)]


def aimage_push(layout: Path, name: str, host: str, authority: Path | None = None) -> list[str]:
    """Return a command that pushes ``name`` of the layout to the registry at ``host``."""
    command = [AIMAGE, "-q", "--store", str(layout)]
    subprocess.run([*command, "tag", name, f"{host}/{name}"], check=True, stdout=subprocess.DEVNULL)
    return [*command, "push", *_trust(authority), f"{host}/{name}"]


def forget(layout: Path, name: str, host: str) -> None:
    """Remove the name that ``aimage_push`` added."""
    subprocess.run(
        [AIMAGE, "-q", "--store", str(layout), "rm", f"{host}/{name}"],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def push_commands(
    peers: list[str], layout: Path, name: str, host: str, authority: Path | None = None
) -> dict[str, list[str]]:
    """Map names of tools to commands that push ``name`` of the layout to the registry at ``host``.

    The layout has no other name.
    """
    target = f"{host}/{name}"
    [entry] = json.loads((layout / "index.json").read_text())["manifests"]
    theirs = {
        "skopeo": [
            *("skopeo", "copy", "-q", *([] if authority else ["--dest-tls-verify=false"])),
            *(f"oci:{layout}:{name}", f"docker://{target}"),
        ],
        "oras": [
            *("oras", "copy", "--no-tty", *([] if authority else ["--to-plain-http"])),
            *("--from-oci-layout", f"{layout}@{entry['digest']}", target),
        ],
        "crane": ["crane", "push", *([] if authority else ["--insecure"]), str(layout), target],
    }
    return {PUSHES[peer]: theirs[peer] for peer in peers if peer in PUSHES}


def curl_push(layout: Path, name: str, host: str, work: Path) -> list[str]:
    """Return the same command for curl, blobs only; its workers' input is written to ``work``."""
    base = f"http://{host}/v2/{name.rpartition(':')[0]}/blobs"
    numbers = []
    for number, share in enumerate(_shares(content(layout, name))):
        lines = ["fail-early", "silent", "show-error", "head"]
        for blob in share:
            lines += [f'url = "{base}/{blob["digest"]}"', 'output = "/dev/null"']
        lines += ["next", "silent", "show-error", "fail", 'data = ""', 'dump-header = "-"']
        lines += [f'url = "{base}/uploads/"', 'output = "/dev/null"'] * len(share)
        (work / f"begin-{number}").write_text("\n".join([*lines, ""]))
        paths = [f"{blob_path(layout, blob)}\n" for blob in share]
        (work / f"blobs-{number}").write_text("".join(paths))
        numbers.append(str(number))
    return ["bash", "-c", CURL_PUSH, "bash", str(work), *numbers]


def _shares(blobs: list[Descriptor]) -> list[list[Descriptor]]:
    """Return the blobs for each worker, with approximately equal sizes."""
    shares: list[list[Descriptor]] = [[] for _ in range(WORKERS)]
    held = [0] * WORKERS
    for blob in sorted(blobs, key=lambda blob: -int(blob["size"])):
        least = held.index(min(held))
        shares[least].append(blob)
        held[least] += blob["size"] + 64 * 1024  # approximate cost of three requests
    return [share for share in shares if share]
