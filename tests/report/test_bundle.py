"""The bundle: what it holds is what the server answers, its size is bounded, and nothing else is overwritten."""

import base64
import hashlib
import html
import json
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from explorer_run import CLASS_IDS, N_ROLLOUTS, ROCK_IDS, make_run
from starlette.testclient import TestClient

from rocktokens.errors import RocktokensError
from rocktokens.report.explorer import bundle
from rocktokens.report.explorer.bundle import MAX_PAIRS, write_bundle
from rocktokens.report.explorer.server import make_app
from rocktokens.report.explorer.shelf import Shelf
from rocktokens.run_dir import RunDir

TOKEN = "secret-token"
FEW_ROLLOUTS, FEW_TYPES = 6, 12
BLOCK = r'<script type="application/zlib" data-ask="([^"]*)">([\w+/=]*)</script>'


@pytest.fixture(scope="module", autouse=True)
def _few() -> Iterator[None]:
    """Fewer rollouts and types than a user gets: the time goes into reading them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "MAX_ROLLOUTS", FEW_ROLLOUTS)
        patch.setattr(bundle, "MAX_TYPES", FEW_TYPES)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "hostile")


@pytest.fixture(scope="module")
def text(run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bundle")
    summary = write_bundle(Shelf([run]), folder)
    assert summary.bytes == summary.page.stat().st_size and summary.runs == ("hostile",)
    return summary.page.read_text(encoding="utf-8")


def blocks(text: str) -> dict[str, str]:
    """The answers of a bundle by what was asked."""
    found = re.findall(BLOCK, text)
    return {html.unescape(name): zlib.decompress(base64.b64decode(packed)).decode() for name, packed in found}


def test_a_block_is_what_the_server_answers(run: Path, text: str):
    """Every one of them; where the bundle shows fewer rollouts or pairs, the server's answer is the longer one."""
    client = TestClient(make_app(Shelf([run]), TOKEN), base_url="http://127.0.0.1")
    found = blocks(text)
    assert {name.split("/")[2].split("?")[0] for name in found if name.count("/") > 1} == {
        "rollouts",
        "types",
        "classes",
        "knockouts",
        "live",
    }
    differing = set()
    for name, answer in found.items():
        response = client.get(f"/{TOKEN}/api/{name}")
        assert response.status_code == 200, name
        if response.text != answer:
            differing.add(name)
    pairs = {f"runs/0/knockouts/{token_id}?page=0" for token_id in (*ROCK_IDS, 6)}
    shorter = {name for name in found if "/types/" in name or name.startswith("runs/0/rollouts?")}
    assert differing <= pairs | shorter | {"runs"} and len(found) - len(differing) > 3 * FEW_ROLLOUTS
    for name in pairs:
        here, there = json.loads(found[name]), client.get(f"/{TOKEN}/api/{name}").json()
        assert here["pairs"] == there["pairs"][:MAX_PAIRS] and here["total"] == there["total"]


def test_all_that_the_page_links_to_is_there(text: str):
    found = blocks(text)
    rows = json.loads(found["runs/0/rollouts?checkpoint=10&page=0&sort=rollout_id"])["rows"]
    assert len(rows) == FEW_ROLLOUTS
    for row in rows:
        rollout = f"runs/0/rollouts/{row['rollout_id']}"
        assert {f"{rollout}/history", f"{rollout}?checkpoint=0", f"{rollout}?checkpoint=10"} <= set(found)
    for token_id in (*ROCK_IDS, *CLASS_IDS[0]):
        named = f"runs/0/rollouts?checkpoint=10&page=0&sort=rollout_id&token_id={token_id}"
        assert {named, f"runs/0/types/{token_id}"} <= set(found)


def test_the_same_runs_give_the_same_bytes_wherever_they_lie(run: Path, text: str, tmp_path: Path):
    copy = shutil.copytree(run, tmp_path / "elsewhere/hostile")
    again = write_bundle(Shelf([copy]), tmp_path / "out")
    assert again.page.read_text(encoding="utf-8") == text
    assert str(tmp_path) not in text and str(run) not in "".join(blocks(text).values())


def test_the_policy_allows_the_page_and_nothing_else(text: str):
    [content] = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    policy = dict(part.split(" ", 1) for part in html.unescape(content).split("; "))
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        inline = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(own.encode()).digest()).decode() for own in inline)
        assert policy[directive].split() == [f"'sha256-{digest}'" for digest in digests]
    assert policy["default-src"] == policy["trusted-types"] == "'none'" and "connect-src" not in policy
    assert text.index("Content-Security-Policy") < text.index("<style>")


def test_the_size_is_bounded_and_what_is_left_out_is_said(run: Path, text: str, tmp_path: Path):
    bound = len(re.sub(BLOCK, "", text)) + 70_000
    summary = write_bundle(Shelf([run]), tmp_path / "out", max_bytes=bound)
    small = summary.page.read_text(encoding="utf-8")
    found = blocks(small)
    shown = {int(name.split("/")[3]) for name in found if name.endswith("/history")}
    assert summary.bytes <= bound and 0 < len(shown) < FEW_ROLLOUTS
    [sentence] = summary.left_out
    assert sentence.startswith(f"hostile: the bundle holds {len(shown)} of {N_ROLLOUTS} rollouts, details of ")
    assert json.loads(found["runs"])["left_out"] == sentence
    assert json.loads((tmp_path / "out/bundle.json").read_text(encoding="utf-8"))["left_out"] == [sentence]
    listed = json.loads(found["runs/0/rollouts?checkpoint=10&page=0&sort=-mean_kl"])
    assert {row["rollout_id"] for row in listed["rows"]} == shown and listed["total"] == len(shown)
    cards = (json.loads(answer) for name, answer in found.items() if "/types/" in name)
    assert {place["rollout_id"] for card in cards for place in card["occurrences"]} <= shown
    with pytest.raises(RocktokensError, match=r"larger than it may be.*give fewer runs"):
        write_bundle(Shelf([run]), tmp_path / "none", max_bytes=bound - 69_000)
    assert not (tmp_path / "none").exists()


def test_two_runs_show_the_rollouts_they_share(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = shutil.copytree(run, tmp_path / "other")
    RunDir(other).drop(["rocks.json"])  # else the same rollouts would show most in both
    monkeypatch.setattr(bundle, "MAX_ROLLOUTS", 3)
    monkeypatch.setattr(bundle, "MAX_TYPES", 1)
    found = blocks(write_bundle(Shelf([run, other]), tmp_path / "out").page.read_text(encoding="utf-8"))
    first, second = (
        {name.split("/")[3] for name in found if re.fullmatch(rf"runs/{number}/rollouts/\d+/history", name)}
        for number in range(2)
    )
    assert first == second and len(first) == 3


def test_a_folder_of_something_else_is_left_alone(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundle, "MAX_ROLLOUTS", 1)
    monkeypatch.setattr(bundle, "MAX_TYPES", 1)
    (tmp_path / "notes.txt").write_text("mine")
    for taken in (tmp_path, tmp_path / "notes.txt", run):
        with pytest.raises(RocktokensError, match=f"{taken}.*give --bundle a new"):
            write_bundle(Shelf([run]), taken)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    first = write_bundle(Shelf([run]), tmp_path / "out").page.read_bytes()
    (tmp_path / "out/index.html").write_text("older")
    assert write_bundle(Shelf([run]), tmp_path / "out").page.read_bytes() == first


def test_a_damaged_run_is_not_bundled(run: Path, tmp_path: Path):
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "rocks.json").write_text("{")
    with pytest.raises(RocktokensError, match=r"rocks\.json is not the file"):
        write_bundle(Shelf([tmp_path]), tmp_path / "out")
    assert not (tmp_path / "out").exists()
