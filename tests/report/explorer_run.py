"""A run of hostile texts with all that the explorer shows, made without a model."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from hostile_texts import HOSTILE, SURROGATES
from knockout_records import CONDITIONS, make_sweep
from rocktokens.classes import TokenClass, TokenClasses
from rocktokens.knockout.journal import Decoded, RunJournal
from rocktokens.knockout.records import Ban, BanChanges, BanKey, Knockout, Role
from rocktokens.rocks.sums import HELD_OUT
from rocktokens.rollouts.store import write_rollouts
from rocktokens.run_dir import RunDir
from rocktokens.traces.schema import trace_table
from rocktokens.traces.writer import TraceWriter
from rocktokens.types import RockSet, RockToken, Rollout, TokenScores

WORDS = ("a", "###", " Step", " 1", "\n", "So", ",", " the", " answer")
VOCABULARY = tuple(dict.fromkeys((*WORDS, *HOSTILE)))
ROCK_IDS = (1, 4, *(VOCABULARY.index(text) for text in HOSTILE[:4]))
FROZEN_IDS = tuple(range(len(WORDS), len(VOCABULARY), 9))
N_ROLLOUTS, LENGTH, TOP_K = 90, 24, 4
CHECKPOINTS = (0, 10)
CLASS_IDS = ((1, 5), tuple(VOCABULARY.index(text) for text in HOSTILE[2:7]))
"""Two words, one of them a rock, and hostile texts, two of them rocks."""
CLASSES = TokenClasses(
    [
        TokenClass(CLASS_IDS[0], ("###", "So"), ("neutral", "neutral"), ("neutral", "neutral"), "pillar", safe=True),
        TokenClass(
            CLASS_IDS[1],
            (*HOSTILE[2:5], *SURROGATES),
            ("neutral", "pillar", "neutral", "undecided", "neutral"),
            ("neutral",) * 5,
            "stumbling",
            safe=False,
        ),
    ]
)
LOG = {"kl": 1.0, "loss": 1.0, "grad_norm": 2.0}


def make_run(path: Path, shift: int = 0) -> Path:
    """Write the run: traces with top-k, rollouts, rocks, a knock-out with its answers, and a log.

    Args:
        path: where to.
        shift: by how many numbers its rollouts are those of an unshifted run.
    """
    run = RunDir(path)
    rollouts = [replace(_rollout(number + shift), rollout_id=number) for number in range(N_ROLLOUTS)]
    for step in CHECKPOINTS:
        classes = CLASSES.unrefuted if step == CHECKPOINTS[-1] else None
        with TraceWriter(run, checkpoint=step) as writer:
            writer.append(trace_table(rollouts, _scores(step), tops=_tops(rollouts), classes=classes))
    run.commit("tokenizer/tokenizer.json", lambda file: _tokenizer().save(str(file)))
    with run.lock():
        write_rollouts(run, "rollouts/probe/checkpoint=10.parquet", rollouts)
        run.commit_text("rocks.json", json.dumps({"schema_version": 1, **asdict(_rocks())}))
        known = {"tokenizer_sha256": "", "source": {}, "criterion": {}, "classes": list(map(asdict, CLASSES))}
        run.commit_text("classes.json", json.dumps({"schema_version": 1, **known}))
        _write_knockout(run, rollouts)
    run.logs.write_text("".join(log_line(step) for step in range(3)), encoding="utf-8")
    return path


def make_other_run(path: Path) -> Path:
    """A run with other prompts under the same numbers, judged by other rules, that froze hostile types in training."""
    make_run(path, shift=7)
    _amend(path / "rocks.json", _judged_elsewhere)
    _amend(path / "knockout.json", lambda record: {**record, "settings": {**record["settings"], "alpha": 0.1}})
    (path / "logs.jsonl").write_text(log_line(0, online_frozen=FROZEN_IDS), encoding="utf-8")
    return path


def log_line(step: int, **more: object) -> str:
    """One finished step of training."""
    return json.dumps({"step": step, **LOG, "kl": 1 / (step + 1), **more}) + "\n"


def _amend(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    changed = change(json.loads(path.read_text(encoding="utf-8")))
    RunDir(path.parent).commit_text(path.name, json.dumps(changed))


def _judged_elsewhere(rocks: dict[str, Any]) -> dict[str, Any]:
    """Rocks that were measured on prompts which did not select them, with the paper's verdicts."""
    return {
        **rocks,
        "criterion": {**rocks["criterion"], "split": 0.5},
        "source": {"verdicts": {"rule": "paper"}},
        "summary": {**rocks["summary"], "measured_on": HELD_OUT, "n_prompts": 45},
        "tokens": [{**token, "held_out_mean_kl": 1.25, "held_out_change": -0.125} for token in rocks["tokens"]],
    }


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({text: place for place, text in enumerate(VOCABULARY)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _rollout(number: int) -> Rollout:
    """Words, and hostile texts in turn: all rollouts together hold every one of them."""
    first = number * LENGTH // 2
    hostile = [len(WORDS) + (first + step) % (len(VOCABULARY) - len(WORDS)) for step in range(LENGTH // 2)]
    words = [(number + step) % len(WORDS) for step in range(LENGTH // 2)]
    ids = np.array([token for pair in zip(words, hostile, strict=True) for token in pair], np.int32)
    prompt = np.array([5, 6, hostile[0]], np.int32)
    return Rollout(number, f"prompt-{number}", 0, prompt, ids, np.full(LENGTH, -1, np.float32), 0, True)


def _scores(step: int) -> TokenScores:
    generator = np.random.default_rng(step)
    columns = generator.gamma(1.0, 0.5, (6, N_ROLLOUTS * LENGTH)).astype(np.float32)
    kl = columns[0]
    return TokenScores(kl, -columns[1], -columns[2], columns[3], columns[4], columns[5], kl_choice=kl / 4)


def _tops(rollouts: list[Rollout]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    own_T = np.concatenate([rollout.token_ids for rollout in rollouts])
    ids_TK = (own_T[:, None] + np.arange(TOP_K, dtype=np.int32)) % len(VOCABULARY)
    logp_TK = np.tile(np.log(0.5 ** np.arange(1, TOP_K + 1)).astype(np.float32), (len(own_T), 1))
    return {"student_top": (ids_TK, logp_TK), "teacher_top": (ids_TK, logp_TK)}


def _rocks() -> RockSet:
    texts = [VOCABULARY[token_id] for token_id in ROCK_IDS[: -len(SURROGATES)]] + list(SURROGATES)
    tokens = [
        RockToken(
            token_id, text, rank, 9, 1.5, 13.5, 0.5, 6.75, "other", (9.0, 20.0), 0.9, "neutral", 0.0, (-0.01, 0.01)
        )
        for rank, (token_id, text) in enumerate(zip(ROCK_IDS, texts, strict=True), start=1)
    ]
    shares = dict.fromkeys(("token_share", "vocab_share", "kl_share", "grad_share"), 0.25)
    return RockSet("", {"reference": CHECKPOINTS[-1]}, {}, {**shares, "k": len(tokens)}, tokens)


def _write_knockout(run: RunDir, rollouts: list[Rollout]) -> None:
    journal = RunJournal(run, CONDITIONS.digest)
    journal.keep_free(rollouts)
    for banned in ROCK_IDS:
        for place, rollout in enumerate(rollouts):
            if found := np.flatnonzero(rollout.token_ids == banned).tolist():
                journal.add((BanKey((banned,)), place), Decoded(found[0], np.array([5, 6, 7], np.int32), True))
    journal.flush()
    records = [_knockout(token_id, "tested") for token_id in ROCK_IDS] + [_knockout(6, "matched")]
    sweep = make_sweep(records)
    run.commit_text("knockout.json", json.dumps({"schema_version": 1, **asdict(sweep)}))


def _knockout(token_id: int, role: Role) -> Knockout:
    changes = BanChanges(9, 9, None, None, None, None, [], [], [])
    ban = Ban((token_id,), VOCABULARY[token_id], role, "other")
    return Knockout(
        ban, -0.01, (-0.02, 0.01), 1.0, 1.0, "neutral", "neutral", 0.05, (-1.0, 1.0), N_ROLLOUTS, None, changes
    )
