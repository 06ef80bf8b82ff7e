"""A PostgreSQL server on loopback for one test, by the binaries of Debian's packages."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PASSWORD = "kept-to-itself"
SECONDS = 120


def _binaries() -> Path:
    """The folder of ``initdb`` and ``pg_ctl``; skips the test where there is none, or no driver for Python."""
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    found = [Path(path).parent for path in [shutil.which("initdb")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not found:
        pytest.skip("PostgreSQL is not installed")
    return found[-1]


@contextmanager
def server() -> Iterator[str]:
    """The URL of a database of its own, with its password."""
    binaries, more = _binaries(), {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        data, secret = folder / "data", folder / "secret"
        secret.write_text(PASSWORD)
        if os.geteuid() == 0:  # the server refuses to run as root
            more = {"user": "postgres", "cwd": "/"}
            for path in (folder, secret):
                shutil.chown(path, "postgres")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def call(program: str, *arguments: str) -> None:
            command = [str(binaries / program), "--pgdata", str(data), *arguments]
            subprocess.run(command, check=True, timeout=SECONDS, stdout=subprocess.DEVNULL, **more)

        call("initdb", "--username=someone", "--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync")
        options = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off"
        call("pg_ctl", "start", "--wait", f"--log={folder / 'log'}", f"--options={options}")
        try:
            yield f"postgresql+psycopg2://someone:{PASSWORD}@127.0.0.1:{port}/postgres"
        finally:
            call("pg_ctl", "stop", "--mode=immediate")
