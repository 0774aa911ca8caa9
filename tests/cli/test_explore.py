"""``rocktokens explore`` as a user starts it: the link works, nothing else does, and Ctrl-C ends it quietly."""

import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from command_line import FinishedRun, refuse, snapshot, succeed


@contextmanager
def explorer(*arguments: str | Path, browser: Path | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A started explorer and its link."""
    command = [sys.executable, "-m", "rocktokens.cli.main", "explore", *map(str, arguments), "--json"]
    command += ["--no-browser"] if browser is None else []
    environment = {**os.environ, "BROWSER": f"{browser} %s"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["url"]
    finally:
        process.kill()
        process.wait(timeout=10)


def get(url: str, path: str | None = None, host: str | None = None) -> tuple[int, bytes]:
    """Status and body; the path is sent as it is."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    connection.request("GET", path or parts.path, headers={"Host": host} if host else {})
    response = connection.getresponse()
    return response.status, response.read()


def test_from_start_to_interrupt(finished: FinishedRun):
    before = snapshot(finished.path)
    with explorer(finished.path, finished.path) as (process, url):
        assert get(url)[1].startswith(b"<!DOCTYPE html>")
        status, body = get(url + "api/runs")
        assert status == 200 and [run["name"] for run in json.loads(body)["runs"]] == ["run", "run"]
        token = urlsplit(url).path
        for path in ("/", "/x/", token[:-2] + "/", token + "../../../../etc/passwd", token + "api/runs/../../x"):
            assert get(url, path)[0] == 404
        assert get(url, host="evil.example")[0] == 403
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr) == (0, "", "")
    assert snapshot(finished.path) == before


def test_links_differ_from_start_to_start(finished: FinishedRun):
    with explorer(finished.path) as (_, one), explorer(finished.path.parent) as (_, other):
        assert urlsplit(one).path != urlsplit(other).path
        assert get(one, urlsplit(other).path)[0] == 404
        found = json.loads(get(other + "api/runs")[1])
        assert finished.path.name in [run["name"] for run in found["runs"]] and not found["opens_a_run"]


def test_the_link_is_in_nobodys_arguments(finished: FinishedRun, tmp_path: Path):
    """A process's arguments can be read by every user of the machine, so the browser gets a file of its owner's."""
    browser, said = tmp_path / "browser", tmp_path / "said"
    browser.write_text(f'#!/bin/sh\necho "$@" > {said}.part && mv {said}.part {said}\n', encoding="utf-8")
    browser.chmod(0o700)
    with explorer(finished.path, browser=browser) as (process, url):
        until = time.monotonic() + 30
        while not said.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        address = urlsplit(said.read_text(encoding="utf-8").strip())
        door = Path(unquote(address.path))
        assert address.scheme == "file" and urlsplit(url).path not in address.geturl()
        assert [stat.S_IMODE(path.stat().st_mode) for path in (door, door.parent)] == [0o600, 0o700]
        assert re.findall(r'content="0; *url=([^"]+)"', door.read_text(encoding="utf-8")) == [url]
        assert get(url)[0] == 200
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (0, "")
    assert not door.parent.exists()


def test_other_machines_only_with_a_warning(finished: FinishedRun):
    with explorer(finished.path, "--host", "0.0.0.0") as (process, url):
        assert get(url)[0] == 200
        assert get(url, host=socket.gethostname())[0] == 200
        assert get(url, host="evil.example")[0] == 403
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert stderr.startswith("warning: 0.0.0.0 can be reached by others") and process.returncode == 0


def test_what_is_not_a_run(tmp_path: Path):
    refuse("explore", tmp_path, "--no-browser", naming=(str(tmp_path), "not a run directory"))


def test_a_bundle_to_share(finished: FinishedRun, tmp_path: Path):
    before, out = snapshot(finished.path), tmp_path / "page"
    written = succeed("explore", finished.path, "--bundle", out, "--json").record
    page = Path(written["page"])
    assert (page, page.stat().st_size) == (out / "index.html", written["bytes"])
    first = page.read_bytes()
    told = succeed("explore", finished.path, "--bundle", out).stdout
    assert f"bundle: {page}" in told and all(sentence in told for sentence in written["left_out"])
    assert page.read_bytes() == first and snapshot(finished.path) == before
    refuse("explore", finished.path, "--bundle", tmp_path, naming=(str(tmp_path), "new or empty folder"))
    refuse("explore", finished.path, "--bundle", finished.path, naming=(str(finished.path), "new or empty folder"))


def test_a_port_in_use(finished: FinishedRun):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refuse(
            "explore", finished.path, "--no-browser", "--port", str(port), naming=(f"port {port}", "in use", "--port")
        )


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_this_machines(finished: FinishedRun, host: str):
    refuse("explore", finished.path, "--no-browser", "--host", host, naming=(host, "address of this machine"))
