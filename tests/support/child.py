"""What the servers that tests start have in common: a free port, and an end."""

from __future__ import annotations

import socket
import subprocess

STOP_TIMEOUT_S = 10


def free_ports(count: int) -> list[int]:
    """`count` different loopback TCP ports that nobody listened on a moment ago.

    Somebody else may take one before it is used; a server that can choose its own port should do so instead.
    """
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def stop(process: subprocess.Popen[str]) -> None:
    """Ask the process to end, insist after `STOP_TIMEOUT_S`, and close its pipes."""
    if process.stdin is not None:
        process.stdin.close()
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
