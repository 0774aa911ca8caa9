"""Who may ask a local server of private data, and what a browser may do with the answer.

1. The Host header must be a name of this server: a web site whose own name is pointed at this machine has another
   (DNS rebinding). An Origin header, if there is one, must be that same host.
2. Only GET and HEAD.
3. The first segment of the path is a secret, compared in constant time.
4. Every answer carries the headers that keep it out of frames, caches, referrers, other sites and content sniffing,
   and a Content-Security-Policy (see ``report.csp``).
"""

import re
import secrets
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rocktokens.report.csp import NOTHING_RUNS
from rocktokens.report.views.run_view import to_json

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
METHODS = ("GET", "HEAD")
TOKEN_BYTES = 32
LAST_PORT = 65535
_HOST = re.compile(r"(?:\[(?P<address>[\w:.%-]+)\]|(?P<name>[\w.-]+))(?::(?P<port>[1-9]\d{0,4}))?", re.ASCII)
CSP = "content-security-policy"
NO_FRAMES = "frame-ancestors 'none'"
HEADERS = {
    CSP: "; ".join((*NOTHING_RUNS, NO_FRAMES)),
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def new_token() -> str:
    """Make a secret for one start of the server, fit for a URL."""
    return secrets.token_urlsafe(TOKEN_BYTES)


class Guard:
    """Refuses what must not reach the application, and puts the headers on all that leaves it.

    ``token`` is the secret first segment of every path; ``hosts`` are what this server may be called, without the port.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str] = LOOPBACK) -> None:
        self.app = app
        self._token = token.encode()
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or let the application do so."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            raise RuntimeError(f"a {scope['type']} connection is not served")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(scope) or self.app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or _name(hosts[0]) not in self._hosts:
            return refused(403, "this host is not served: open the link that `rocktokens explore` printed")
        if any(origin != f"{scope['scheme']}://{hosts[0]}" for origin in origins):
            return refused(403, "requests from other sites are not answered: open the explorer itself")
        if scope["method"] not in METHODS:
            return refused(405, "the explorer only reads: use GET or HEAD", {"allow": ", ".join(METHODS)})
        first = scope["path"].lstrip("/").split("/", 1)[0]
        if not secrets.compare_digest(first.encode("utf-8", "surrogatepass"), self._token):
            return refused(404, "there is nothing here: open the link that `rocktokens explore` printed")
        return None


def _name(host: str) -> str | None:
    """Return a host without its port and brackets; None where it is no host, or its port none that can be open."""
    match = _HOST.fullmatch(host)
    if match is None or int(match["port"] or 1) > LAST_PORT:
        return None
    return (match["address"] or match["name"]).lower()


def refused(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    """Answer with one sentence as JSON."""
    return Response(to_json({"error": sentence}), status, headers, media_type="application/json")
