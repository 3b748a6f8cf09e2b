"""A model hub on loopback: the part of the Hugging Face hub's API that fetches models.

Routes: ``/api/models/ORG/REPO/revision/REV``, ``/api/models/ORG/REPO/tree/REV`` and
``/ORG/REPO/resolve/REV/FILE`` with HEAD, GET, ETag, X-Repo-Commit and ranges. Errors are told by
``X-Error-Code``, as there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?/?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """The state of the hub: repositories, the requests it got, and its moods."""

    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)  # files need the token
    private: set[str] = field(default_factory=set)  # everything needs the token
    token: str = "hf_right"
    status: int = 0  # the answer to every request, if set
    is_slow: bool = False  # bodies arrive byte by byte, until the hub ends
    is_over: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)

    def add(self, repository: str, files: Path | dict[str, bytes]) -> str:
        """Add a repository, or a new commit of it; return the commit."""
        if isinstance(files, Path):
            paths = [path for path in files.rglob("*") if path.is_file()]
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in paths}
        self.repositories[repository] = files
        return self.commit(repository)

    def commit(self, repository: str) -> str:
        """Return the commit of the files. Bytes keep their hash, which is calculated once."""
        files = sorted((name, hash(data)) for name, data in self.repositories[repository].items())
        return hashlib.sha1(repr(files).encode(), usedforsecurity=False).hexdigest()

    def fetched(self) -> set[str]:
        """Return the names of the files whose content was asked for."""
        paths = (line.removeprefix("GET ") for line in self.requests if line.startswith("GET "))
        return {match[3] for path in paths if (match := _FILE.fullmatch(path))}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        self.hub.agents.add(self.headers.get("User-Agent", ""))
        if self.hub.status:
            self._send(self.hub.status, {}, b"{}")
        elif match := _INFO.fullmatch(path):
            self._info(*match.groups())
        elif match := _FILE.fullmatch(path):
            self._file(*match.groups())
        else:
            self._send(404, {}, b"{}")

    do_HEAD = do_GET  # noqa: N815

    def _found(self, repository: str, revision: str | None) -> dict[str, bytes] | None:
        files = self.hub.repositories.get(repository)
        is_known = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if files is None or (repository in self.hub.private and not is_known):
            self._send(404 if is_known else 401, {"X-Error-Code": "RepoNotFound"}, b"{}")
            return None
        if revision not in (None, "main", self.hub.commit(repository)):
            self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
            return None
        return files

    def _info(self, repository: str, kind: str | None, revision: str | None) -> None:
        files = self._found(repository, revision)
        if files is None:
            return
        value: Any = [
            {
                "type": "file",
                "path": name,
                "size": len(data),
                "oid": hashlib.sha1(data, usedforsecurity=False).hexdigest(),
            }
            for name, data in files.items()
        ]
        if kind != "tree":
            siblings = [{"rfilename": each["path"], "size": each["size"]} for each in value]
            value = {"id": repository, "sha": self.hub.commit(repository), "siblings": siblings}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _file(self, repository: str, revision: str, name: str) -> None:
        files = self._found(repository, revision)
        if files is None:
            return
        is_known = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repository in self.hub.gated and not is_known:
            self._send(401, {"X-Error-Code": "GatedRepo"}, b"{}")
        elif name not in files:
            self._send(404, {"X-Error-Code": "EntryNotFound"}, b"{}")
        else:
            data = files[name]
            headers = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": self.hub.commit(repository),
                "Accept-Ranges": "bytes",
            }
            start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if start and int(start[1]) < len(data):
                end = f"bytes {start[1]}-{len(data) - 1}/{len(data)}"
                self._send(206, headers | {"Content-Range": end}, data[int(start[1]) :])
            else:
                self._send(200, headers, data)

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with contextlib.suppress(OSError):
            for at in range(len(body)) if self.hub.is_slow else ():
                self.wfile.write(body[at : at + 1])
                if self.hub.is_over.wait(0.02):
                    return
            self.wfile.write(b"" if self.hub.is_slow else body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving_hub() -> Iterator[Hub]:
    """Serve a hub on a free port."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()
