"""The program, preloaded: ``python -m tests.docs.preloaded SOCKET`` forks for each command.

The documents have hundreds of commands, each of which would import the program for longer than it
runs. A command of ``client`` has its own arguments, directory, environment and open files.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.process import end, spawn
from tests.wait import until

PROGRAM = Path(sys.executable).with_name("aimage")
_OTHERS = ("serve", "gateway", "node", "registry", "completion")  # signalled, or read their name
_CLIENT = """\
#!{python} -S
import json, os, socket, sys
if sys.argv[1:2] and sys.argv[1] in {others}:
    os.execv({program!r}, [{program!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = dict(words=sys.argv[1:], place=os.getcwd(), variables=dict(os.environ))
    data = json.dumps(request).encode() + b"\\n"
    server.sendall(data[socket.send_fds(server, [data], [0, 1, 2]):])
    code = int(server.recv(16) or 1)
sys.exit(code if code >= 0 else 128 - code)
"""


@contextlib.contextmanager
def preloaded(directory: Path) -> Iterator[Path]:
    """Start the program; return a directory that contains it as ``aimage``."""
    address = directory / "socket"
    server = spawn([sys.executable, "-m", "tests.docs.preloaded", address], is_shared=True)
    try:
        client = directory / "bin" / "aimage"
        client.parent.mkdir()
        values = {"python": sys.executable, "program": str(PROGRAM), "address": str(address)}
        client.write_text(_CLIENT.format(others=_OTHERS, **values))
        client.chmod(0o755)
        until(lambda: address.exists() or server.poll() is not None, "the socket")
        assert server.poll() is None
        yield client.parent
    finally:
        end(server)


def _load() -> None:
    """Import everything but what PyTorch is needed for."""
    import clowder_aimage

    for module in pkgutil.walk_packages(clowder_aimage.__path__, "clowder_aimage."):
        if not module.name.endswith("__main__") and ".torch" not in module.name:
            with contextlib.suppress(ImportError):  # an extra is missing
                importlib.import_module(module.name)
    gc.freeze()


def _serve(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address + ".new")
        listener.listen(64)
        Path(address + ".new").rename(address)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return _answer(connection)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _answer(connection: socket.socket) -> None:
    """Run a command in a child, and send its exit code."""
    data, files, *_ = socket.recv_fds(connection, 1 << 16, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 16)
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(str(code).encode())
        os._exit(0)
    connection.close()
    request = json.loads(data)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["place"])
    os.environ.clear()
    os.environ.update(request["variables"])
    # Descriptors stay open when the program replaces its streams.
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering, closefd=False)  # noqa: SIM115
        for number, mode, buffering in ((0, "r", -1), (1, "w", -1), (2, "w", 1))
    )
    sys.argv = ["aimage", *request["words"]]

    from clowder_aimage.cli.main import main

    try:
        main()
    except SystemExit as ended:
        # The end of an interpreter with all modules takes three times as long as most commands
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 1)


if __name__ == "__main__":
    _load()
    _serve(sys.argv[1])
