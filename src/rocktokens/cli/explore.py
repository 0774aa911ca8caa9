"""``rocktokens explore``: a local, read-only web page over runs, until Ctrl-C; or a folder of it to share."""

import html
import socket
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from rocktokens.cli.common import AsJson, notes, output, print_json, terminal
from rocktokens.display.numbers import byte_size
from rocktokens.errors import RocktokensError

if TYPE_CHECKING:
    from rocktokens.report.explorer.shelf import Shelf

LOCAL = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")


def explore(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Folders of runs, or folders that hold runs.", show_default=False),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own is open to others.")
    ] = LOCAL,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="DIR", help="Write the page and its data to a folder to share, and end."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at rollouts token by token, compare checkpoints and runs, and watch training, in a browser.

    Example: [bold]rocktokens explore runs/mine runs/other[/bold]; every run below a folder:
    [bold]rocktokens explore runs[/bold]

    To share: [bold]rocktokens explore runs/mine --bundle page[/bold] writes page/index.html, which needs no server.

    On another machine: [bold]rocktokens explore runs/mine --port 8000 --no-browser[/bold], and here
    [bold]ssh -L 8000:localhost:8000 MACHINE[/bold].
    """
    with notes.status("opening"):
        from rocktokens.report.explorer.security import LOOPBACK, new_token
        from rocktokens.report.explorer.shelf import Shelf

        shelf = Shelf(runs)
        for number in range(shelf.n_given):
            shelf.view(number)
    if bundle is not None:
        return _write_bundle(shelf, bundle, as_json)
    with _listen(host, port) as listener:
        token = new_token()
        # Where a browser on this machine finds the server.
        name = {"0.0.0.0": LOCAL, "::": "::1"}.get(host, host)
        url = f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}/{token}/"
        if host not in LOOPBACK:
            notes.print(
                f"warning: {host} can be reached by others: anyone with the link can read these runs, and it "
                "travels unencrypted. An ssh tunnel to a local explorer is safer.",
                style="yellow",
                soft_wrap=True,
                markup=False,
            )
        if as_json:
            print_json({"url": url, "runs": [str(path) for path in runs]})
        else:
            output.print(f"explorer: {url}", soft_wrap=True, markup=False, highlight=False)
            output.print("Anyone with this link can read the runs. Press Ctrl-C to stop.", markup=False)
        with _browser_at(url) if browser else nullcontext():
            _serve(shelf, token, _hosts(host), listener)


def _write_bundle(shelf: "Shelf", folder: Path, as_json: bool) -> None:
    from rocktokens.report.explorer.bundle import write_bundle

    written = write_bundle(shelf, folder, terminal)
    if as_json:
        return print_json(written.to_record())
    for sentence in written.left_out:
        output.print(sentence, soft_wrap=True, markup=False, highlight=False)
    output.print(f"bundle: {written.page} ({byte_size(written.bytes)})", soft_wrap=True, markup=False)
    output.print("Anyone with this folder can read what it shows of the runs.", markup=False)


@contextmanager
def _browser_at(url: str) -> Iterator[None]:
    """Open a browser by way of a file that only its owner can read, and that is there until the end.

    What a browser is started with can be read by every user of the machine, and ``url`` holds the secret.
    """
    with TemporaryDirectory(prefix="rocktokens-") as folder:
        door = Path(folder) / "explorer.html"
        door.touch(mode=0o600)
        link = html.escape(url)
        door.write_text(
            f'<!DOCTYPE html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={link}">'
            f'<title>rocktokens explorer</title><a href="{link}">Open the explorer</a>\n',
            encoding="utf-8",
        )
        # Beside the server, which answers it: some browsers do not return before they are closed.
        threading.Thread(target=webbrowser.open, args=(door.as_uri(),), daemon=True).start()
        yield


def _listen(host: str, port: int) -> socket.socket:
    """Open a socket that takes connections from now on."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RocktokensError(
            f"cannot listen on {host}, port {port} ({reason}): give another --port, or an address of this machine"
        ) from None


def _hosts(host: str) -> frozenset[str]:
    """Return what a browser may call the server; on all addresses, any of them and the machine's name."""
    from rocktokens.report.explorer.security import LOOPBACK

    if host not in EVERYWHERE:
        return LOOPBACK | {host.lower()}
    import psutil

    addresses = (address.address for interface in psutil.net_if_addrs().values() for address in interface)
    return LOOPBACK | {name.lower() for name in (socket.gethostname(), socket.getfqdn(), *addresses)}


def _serve(shelf: "Shelf", token: str, hosts: frozenset[str], listener: socket.socket) -> None:
    """Answer until an interrupt, which is how this ends."""
    import uvicorn

    from rocktokens.report.explorer.server import make_app, server_config

    try:
        uvicorn.Server(server_config(make_app(shelf, token, hosts))).run(sockets=[listener])
    except KeyboardInterrupt:
        return
