"""``python -m bebop.view RUN [RUN ...]``: view runs in the browser, token by token, also while they run."""

import asyncio
import errno
import socket
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from bebop.command import Parser, run_main, whole
from bebop.errors import UserError
from bebop.view.folders import HOST, PORT, folders
from bebop.view.server import application

TRIED = 50  # ports that are tried from PORT on if none is configured


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the page until interrupted; raise ``UserError`` for a folder that is no run, or an occupied port."""
    parser = Parser(
        prog="python -m bebop.view",
        description="Look at runs in the browser: curves, drift alarms, every completion kept (monitor.trace) and how "
        "each of its tokens came about. The page follows a job that still runs. It is served on this machine alone.",
        epilog="On a machine without a browser: ssh -L 8710:127.0.0.1:8710 MACHINE, and open the address at home.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, for instance runs/gcd")
    parser.add_argument(
        "--port", type=whole(1), metavar="N", help=f"port to listen on (default: the first free one from {PORT})"
    )
    parser.add_argument("--no-browser", action="store_true", help="print the address and open no browser")
    options = parser.parse_args(arguments)
    app = application(folders(options.runs))
    with _listening(options.port) as listening:
        address = f"http://{HOST}:{listening.getsockname()[1]}/"
        sys.stdout.write(f"{address} (Ctrl-C ends it)\n")
        sys.stdout.flush()
        if not options.no_browser:
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):  # the normal way to end
            asyncio.run(_serve(app, listening))
    return 0


async def _serve(app: web.Application, listening: socket.socket) -> None:
    """Serve until the process is interrupted."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _listening(port: int | None) -> socket.socket:
    """Return a socket on ``port``, or on the first free port from PORT on; raise ``UserError`` if there is none."""
    for tried in range(PORT, PORT + TRIED) if port is None else (port,):
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # A port that a viewer has just released counts as free; one with another listener does not.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, tried))
            listening.listen(128)
        except OSError as error:
            listening.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or tried == port:
                raise UserError(f"--port {tried} is not possible: {error.strerror}; give another") from None
        else:
            return listening
    raise UserError(f"ports {PORT} to {PORT + TRIED - 1} are all taken: give a free one with --port")


if __name__ == "__main__":
    run_main(main)
