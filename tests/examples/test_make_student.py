import json
import sys
from pathlib import Path

import make_student
import pytest
import torch
from make_student import keep_layers, parse_layers
from make_teacher import answer_loss

from rocktokens.errors import RocktokensError
from rocktokens.models.load import load_model
from rocktokens.rollouts.sampler import cpu_threads


def run(monkeypatch, out: Path, *options: str) -> None:
    monkeypatch.setattr(
        sys, "argv", ["make_student.py", "pebbles-teacher", str(out), "--template", "{prompt}", *options]
    )
    with cpu_threads(1):
        make_student.main()


def test_spans_name_layers():
    assert parse_layers("0-2,5", 6) == [0, 1, 2, 5]
    assert parse_layers("3", 4) == [3]


@pytest.mark.parametrize("text", ["", "a", "0-", "2,1", "1,1", "0-6", "-1"])
def test_layers_that_are_not_there_are_refused(text: str):
    with pytest.raises(RocktokensError, match="--layers"):
        parse_layers(text, 6)


def test_kept_layers_are_the_originals_bit_for_bit(tmp_path, monkeypatch):
    run(monkeypatch, tmp_path / "student", "--layers", "0-1,4")
    whole, pruned = (load_model(name, device="cpu").model for name in ("pebbles-teacher", str(tmp_path / "student")))
    assert pruned.config.num_hidden_layers == len(pruned.model.layers) == 3
    for place, index in enumerate([0, 1, 4]):
        own, original = pruned.model.layers[place].state_dict(), whole.model.layers[index].state_dict()
        assert all(torch.equal(own[name], original[name]) for name in original)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(pruned.state_dict()[name], whole.state_dict()[name])


def test_all_layers_give_the_same_logits_and_a_cache_works_on_fewer():
    ids = torch.arange(5, 25)[None]
    whole, same, fewer = (load_model("pebbles-teacher", device="cpu").model for _ in range(3))
    keep_layers(same, range(6))
    assert torch.equal(whole(ids).logits, same(ids).logits)
    keep_layers(fewer, [0, 3, 5])
    cached = fewer(ids[:, -1:], past_key_values=fewer(ids[:, :-1]).past_key_values).logits
    torch.testing.assert_close(cached[:, -1], fewer(ids).logits[:, -1])


def test_healing_lowers_the_loss_on_the_teachers_answers_and_resumes(problems, tmp_path, monkeypatch):
    healing = ["--teacher", "pebbles-teacher", "--prompts", str(problems), "--max-new-tokens", "120"]
    healing += ["--num-prompts", "6", "--batch-size", "4", "--epochs", "3", "--learning-rate", "1e-3"]
    monkeypatch.setattr(make_student, "PART", 4)
    run(monkeypatch, tmp_path / "pruned", "--layers", "0-3")
    run(monkeypatch, tmp_path / "whole", "--layers", "0-3", *healing)

    # interrupted after the first part of the answers: that part is read, not sampled again
    made, answers = make_student.make_rollouts, []

    def interrupted(*arguments, **options):
        if options["first_rollout_id"]:
            raise KeyboardInterrupt
        answers.extend(made(*arguments, **options))
        return answers

    monkeypatch.setattr(make_student, "make_rollouts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, tmp_path / "resumed", "--layers", "0-3", *healing)
    assert [path.name for path in (tmp_path / "resumed" / ".answers").glob("part-*")] == ["part-0.parquet"]
    monkeypatch.setattr(make_student, "make_rollouts", made)
    with pytest.raises(RocktokensError, match="other settings"):
        run(monkeypatch, tmp_path / "resumed", "--layers", "0-4", *healing)
    run(monkeypatch, tmp_path / "resumed", "--layers", "0-3", *healing)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed")]
    assert files[0] == files[1]
    assert json.loads((tmp_path / "whole" / "made.json").read_text())["layers"] == [0, 1, 2, 3]

    ended = [answer for answer in answers if answer.finished]
    losses = [answer_loss(load_model(str(tmp_path / name), device="cpu"), ended) for name in ("pruned", "whole")]
    assert losses[1] < 0.9 * losses[0]


def test_teacher_and_prompts_go_together(tmp_path, monkeypatch):
    with pytest.raises(RocktokensError, match="go together"):
        run(monkeypatch, tmp_path / "x", "--layers", "0", "--teacher", "pebbles-teacher")
