"""What one row of a trace is: one response token of one rollout, as one checkpoint scores it.

1. ``trace_table`` lays scored rollouts out as rows, keyed by the *predicted* token; a NaN score (a position that a
   policy froze, so that it never reached a head) becomes a null. The likeliest tokens are there where they were found,
   and so is ``kl_choice``, the part of ``kl`` that is a choice within classes of tokens (docs/method.md, section 10).
2. ``validate_table`` is the gate every part passes: the columns of the schema, cast to its types (scores are rounded to
   float32, a key must not change), no nulls in keys, ``kl`` and ``grad_norm`` within the range that fixed-point sums
   are exact in, and ``kl_choice`` between 0 and ``kl``.
3. The schema's version travels in the metadata of every file; a newer one is refused. So does the hash of the classes
   that ``kl_choice`` is of, and, where a server gave the teacher's values, what they were.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rocktokens.classes import TokenClasses
from rocktokens.errors import RocktokensError, RunDirError
from rocktokens.types import CHOICE, NO_TOKEN, STANDARD_COLUMNS, Rollout, TokenScores

SCHEMA_VERSION = 1
VERSION_KEY = b"rocktokens_schema_version"
CLASSES_KEY = b"rocktokens_classes_sha256"
"""In the metadata of a table with the column ``kl_choice``: ``TokenClasses.sha256`` of the classes it is of."""
TEACHER_KEY = b"rocktokens_teacher"
"""In the metadata of a table whose teacher was served: ``TeacherSection.label``."""
MAX_SCORE = 2.0**15
"""Largest kl or grad_norm of one token: 2**15 nats, far beyond any float32 log-softmax of sane logits."""
KL_ROUNDING = 1e-3
"""A divergence is never negative; rounding may make it so by this much."""

_TOP = pa.list_(pa.struct([("id", pa.int32()), ("logp", pa.float32())]))
_KEYS = [
    pa.field("rollout_id", pa.int64(), nullable=False),
    pa.field("prompt_id", pa.string(), nullable=False),
    pa.field("position", pa.int32(), nullable=False),
    pa.field("token_id", pa.int32(), nullable=False),
]
_SCORES = [pa.field(name, pa.float32()) for name in STANDARD_COLUMNS]
_TRAINING = [
    pa.field("policy_step", pa.int32(), nullable=False),
    pa.field("weight", pa.float32(), nullable=False),
]
REQUIRED_FIELDS = (*_KEYS, *_SCORES, *_TRAINING)
_CHOICE = pa.field(CHOICE, pa.float32())
_TOPS = (pa.field("student_top", _TOP), pa.field("teacher_top", _TOP))
OPTIONAL_FIELDS = (_CHOICE, *_TOPS)


class TraceError(RocktokensError):
    """A table is not a trace."""


def trace_table(
    rollouts: Sequence[Rollout],
    scores: TokenScores,
    weights: np.ndarray | None = None,
    tops: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None,
    classes: TokenClasses | None = None,
    served: str = "",
) -> pa.Table:
    """Lay scored rollouts out as rows, in the order given.

    Args:
        rollouts: the rollouts whose response tokens were scored.
        scores: numpy arrays (T,), the rollouts' positions concatenated in the same order.
        weights: float (T,), the weight of each position in the loss; 1 everywhere when None.
        tops: by optional column, ids (T, K) and log-probabilities (T, K) of the likeliest tokens, likeliest first;
            where an id is ``NO_TOKEN``, there is none.
        classes: what ``scores.kl_choice`` is of; that column is left out when None.
        served: how the teacher's values came from a server; "" where the teacher was in memory.
    """
    lengths = np.array([len(rollout.token_ids) for rollout in rollouts], dtype=np.int64)
    count = int(lengths.sum())

    def per_rollout(name: str, dtype: type) -> np.ndarray:
        return np.repeat(np.array([getattr(rollout, name) for rollout in rollouts], dtype=dtype), lengths)

    columns = {
        "rollout_id": per_rollout("rollout_id", np.int64),
        "prompt_id": per_rollout("prompt_id", object),
        "position": np.arange(count) - np.repeat(np.cumsum(lengths) - lengths, lengths),
        "token_id": np.concatenate([np.empty(0, np.int32), *(rollout.token_ids for rollout in rollouts)]),
        **dict(scores.items()),
        **({} if classes is None else {CHOICE: scores.kl_choice}),
        "policy_step": per_rollout("policy_step", np.int32),
        "weight": np.ones(count) if weights is None else weights,
    }
    for name, values in columns.items():
        if np.shape(values) != (count,):
            raise TraceError(
                f"{name} has shape {np.shape(values)} but the rollouts have {count} response tokens: "
                "give one value per response token"
            )
    scored = {column.name for column in (*_SCORES, _CHOICE)}
    plain = [column for column in (*REQUIRED_FIELDS, _CHOICE) if column.name in columns]
    arrays = [pa.array(columns[column.name], type=column.type, from_pandas=column.name in scored) for column in plain]
    found = [column for column in _TOPS if column.name in (tops or {})]
    arrays += [_top_array(column.name, *(tops or {})[column.name], count) for column in found]
    sha256 = None if classes is None else classes.sha256
    return pa.Table.from_arrays(arrays, schema=_schema([*plain, *found], sha256, served))


def validate_table(table: pa.Table) -> pa.Table:
    """Return the table in the schema's column order and types, or say in one sentence what is wrong with it."""
    chosen = _chosen_fields(table.column_names)
    columns = [_cast(table.column(column.name), column) for column in chosen]
    classes = classes_of(table.schema) if _CHOICE in chosen else None
    valid = pa.Table.from_arrays(columns, schema=_schema(chosen, classes, served_of(table.schema)))
    for column in chosen:
        if not column.nullable and valid.column(column.name).null_count:
            raise TraceError(f"column {column.name} has nulls: every row needs a {column.name}")
    _require_range(valid, "kl", -KL_ROUNDING)
    _require_range(valid, "grad_norm", 0.0)
    if _CHOICE in chosen:
        _require_choice(valid)
    return valid


def with_choice(table: pa.Table, kl_choice_T: np.ndarray, classes: TokenClasses) -> pa.Table:
    """The rows of a table with the choice within these classes, in the place of any other; refused out of range."""
    rest = table.drop_columns([CHOICE]) if CHOICE in table.column_names else table
    if len(kl_choice_T) != len(rest):
        raise TraceError(f"{CHOICE} has {len(kl_choice_T)} values for {len(rest)} rows: give one per row")
    added = rest.append_column(CHOICE, pa.array(kl_choice_T, pa.float32(), from_pandas=True))
    return validate_table(
        added.replace_schema_metadata({**(added.schema.metadata or {}), **_of_classes(classes.sha256)})
    )


def without_choice(table: pa.Table) -> pa.Table:
    """The rows of a table as they would be without the choice within classes."""
    return validate_table(table.drop_columns([CHOICE]))


def classes_of(schema: pa.Schema) -> str | None:
    """Hash of the classes that ``kl_choice`` of a table is of; None where it has no such column."""
    if CHOICE not in schema.names:
        return None
    if (found := (schema.metadata or {}).get(CLASSES_KEY)) is None:
        raise TraceError(
            f"column {CHOICE} comes without {CLASSES_KEY.decode()} in the metadata of the table, so the classes "
            "of the choice are unknown: set it to TokenClasses.sha256"
        )
    return found.decode(errors="replace")


def served_of(schema: pa.Schema) -> str:
    """How the teacher's values of a table came from a server; "" where the teacher was in memory."""
    return (schema.metadata or {}).get(TEACHER_KEY, b"").decode(errors="replace")


def require_readable(schema: pa.Schema, path: Path) -> None:
    """Refuse a file that a newer rocktokens wrote, or that has not the columns of a trace."""
    version = (schema.metadata or {}).get(VERSION_KEY, b"none").decode(errors="replace")
    if version != str(SCHEMA_VERSION):
        raise RunDirError(
            f"{path} has {VERSION_KEY.decode()} {version}, this rocktokens reads {SCHEMA_VERSION}: "
            "use the version that wrote it"
        )
    try:
        wrong = [
            column.name for column in _chosen_fields(schema.names) if schema.field(column.name).type != column.type
        ]
    except TraceError as error:
        raise RunDirError(f"{path} is no trace: {error}") from None
    if wrong:
        raise RunDirError(
            f"{path} is no trace: column {wrong[0]} is {schema.field(wrong[0]).type}: restore it from a copy of the run"
        )


def _schema(columns: Sequence[pa.Field], classes_sha256: str | None, served: str) -> pa.Schema:
    of_teacher = {TEACHER_KEY: served.encode()} if served else {}
    version = {VERSION_KEY: str(SCHEMA_VERSION).encode()}
    return pa.schema(list(columns), metadata={**version, **_of_classes(classes_sha256), **of_teacher})


def _of_classes(sha256: str | None) -> dict[bytes, bytes]:
    return {} if sha256 is None else {CLASSES_KEY: sha256.encode()}


def _top_array(name: str, ids_TK: np.ndarray, logp_TK: np.ndarray, count: int) -> pa.Array:
    if ids_TK.shape != logp_TK.shape or len(ids_TK) != count:
        raise TraceError(
            f"{name} has ids of shape {ids_TK.shape} and log-probabilities of shape {logp_TK.shape} but the rollouts "
            f"have {count} response tokens: give one row of each per response token"
        )
    is_known_TK = ids_TK != NO_TOKEN
    offsets = np.concatenate([[0], np.cumsum(is_known_TK.sum(axis=1))]).astype(np.int32)
    columns = [pa.array(values_TK[is_known_TK]) for values_TK in (ids_TK, logp_TK)]
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(columns, fields=list(_TOP.value_type)))


def _chosen_fields(names: Sequence[str]) -> list[pa.Field]:
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise TraceError(f"column {twice[0]} appears twice in the trace table: give it once")
    required = [column.name for column in REQUIRED_FIELDS]
    if missing := [name for name in required if name not in names]:
        raise TraceError(f"the trace table lacks column {missing[0]}: it needs {', '.join(required)}")
    known = (*REQUIRED_FIELDS, *OPTIONAL_FIELDS)
    if unknown := sorted(set(names) - {column.name for column in known}):
        raise TraceError(
            f"column {unknown[0]} is not part of a trace: drop it (known: {', '.join(column.name for column in known)})"
        )
    return [column for column in known if column.name in names]


def _cast(values: pa.ChunkedArray, column: pa.Field) -> pa.ChunkedArray:
    """The values in the column's type: floats rounded to it, anything else unchanged or refused."""
    try:
        if not _same_kind(values.type, column.type):
            raise pa.ArrowTypeError("of another kind")
        return values.cast(column.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        raise TraceError(
            f"column {column.name} is {values.type} and does not fit {column.type} without loss: cast it first"
        ) from None


def _same_kind(given: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_integer(wanted):
        return pa.types.is_integer(given)
    if pa.types.is_floating(wanted):
        return pa.types.is_floating(given)
    if pa.types.is_string(wanted):
        text = given.value_type if pa.types.is_dictionary(given) else given
        return pa.types.is_string(text) or pa.types.is_large_string(text) or pa.types.is_string_view(text)
    return True


def _require_range(table: pa.Table, name: str, least: float) -> None:
    """Refuse values outside the range; NaN compares false with everything, so it is refused too."""
    values = table.column(name).drop_null().to_numpy()
    outside = values[~((values >= least) & (values <= MAX_SCORE))]
    if outside.size:
        raise TraceError(
            f"column {name} holds {outside[0]!s}: it must lie between {least:g} and {MAX_SCORE:g}, "
            "and a token without a score is a null, not NaN"
        )


def _require_choice(table: pa.Table) -> None:
    """Refuse a choice that is less than nothing, more than all of the kl, or not where the kl is."""
    _require_range(table, CHOICE, -KL_ROUNDING)
    kl, choice = (table.column(name) for name in ("kl", CHOICE))
    if not kl.is_null().equals(choice.is_null()):
        raise TraceError(f"column {CHOICE} has nulls at other rows than column kl: give both at a row, or neither")
    whole, part = (column.drop_null().to_numpy() for column in (kl, choice))
    too_much = part > whole + KL_ROUNDING * np.maximum(whole, 1.0)
    if too_much.any():
        raise TraceError(
            f"column {CHOICE} holds {part[too_much][0]!s} where kl is {whole[too_much][0]!s}: the choice is a part of "
            "the kl, so give both of the same position"
        )
