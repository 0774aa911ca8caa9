"""Token strips hold what the trace holds, token by token, in a form that can be shown."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models
from view_run import CHECKPOINTS, TOP_K, probe_rollouts, rock_ids, scores, tokenizer, tops, write_traced, write_whole

from rocktokens.display.text import legible
from rocktokens.errors import RocktokensError
from rocktokens.report.views.run_view import RunView
from rocktokens.report.views.strips import SCORES, interesting_rollouts, rollout_strip
from rocktokens.rollouts.store import write_rollouts
from rocktokens.run_dir import RunDir
from rocktokens.traces.schema import trace_table
from rocktokens.traces.store import TraceStore
from rocktokens.traces.writer import TraceWriter


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return RunView.open(write_whole(tmp_path_factory.mktemp("run")).path)


@pytest.mark.parametrize("rollout_id", [0, 5, 15])
def test_a_strip_is_the_rollout_and_its_scores(run: RunView, rollout_id: int):
    own = probe_rollouts()[rollout_id]
    strip = rollout_strip(run, rollout_id, 10)
    assert (strip.run, strip.rollout_id, strip.checkpoint) == (run.name, rollout_id, 10)
    assert (strip.prompt_id, strip.finished, strip.correct) == (own.prompt_id, rollout_id % 2 == 0, rollout_id % 2 == 0)
    assert strip.response_text == tokenizer().decode(own.token_ids.tolist())
    assert strip.prompt_text == tokenizer().decode(own.prompt_ids.tolist())
    assert [token.token_id for token in strip.tokens] == own.token_ids.tolist()
    assert [token.position for token in strip.tokens] == list(range(len(own.token_ids)))
    assert "".join(token.text for token in strip.tokens[:-1]) == strip.response_text
    part = pq.read_table(run.path / "traces/checkpoint=10/part-00000.parquet").to_pylist()
    rows = [row for row in part if row["rollout_id"] == rollout_id]
    for token, row in zip(strip.tokens, rows, strict=True):
        assert [np.float32(getattr(token, name)) for name in SCORES] == [np.float32(row[name]) for name in SCORES]
        assert len(repr(token.kl)) <= 14  # a float32 needs nine digits, not seventeen


def test_rocks_and_categories_are_marked(run: RunView):
    ranks = {token_id: rank for rank, token_id in enumerate(rock_ids(), 1)}
    tokens = [token for rollout_id in range(16) for token in rollout_strip(run, rollout_id).tokens]
    assert all(token.rock_rank == ranks.get(token.token_id) for token in tokens)
    assert {token.category for token in tokens if token.rock_rank == 1} == {"discourse"}
    assert {token.category for token in tokens if token.text.isdigit()} == {"digit"}


def test_the_likeliest_tokens_stand_beside_their_token(run: RunView):
    rollouts = probe_rollouts()
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    expected = tops(sum(lengths), CHECKPOINTS[-1])
    vocabulary = TraceStore(run.path).vocabulary
    for rollout_id in (0, 7):
        first = sum(lengths[:rollout_id])
        strip = rollout_strip(run, rollout_id, CHECKPOINTS[-1])
        for name, (ids_TK, logp_TK) in expected.items():
            for row, token in enumerate(strip.tokens, first):
                ids, texts, logps = zip(*getattr(token, name), strict=True)
                assert len(ids) == TOP_K and list(ids) == ids_TK[row].tolist()
                assert list(texts) == [legible(vocabulary.text(one)) for one in ids]
                np.testing.assert_array_equal(np.float32(logps), logp_TK[row])
    assert {token.student_top for token in rollout_strip(run, 0, CHECKPOINTS[0]).tokens} == {None}


def test_interesting_rollouts_are_rich_and_right_and_wrong_in_turn(run: RunView):
    chosen = interesting_rollouts(run, 6)
    assert chosen == interesting_rollouts(RunView.open(run.path), 6)
    assert [rollout_strip(run, rollout_id).correct for rollout_id in chosen] == [True, False] * 3

    def richness(rollout_id: int) -> float:
        tokens = rollout_strip(run, rollout_id).tokens
        return sum(token.rock_rank is not None for token in tokens) / len(tokens)

    for odd in (0, 1):
        lengths = {own.rollout_id: len(own.token_ids) for own in probe_rollouts() if own.rollout_id % 2 == odd}
        longer = [rollout_id for rollout_id in lengths if lengths[rollout_id] >= np.median(list(lengths.values()))]
        assert chosen[odd::2] == sorted(longer, key=lambda own: (-richness(own), own))[:3]


def test_where_each_checkpoint_wrote_its_own_rollouts_the_right_one_is_found(tmp_path: Path):
    run, rollouts = RunDir(tmp_path), probe_rollouts()
    for checkpoint, own in zip(CHECKPOINTS, (rollouts[:6], rollouts[6:]), strict=True):
        with TraceWriter(run, checkpoint=checkpoint) as writer:
            writer.append(trace_table(own, scores(sum(len(each.token_ids) for each in own), checkpoint)))
            write_rollouts(run, f"rollouts/probe/checkpoint={checkpoint}.parquet", own)
    view = RunView.open(tmp_path)
    assert [rollout_strip(view, rollout_id).checkpoint for rollout_id in (5, 6)] == list(CHECKPOINTS)
    with pytest.raises(RocktokensError, match="rollout 5 is not in the traces of checkpoint 20"):
        rollout_strip(view, 5, 20)
    with pytest.raises(RocktokensError, match="rollout 99 is not in the traces of"):
        rollout_strip(view, 99)


def test_unknown_checkpoints_are_named(run: RunView):
    with pytest.raises(RocktokensError, match=r"checkpoint 11 has no traces in .*: available are 10, 20"):
        rollout_strip(run, 0, 11)


HOSTILE = ("a\x00b", "\u202eevil", "\x1b[31m", "x" * 1_000_000, "</script>", "\n\t ", "e\u0301")
SHOWN = ("a\\u0000b", "\\u202eevil", "\\u001b[31m", "x" * 63 + "…", "</script>", "\n\t ", "e\u0301")


def test_hostile_texts_are_legible_in_a_strip(tmp_path: Path):
    """Whitespace stays for the page to mark; what cannot be seen is written out; what is endless is cut."""
    run = write_traced(tmp_path)
    words = Tokenizer(models.WordLevel({text: place for place, text in enumerate(HOSTILE)}, unk_token=HOSTILE[0]))
    words.decoder = decoders.Fuse()
    rollout = probe_rollouts()[0]
    ids = np.arange(len(HOSTILE), dtype=np.int32)
    hostile = [type(rollout)(0, "p", 0, ids, ids, np.zeros(len(ids), np.float32), 0, finished=True)]
    with TraceWriter(run, checkpoint=30) as writer:
        writer.append(trace_table(hostile, scores(len(ids), 0)))
    run.commit("tokenizer/tokenizer.json", lambda path: words.save(str(path)))
    strip = rollout_strip(RunView.open(tmp_path), 0, 30)
    assert tuple(token.text for token in strip.tokens) == SHOWN
    assert len(strip.response_text) == 20_000 and "\x00" not in strip.response_text
