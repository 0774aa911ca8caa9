"""Every route of the explorer, enumerated from the application: who is answered, what is refused, and in what words."""

import base64
import hashlib
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from explorer_run import CHECKPOINTS, CLASS_IDS, LENGTH, N_ROLLOUTS, ROCK_IDS, VOCABULARY, make_other_run, make_run
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount, Route
from starlette.testclient import TestClient

from hostile_texts import HOSTILE
from replay_records import make_replay
from rocktokens.report.explorer import answers
from rocktokens.report.explorer.answers import ROUTES
from rocktokens.report.explorer.security import HEADERS, Guard, new_token
from rocktokens.report.explorer.server import make_app, server_config
from rocktokens.report.explorer.shelf import Shelf
from rocktokens.report.views.run_view import RunView
from rocktokens.run_dir import RunDir

TOKEN = "secret-token"
ORIGIN = "http://127.0.0.1"
VALUES = {"run": "0", "rollout": "1", "token_id": str(ROCK_IDS[0])}
TRAVERSALS = (
    "%2e%2e",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%2fetc%2fpasswd",
    "..%5c..%5cwindows",
    "%00",
    "0%00",
    "-1",
    "1e3",
    "0x1",
    "1.5",
    "%D9%A3",
    "9" * 30,
    "9" * 6000,
    "0;drop table x",
    "0%20or%201=1",
    "'",
    "%3Cscript%3E",
)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf([make_run(tmp_path_factory.mktemp("runs") / "hostile")])


@pytest.fixture(scope="module")
def app(shelf: Shelf) -> Starlette:
    return make_app(shelf, TOKEN)


@pytest.fixture(scope="module")
def client(app: Starlette) -> TestClient:
    return TestClient(app, base_url=ORIGIN, raise_server_exceptions=True)


def paths(routes: list[BaseRoute], above: str = "") -> Iterator[str]:
    for route in routes:
        if isinstance(route, Mount):
            yield from paths(route.routes, above + route.path)
        else:
            assert isinstance(route, Route), f"{route} is no route whose manners are known"
            yield above + route.path


TEMPLATES = ["/", *(f"/api/{route}" for route in ROUTES)]
each_route = pytest.mark.parametrize("template", TEMPLATES)


def address(template: str, token: str = TOKEN) -> str:
    return f"/{token}{template.format(**VALUES)}"


def require_sentence(response, status: int) -> str:
    """The one sentence of a refusal."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    record = response.json()
    assert list(record) == ["error"] and "Traceback" not in record["error"] and "\n" not in record["error"]
    return record["error"]


# Every route


def test_the_routes_are_these(app: Starlette):
    assert sorted(path.removeprefix(f"/{TOKEN}") for path in paths(app.routes)) == sorted(TEMPLATES)
    assert sorted(TEMPLATES) == sorted(
        [
            "/",
            "/api/runs",
            "/api/runs/{run}",
            "/api/runs/{run}/version",
            "/api/runs/{run}/rollouts",
            "/api/runs/{run}/rollouts/{rollout}",
            "/api/runs/{run}/rollouts/{rollout}/history",
            "/api/runs/{run}/types/{token_id}",
            "/api/runs/{run}/classes",
            "/api/runs/{run}/knockouts",
            "/api/runs/{run}/knockouts/{token_id}",
            "/api/runs/{run}/live",
        ]
    )


@each_route
def test_an_answer_carries_the_headers(client: TestClient, template: str):
    response = client.get(address(template))
    assert response.status_code == 200, response.text
    plain = {name: value for name, value in HEADERS.items() if name != "content-security-policy"}
    assert {name: response.headers[name] for name in plain} == plain
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "*" not in policy and "http" not in policy


@each_route
def test_head_is_get_without_a_body(client: TestClient, template: str):
    response = client.head(address(template))
    assert (response.status_code, response.content) == (200, b"")


@each_route
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "evil.example:8000",
        "localhost@evil.example",
        "localhost:80@evil.example",
        "evil.example#localhost",
        "[::1",
        "127.0.0.1:port",
        "127.0.0.1:",
        "127.0.0.1:0",
        "127.0.0.1:-80",
        "127.0.0.1:65536",
        "127.0.0.1:80:80",
        "[::1]80",
        "127.0.0.2",
        "evillocalhost",
        "evil.localhost",
        "0.0.0.0",
        "",
    ],
)
def test_another_host_is_refused(client: TestClient, template: str, host: str):
    require_sentence(client.get(address(template), headers={"host": host}), 403)


@each_route
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "LOCALHOST", "[::1]:8000"])
def test_this_machine_is_answered(client: TestClient, template: str, host: str):
    assert client.get(address(template), headers={"host": host}).status_code == 200


@each_route
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:81", "http://localhost", "file://"]
)
def test_another_origin_is_refused(client: TestClient, template: str, origin: str):
    response = client.get(address(template), headers={"origin": origin})
    require_sentence(response, 403)
    assert "access-control-allow-origin" not in response.headers


@each_route
def test_its_own_origin_is_answered(client: TestClient, template: str):
    assert client.get(address(template), headers={"origin": ORIGIN}).status_code == 200


@each_route
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"])
def test_only_reading(client: TestClient, template: str, method: str):
    response = client.request(method, address(template))
    require_sentence(response, 405)
    assert response.headers["allow"] == "GET, HEAD"


@each_route
@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), f"x/{TOKEN}", "%00", "é"])
def test_without_the_token_there_is_nothing(client: TestClient, template: str, token: str):
    response = client.get(address(template, token))
    assert TOKEN not in require_sentence(response, 404)
    assert response.headers["content-security-policy"] == HEADERS["content-security-policy"]


@each_route
@pytest.mark.parametrize("value", TRAVERSALS)
def test_a_path_of_the_client_leads_nowhere(client: TestClient, template: str, value: str):
    for name in re.findall(r"{(\w+)}", template) or ["trailing"]:
        path = f"/{TOKEN}{template.format(**{**VALUES, name: value})}"
        path = f"{path}/{value}" if name == "trailing" else path
        response = client.get(path)
        assert response.status_code in (400, 404), (path, response.text)
        assert "root:" not in require_sentence(response, response.status_code)


@each_route
def test_what_is_not_a_parameter_is_refused(client: TestClient, template: str):
    if template == "/":
        return  # the page is the same whatever is asked of it
    joined = f"{address(template)}?"
    for said in ("path=../../etc/passwd", "sql=select", "__proto__=1", f"{'x' * 9000}=1"):
        assert "not a parameter" in require_sentence(client.get(joined + said), 400)


# What a client may say


@pytest.mark.parametrize(
    ("said", "naming"),
    [
        ("checkpoint=last", "checkpoint = 'last'"),
        ("checkpoint=-1", "checkpoint = '-1'"),
        ("checkpoint=99999999999", "checkpoint"),
        ("page=-1", "page"),
        ("rock=perhaps", "rock = 'perhaps'"),
        ("token_id=4294967296", "token_id"),
        ("category=nonsense", "category = 'nonsense'"),
        ("category=other'--", "category"),
        ("kl_low=nan", "kl_low"),
        ("kl_low=inf", "kl_low"),
        ("kl_high=-1", "kl_high"),
        ("sort=kl;drop", "sort"),
        ("sort=--mean_kl", "sort"),
        (f"text={'x' * 201}", "text"),
        ("correct=", "correct"),
    ],
)
def test_a_wrong_value_is_named(client: TestClient, said: str, naming: str):
    sentence = require_sentence(client.get(f"/{TOKEN}/api/runs/0/rollouts?{said}"), 400)
    assert sentence.startswith(naming) and len(sentence) < 300


def test_a_value_given_twice(client: TestClient):
    response = client.get(f"/{TOKEN}/api/runs/0/rollouts?page=0&page=1")
    assert "page was given 2 times" in require_sentence(response, 404)


@pytest.mark.parametrize(
    ("path", "naming"),
    [
        ("runs/7/live", "run 7"),
        ("runs/0/rollouts/999", "rollout 999"),
        ("runs/0/rollouts/1?checkpoint=3", "checkpoint 3"),
        ("runs/0/knockouts/8", "token 8"),
        ("runs/0/rollouts?kl_low=2&kl_high=1", "kl_low = 2"),
    ],
)
def test_what_is_not_there_is_named(client: TestClient, path: str, naming: str):
    assert naming in require_sentence(client.get(f"/{TOKEN}/api/{path}"), 404)


def test_a_failure_is_one_sentence_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(_: RunView) -> None:
        raise KeyError("alpha")

    monkeypatch.setattr(answers, "knockouts", fail)
    client = TestClient(make_app(Shelf([make_run(tmp_path / "run")]), TOKEN), base_url=ORIGIN)
    response = client.get(f"/{TOKEN}/api/runs/0/knockouts")
    assert "failed to answer" in require_sentence(response, 500)
    assert response.headers["x-content-type-options"] == "nosniff"


# Answers


def test_answers_are_the_views(client: TestClient):
    def ask(path: str):
        return client.get(f"/{TOKEN}/api/{path}").json()

    run = ask("runs/0")
    assert (run["checkpoints"], run["reference"]) == (list(CHECKPOINTS), CHECKPOINTS[-1])
    assert [rock["id"] for rock in run["rocks"]] == list(ROCK_IDS)
    assert ask("runs/0/rollouts")["total"] == N_ROLLOUTS
    assert ask("runs/0/rollouts?sort=-mean_kl&rock=true&text=step")["total"] > 0
    strip = ask("runs/0/rollouts/3?checkpoint=0")
    assert (strip["checkpoint"], len(strip["tokens"])) == (0, LENGTH)
    assert [step for step, _ in ask("runs/0/rollouts/3/history")["0"]] == list(CHECKPOINTS)
    assert [own["ids"] for own in ask("runs/0/classes")["classes"]] == list(map(list, CLASS_IDS))
    assert ask("runs/0/live")["step"] == 2
    assert (ask("runs/0/knockouts")["alpha"], len(ask("runs/0/knockouts")["bans"])) == (0.05, len(ROCK_IDS) + 1)
    assert ask(f"runs/0/knockouts/{ROCK_IDS[0]}")["pairs"]


def test_rocks_come_with_what_their_numbers_rest_on(tmp_path: Path):
    paths = (make_run(tmp_path / "run"), make_other_run(tmp_path / "other"))
    client = TestClient(make_app(Shelf(paths), TOKEN), base_url=ORIGIN)
    overviews = [client.get(f"/{TOKEN}/api/runs/{number}").json() for number in range(2)]
    assert ["held out" in run["table"]["titles"] for run in overviews] == [False, True]
    assert ["paper's rule" in run["table"]["notes"][-1] for run in overviews] == [False, True]
    assert overviews[1]["summary"]["measured_on"] == "held-out half"
    assert overviews[1]["rocks"][0]["held_out_mean_kl"] == 1.25
    assert client.get(f"/{TOKEN}/api/runs/1/knockouts").json()["alpha"] == 0.1


def test_a_run_says_what_its_teacher_gave(tmp_path: Path):
    runs = [RunDir(make_run(tmp_path / name)) for name in ("states", "named")]
    for run, served in zip(runs, ("states float32", "top-20 + tail"), strict=True):
        with run.lock():
            run.update_manifest(replay=make_replay(served=served).to_manifest())
    client = TestClient(make_app(Shelf([run.path for run in runs]), TOKEN), base_url=ORIGIN)
    said = [client.get(f"/{TOKEN}/api/runs/{number}").json()["teacher"] for number in range(2)]
    assert said == ["", " (teacher: top-20 + tail)"]


def test_a_run_without_rocks_or_bans(tmp_path: Path):
    path = make_run(tmp_path / "run")
    RunDir(path).drop(["rocks.json", "knockout.json"])
    client = TestClient(make_app(Shelf([path]), TOKEN), base_url=ORIGIN)
    run = client.get(f"/{TOKEN}/api/runs/0").json()
    assert (run["summary"], run["rocks"], run["table"]) == (None, [], None)
    assert client.get(f"/{TOKEN}/api/runs/0/knockouts").json() == {"alpha": None, "bans": []}


@each_route
def test_no_answer_holds_markup(client: TestClient, template: str):
    if template == "/":
        return
    assert "<" not in client.get(address(template)).text


def test_the_corpus_is_large_and_all_of_it_is_shown(client: TestClient):
    strips = (client.get(f"/{TOKEN}/api/runs/0/rollouts/{number}").json() for number in range(N_ROLLOUTS))
    shown = {token["token_id"] for strip in strips for token in strip["tokens"]}
    assert shown == set(range(len(VOCABULARY))) and len(HOSTILE) >= 300


# The page


def test_the_policy_allows_just_what_the_page_is_made_of(client: TestClient):
    response = client.get(f"/{TOKEN}/")
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        inline = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline)
        assert policy[directive].split() == [f"'sha256-{digest}'" for digest in digests]
    assert policy["connect-src"] == "'self'" and policy["trusted-types"] == "'none'"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", response.text), "the page names another site"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", response.text)
    assert not re.search(r"<[^>]+\s(style|on\w+)=", re.sub(r"<script>.*?</script>", "", response.text, flags=re.DOTALL))


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    pairs = [digits[at : at + 2] for at in (0, 2, 4)] if len(digits) == 6 else [digit * 2 for digit in digits]
    shares = [int(pair, 16) / 255 for pair in pairs]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_levels_are_readable_and_in_order(client: TestClient, theme: int):
    style = re.findall(r"<style>(.*?)</style>", client.get(f"/{TOKEN}/").text, re.DOTALL)[0]
    [block] = re.findall(r"{([^{}]*--paper:[^{}]*)}", style)
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\);", block)
    colours = {name: pair[theme] for name, *pair in pairs}
    levels = [luminance(colours[f"level-{level}"]) for level in range(10)]
    assert levels == sorted(levels, reverse=theme == 0)
    assert all(contrast(colours[f"level-{level}"], colours[f"on-{level}"]) >= 4.5 for level in range(10))
    texts = ("ink", "faint", "accent", "good", "bad")
    assert {(a, b) for a in texts for b in ("paper", "well") if contrast(colours[a], colours[b]) < 4.5} == set()


# Connections


@pytest.fixture(scope="module")
def address_of_server(shelf: Shelf) -> Iterator[tuple[str, int]]:
    """A real server that waits two seconds for requests: a busy machine may take one to send a whole one."""
    config = server_config(make_app(shelf, TOKEN))
    config.timeout_keep_alive = 2
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize("sent", ["", "GET /", "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", "whole"])
def test_an_idle_connection_is_closed(address_of_server: tuple[str, int], sent: str):
    """One that says nothing, stops in the middle, or has its answer; the client waits as long as it takes."""
    whole = f"GET /{TOKEN}/api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with socket.create_connection(address_of_server, timeout=60) as client:
        client.sendall((whole if sent == "whole" else sent).encode())
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 200") if sent == "whole" else answer == b""


# The guard


def test_tokens_are_secrets():
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100 and all(re.fullmatch(r"[\w-]{43}", token) for token in tokens)


def test_two_host_headers_are_refused(client: TestClient):
    response = client.get(f"/{TOKEN}/", headers=[("host", "127.0.0.1"), ("host", "evil.example")])
    require_sentence(response, 403)


def test_a_websocket_is_not_served(app: Starlette):
    with (
        pytest.raises(RuntimeError, match="websocket"),
        TestClient(app, base_url=ORIGIN).websocket_connect(f"/{TOKEN}/"),
    ):
        pass


def test_other_hosts_are_answered_where_they_were_named(shelf: Shelf):
    client = TestClient(make_app(shelf, TOKEN, hosts={"box.example"}), base_url="http://box.example:9")
    assert [run["name"] for run in client.get(f"/{TOKEN}/api/runs").json()["runs"]] == ["hostile"]
    for other in ("127.0.0.1", "evilbox.example", "evil.box.example", "box.example.evil.example", "box.exampl"):
        require_sentence(client.get(f"/{TOKEN}/api/runs", headers={"host": other}), 403)


def test_the_guard_stands_before_the_application():
    async def never(scope, receive, send):
        raise AssertionError("a refused request reached the application")

    for first in ("other", TOKEN[:-1], TOKEN[0], f"{TOKEN}x", ""):
        require_sentence(TestClient(Guard(never, TOKEN), base_url=ORIGIN).get(f"/{first}/"), 404)


def garble_part(run: Path) -> str:
    """Damage the pages of a trace part; its footer and its listed hash fit."""
    part = next(own.path for own in RunDir(run).files("traces/checkpoint="))
    content = bytearray((run / part).read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
    (run / part).write_bytes(content)
    rows = RunDir(run).listed(part).rows
    RunDir(run).commit(part, lambda path: path.write_bytes(content), rows)
    return part


DAMAGES = {
    "part": (garble_part, "cannot be read as Parquet"),
    "tokenizer": (lambda run: RunDir(run).commit_text("tokenizer/tokenizer.json", "{"), "is no tokenizer"),
    "rocks": (lambda run: RunDir(run).commit_text("rocks.json", "[" * 200_000), "nested too deep"),
    "manifest": (lambda run: (run / "manifest.json").write_text("[" * 200_000), "nested too deep"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_that_was_listed_is_a_sentence_on_every_page(damage: str, tmp_path: Path):
    """Nothing that lies on a disk may end in a failure of the explorer."""
    run, (make_damage, problem) = make_run(tmp_path / "run"), DAMAGES[damage]
    shelf = Shelf([run])
    make_damage(run)
    client = TestClient(make_app(shelf, TOKEN), base_url=ORIGIN)
    responses = [client.get(address(template)) for template in TEMPLATES]
    assert {response.status_code for response in responses} <= {200, 404}
    refused = [response for response in responses if response.status_code == 404]
    assert refused and all(problem in require_sentence(response, 404) for response in refused)


def test_a_refusal_that_names_a_run_holds_no_markup(tmp_path: Path):
    path = make_run(tmp_path / "<img src=x onerror=window.executed=1>")
    client = TestClient(make_app(Shelf([path]), TOKEN), base_url=ORIGIN)
    refused = client.get(f"/{TOKEN}/api/runs/0/knockouts/7")
    assert refused.status_code == 404 and "<" not in refused.text
    assert str(path) in refused.json()["error"] and refused.headers["content-type"] == "application/json"
