"""Policies inside an update: what they see, what their weights do to loss and gradient, and what that costs."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
import torch
from update_oracle import gradients, largest_difference, naive_gradients, per_rollout, watching

from rocktokens.classes import TokenClasses
from rocktokens.policies import WeightPolicy, make_policy
from rocktokens.policies.base import UpdateTokens
from rocktokens.policies.compose import ProductPolicy
from rocktokens.scoring.score import score_rollouts
from rocktokens.training.log import step_record
from rocktokens.training.step import Weighing, accumulate_gradients, token_arrays, token_weights, update_student, weigh
from rocktokens.types import EXTRA_COLUMNS, STANDARD_COLUMNS, RockSet, RockToken, TokenScores, TokenWeights

ALL_COLUMNS = (*STANDARD_COLUMNS, *EXTRA_COLUMNS)


class Onlooker(WeightPolicy):
    """Uniform weights; keeps the scores it is shown."""

    name = "onlooker"

    def __init__(self, needs: Collection[str] = ALL_COLUMNS) -> None:
        self.needs = frozenset(needs)
        self.seen: list[TokenScores] = []

    def __call__(self, scores, token_ids_T, positions_T, rollout_ids_T, step):
        self.seen.append(scores)
        return super().__call__(scores, token_ids_T, positions_T, rollout_ids_T, step)

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        return np.ones(len(tokens.token_ids))


class Watcher(Onlooker):
    """Drops even tokens, and watches every fourth."""

    name = "watcher"

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        return tokens.token_ids % 2

    def probe(self, weights_T, token_ids_T, positions_T, rollout_ids_T, step):
        return token_ids_T % 4 == 0


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in a)


@pytest.mark.parametrize("size", [1, 3])
def test_a_policy_sees_the_scores_of_a_replay(open_session, rollouts, size):
    session = replace(open_session(f"training.per_device_train_batch_size={size}"), policy=Onlooker())
    weigh(session, rollouts, 0)
    [seen] = session.policy.seen
    replayed = score_rollouts(session.student, session.teacher, rollouts, tokens_per_batch=1, extras=EXTRA_COLUMNS)
    for name in ALL_COLUMNS:
        found, expected = getattr(seen, name), getattr(replayed, name)
        if size == 1:  # the same batches as those of the replay
            assert np.array_equal(found, expected), name
        np.testing.assert_allclose(found, expected, atol=5e-6, err_msg=name)


def test_only_the_extra_columns_a_policy_needs_are_computed(open_session, rollouts):
    session = replace(open_session(), policy=Onlooker({"kl", "forward_kl"}))
    weigh(session, rollouts, 0)
    [seen] = session.policy.seen
    assert seen.forward_kl is not None and seen.teacher_mass_top16 is seen.student_top1_in_teacher_top5 is None


@pytest.mark.parametrize("policy", ["tip", "high_entropy", "prefix_importance"])
def test_weights_by_scores_are_of_the_whole_update_whatever_the_split(open_session, rollouts, policy):
    """One rollout at a time, three, or all: the same weights and gradients, and those of the definition."""
    results = []
    for size in (1, 3, 8):
        session = open_session(f"training.per_device_train_batch_size={size}", f"policy.name={policy}")
        weighing = weigh(session, rollouts, 0)
        accumulate_gradients(session, rollouts, weighing, 0)
        found = {name: parameter.grad.clone() for name, parameter in session.student.named_parameters()}
        results.append((weighing.weights.weights, found))
    scores = score_rollouts(session.student, session.teacher, rollouts)
    expected = make_policy(policy)(scores, *token_arrays(rollouts), 0)
    by_rollout = []
    for each in rollouts:
        alone = score_rollouts(session.student, session.teacher, [each])
        by_rollout.append(make_policy(policy)(alone, *token_arrays([each]), 0))
    naive = naive_gradients(session, rollouts, per_rollout(expected, rollouts), len(expected))[1]
    for weights_T, found in results:
        np.testing.assert_allclose(weights_T, expected, atol=1e-5)
        assert largest_difference(found, naive) <= 1e-6
    if policy != "prefix_importance":
        assert not np.array_equal(np.concatenate(by_rollout), expected)


def test_the_pad_id_is_nobodys_business(open_session, rollouts):
    session = open_session("policy.name=tip", "training.per_device_train_batch_size=8")
    updates = []
    for pad_id in (session.pad_id, 65):
        session.student.zero_grad()
        padded = replace(session, pad_id=pad_id)
        accumulate_gradients(padded, rollouts, weigh(padded, rollouts, 0), 0)
        updates.append([parameter.grad.clone() for parameter in session.student.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*updates, strict=True))


@pytest.mark.parametrize("lora", ["false", "true"])
def test_a_scoring_pass_changes_no_gradient_and_has_no_dropout(open_session, rollouts, lora):
    settings = (f"lora.enabled={lora}", "lora.r=2", "lora.lora_dropout=0.5")
    found = []
    for policy in (make_policy("uniform"), Onlooker()):
        session = replace(open_session(*settings), policy=policy)
        for step in range(2):  # the adapters are zero before the first update, and so is what dropout leaves of them
            session.objective.train()
            weighing, again = weigh(session, rollouts, step), weigh(session, rollouts, step)
            accumulate_gradients(session, rollouts, weighing, step)
            session.optimizer.step()
        found.append([parameter.grad for parameter in session.trainable])
    assert weighing.scores is not None and again.scores is not None
    assert np.array_equal(weighing.scores.kl, again.scores.kl)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_teacher_runs_once_whether_scores_are_needed_or_not(open_session, rollouts):
    session = open_session("training.per_device_train_batch_size=2")
    runs: list[str] = []
    for name, model in (("student", session.student), ("teacher", session.teacher)):
        model.model.register_forward_hook(lambda *_, name=name: runs.append(name))
    for policy, student_runs in ((make_policy("uniform"), 4), (Onlooker(), 8)):
        runs.clear()
        update_student(replace(session, policy=policy), rollouts, 0)
        assert (runs.count("student"), runs.count("teacher")) == (student_runs, 4)


def test_dropping_rows_is_multiplying_them_by_zero(open_session, rollouts):
    """Training leaves frozen rows out; the loop over positions, in float64, computes them all and multiplies.

    So does training itself where the weight is not quite zero, but vanishes in every float32 sum.
    """
    session = open_session()
    weights = token_weights(make_policy("rocks", rocks=[61, 64, 67], lam=0.0), None, rollouts, "all", 0)
    assert 0 < np.mean(weights.weights == 0) < 1
    loss, found = gradients(session, rollouts, weights)
    multiplied = replace(weights, weights=np.maximum(weights.weights, np.float32(1e-35)))
    multiplied_loss, multiplied_found = gradients(session, rollouts, multiplied)
    assert loss == pytest.approx(multiplied_loss, rel=1e-6)
    assert relative_difference(found, multiplied_found) <= 1e-6
    session.student.double(), session.teacher.double()
    loss, found = gradients(session, rollouts, weights)
    naive_loss, naive = naive_gradients(session, rollouts, per_rollout(weights.weights, rollouts), weights.denominator)
    assert loss == pytest.approx(naive_loss, rel=1e-12)
    assert relative_difference(found, naive) <= 1e-6


def test_kept_differs_from_all_by_the_mean_weight_exactly(open_session, rollouts):
    session = open_session()
    session.student.double(), session.teacher.double()
    policy = make_policy("rocks", rocks=[61, 64], lam=0.3)
    losses = {}
    for denominator in ("all", "kept"):
        weights = token_weights(policy, None, rollouts, denominator, 0)
        losses[denominator] = gradients(session, rollouts, weights)
    factor = weights.weights.sum(dtype=np.float64) / len(weights.weights)
    assert 0.3 < factor < 1
    assert losses["all"][0] == pytest.approx(losses["kept"][0] * factor, rel=1e-14)
    scaled = {name: gradient * factor for name, gradient in losses["kept"][1].items()}
    assert relative_difference(losses["all"][1], scaled) <= 1e-6  # the norms of the tiny model stay float32


def rocks_with_windows() -> RockSet:
    tokens = [RockToken(each, "", rank, 2, 1.0, 2.0, None, None, "other") for rank, each in enumerate((61, 64), 1)]
    return RockSet("", {}, {}, {}, tokens, windows={"max_each_side": 2, "min_kl": 0.1})


@pytest.mark.parametrize("window", [False, True])
def test_lambda_one_is_uniform_to_the_last_bit(open_session, rollouts, window):
    students = []
    for policy in (make_policy("uniform"), make_policy("rocks", rocks=rocks_with_windows(), lam=1.0, window=window)):
        session = replace(open_session(), policy=policy)
        for step in range(4):
            update_student(session, rollouts, step)
        students.append(session.student.state_dict())
    assert bool(policy.needs) == window
    assert all(torch.equal(students[0][name], students[1][name]) for name in students[0])


def test_watched_rows_have_scores_and_leave_the_gradient_alone_to_the_last_bit(open_session, rollouts):
    session = open_session("training.per_device_train_batch_size=3")
    token_ids_T = token_arrays(rollouts)[0]
    weights = TokenWeights((token_ids_T % 2).astype(np.float32), float(len(token_ids_T)))
    watched = np.flatnonzero(token_ids_T % 4 == 0)
    expected = score_rollouts(session.student, session.teacher, rollouts).kl
    found = []
    for weighing in (watching(weights), watching(weights, *watched)):
        session.student.zero_grad()
        outputs = accumulate_gradients(session, rollouts, weighing, 0)
        kl_T = torch.cat([output.scores.kl for output in outputs]).numpy()
        scored_T = (token_ids_T % 2 == 1) | weighing.watched_T
        assert np.array_equal(~np.isnan(kl_T), scored_T)
        np.testing.assert_allclose(kl_T[scored_T], expected[scored_T], atol=5e-6)
        found.append([parameter.grad.clone() for parameter in session.student.parameters()])
    assert len(watched) and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_policy_says_what_is_watched_unless_everything_is_scored_anyway(open_session, rollouts):
    token_ids_T = token_arrays(rollouts)[0]
    session = replace(open_session(), policy=Watcher(needs=()))
    assert np.array_equal(weigh(session, rollouts, 0).watched_T, token_ids_T % 4 == 0)
    watched = update_student(session, rollouts, 0)
    assert np.array_equal(np.isnan(watched.scores.kl), token_ids_T % 4 == 2)
    assert watched.scores.forward_kl is None

    session = replace(open_session(), policy=Watcher(needs=("forward_kl",)))
    assert not weigh(session, rollouts, 0).watched_T.any()
    scored = update_student(session, rollouts, 0)
    kept_T = token_ids_T % 2 == 1
    assert np.array_equal(scored.scores.kl[kept_T], watched.scores.kl[kept_T])
    assert np.isfinite(scored.scores.kl).all() and np.isfinite(scored.scores.forward_kl).all()


@pytest.mark.parametrize(("head_is_trained", "trained", "scored"), [(True, 10, 6), (False, 8, 6)])
def test_saved_head_compute_counts_what_was_multiplied(head_is_trained, trained, scored):
    """Student width 2, teacher width 4: a trained row costs 3·2 + 4, under a frozen head 2·2 + 4; one scored 2 + 4."""
    weights = TokenWeights(np.array([1.0, 0.0, 0.5, 0.0, 0.0], dtype=np.float32), 5.0)
    uniform = TokenWeights(np.ones(5, dtype=np.float32), 5.0)
    scores, unwatched_T = TokenScores(*np.zeros((6, 5), dtype=np.float32)), np.zeros(5, dtype=bool)
    for weighing, cost in (
        (watching(weights), 2 * trained),
        (watching(weights, 3), 2 * trained + scored),
        (Weighing(weights, unwatched_T, scores), 2 * trained + 5 * scored),
        (watching(uniform), 5 * trained),
        (Weighing(uniform, unwatched_T, scores), 5 * trained + 5 * scored),
        (Weighing(uniform, unwatched_T, likely_P=np.arange(3)), 5 * trained + 3 * scored),
    ):
        saved = weighing.head_compute_saved(2, 4, head_is_trained=head_is_trained)
        assert saved == pytest.approx(1 - cost / (5 * trained))


@pytest.mark.parametrize(("lora", "trained"), [("false", 3 * 16 + 24), ("true", 2 * 16 + 24)])
def test_a_head_that_is_not_trained_costs_less(open_session, rollouts, lora, trained):
    update = update_student(open_session(f"lora.enabled={lora}", "policy.name=tip"), rollouts, 0)
    kept = np.mean(update.weights.weights > 0)
    assert update.head_compute_saved == pytest.approx(1 - kept - (16 + 24) / trained)


def test_the_asymmetric_term_is_what_training_minimises(open_session, rollouts):
    session = open_session("policy.name=asymmetric")
    uniform = gradients(open_session(), rollouts, weigh(session, rollouts, 0).weights)
    loss, found = gradients(session, rollouts, weigh(session, rollouts, 0).weights)
    ones = [np.ones(len(rollout.token_ids)) for rollout in rollouts]
    naive_loss, naive = naive_gradients(session, rollouts, ones, sum(map(len, ones)), asymmetric=True)
    assert loss == pytest.approx(naive_loss, abs=1e-6) and loss != pytest.approx(uniform[0], abs=1e-3)
    assert largest_difference(found, naive) <= 1e-6


CLASSES = [[60, 61, 62], [64, 69], [200, 3]]


def test_the_decision_is_what_training_minimises(open_session, rollouts):
    session = open_session("policy.name=coarse", f"policy.classes={CLASSES}", "training.per_device_train_batch_size=3")
    weights = weigh(session, rollouts, 0).weights
    uniform = gradients(open_session(), rollouts, weights)
    loss, found = gradients(session, rollouts, weights)
    ones = [np.ones(len(rollout.token_ids)) for rollout in rollouts]
    naive_loss, naive = naive_gradients(session, rollouts, ones, sum(map(len, ones)), classes=CLASSES)
    assert loss == pytest.approx(naive_loss, abs=1e-6) and loss < uniform[0] - 1e-3
    assert largest_difference(found, naive) <= 1e-6
    for shift in (-1, 1):
        shifted = [[(v + shift) % 256 for v in ids] for ids in CLASSES]
        _, other = naive_gradients(session, rollouts, ones, sum(map(len, ones)), classes=shifted)
        assert largest_difference(found, other) > 1e-5


def test_a_schedule_turns_the_choice_off_and_the_log_has_the_decision(open_session, rollouts):
    coarse = {"name": "coarse", "classes": TokenClasses(CLASSES)}
    policy = make_policy("schedule", steps=[1, 2], policies=[coarse, coarse | {"lam": 0.25}])
    plain = open_session()
    uniform = gradients(plain, rollouts, weigh(plain, rollouts, 0).weights)[0]
    for step, lam in enumerate((1.0, 0.0, 0.25)):
        session = replace(open_session(), policy=policy)
        update = update_student(session, rollouts, step)
        scores = update.scores
        assert update.loss == pytest.approx(np.mean(scores.kl - (1 - lam) * scores.kl_choice), abs=1e-6)
        assert (update.loss == uniform) == (lam == 1.0)
        record = step_record(step, rollouts, update, {"update": 1.0}, 1.0)
        assert record["kl_decision"] == pytest.approx(np.mean(scores.kl - scores.kl_choice), rel=1e-5)
        assert 1e-3 < record["kl_decision"] < record["kl"]
    assert "kl_decision" not in step_record(0, rollouts, update_student(plain, rollouts, 0), {"update": 1.0}, 1.0)


@pytest.mark.parametrize("needs", [(), ("kl",)])
def test_rows_that_are_scored_without_gradient_have_their_choice(open_session, rollouts, needs):
    coarse = make_policy("coarse", classes=TokenClasses(CLASSES))
    policy = ProductPolicy([Watcher(needs=needs), coarse])
    scores = update_student(replace(open_session(), policy=policy), rollouts, 0).scores
    whole = update_student(replace(open_session(), policy=coarse), rollouts, 0).scores
    scored_T = ~np.isnan(scores.kl)
    assert scored_T.all() == bool(needs) and np.array_equal(scored_T, ~np.isnan(scores.kl_choice))
    np.testing.assert_allclose(scores.kl_choice[scored_T], whole.kl_choice[scored_T], atol=1e-6)


def test_lambda_one_of_a_choice_is_uniform_to_the_last_bit(open_session, rollouts):
    students = []
    for policy in (make_policy("uniform"), make_policy("coarse", classes=TokenClasses(CLASSES), lam=1.0)):
        session = replace(open_session(), policy=policy)
        for step in range(3):
            update_student(session, rollouts, step)
        students.append(session.student.state_dict())
    assert all(torch.equal(students[0][name], students[1][name]) for name in students[0])
