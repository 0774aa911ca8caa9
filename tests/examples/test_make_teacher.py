import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import make_teacher
import numpy as np
import pytest
import torch
from make_teacher import Settings, answer_loss, end_token, read_prompts, step_examples, worked_answers
from safetensors.torch import load_file

from rocktokens.errors import RocktokensError
from rocktokens.models.load import load_model
from rocktokens.rollouts.sampler import cpu_threads
from warm_process import start_script

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = [
    "--template",
    "{prompt}",
    "--batch-size",
    "4",
    "--micro-batch-size",
    "2",
    "--epochs",
    "1.2",
    "--save-steps",
    "2",
]
KILLED_AFTER_SAVE_OF_STEP_4 = f"""
import os, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import make_teacher
save = make_teacher.save_unfinished
def save_and_die(folder, record, step, *rest):
    save(folder, record, step, *rest)
    if step == 4:
        os.kill(os.getpid(), 9)
make_teacher.save_unfinished = save_and_die
make_teacher.main()
"""


def run(monkeypatch, problems: Path, out: Path, *options: str) -> None:
    arguments = ["pebbles-student", str(problems), str(out), *OPTIONS, *options]
    monkeypatch.setattr(sys, "argv", ["make_teacher.py", *arguments])
    with cpu_threads(1):
        make_teacher.main()


def test_the_answer_and_its_end_are_learned_and_marks_are_not(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"question": "What is 3*5?", "answer": "3*5=<<3*5=15>>15\n#### 15"}) + "\n")
    loaded = load_model("pebbles-student", device="cpu")
    [example] = worked_answers(loaded, read_prompts(path, "{prompt}"), 100)
    assert loaded.tokenizer.decode(example.token_ids[:-1]) == "3*5=15\n#### 15"
    assert example.token_ids[-1] in loaded.eos_ids


def test_the_end_token_is_the_one_that_the_chat_template_writes():
    loaded = load_model("pebbles-student", device="cpu")
    tokenizer = loaded.tokenizer
    own = tokenizer.eos_token_id
    turn_end = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    loaded = replace(loaded, eos_ids=frozenset({own, turn_end}))
    tokenizer.chat_template = None
    assert end_token(loaded) == own
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.content }}\n{% endfor %}"
    assert end_token(loaded) == turn_end


def test_the_loss_is_the_models_own(problems):
    loaded = load_model("pebbles-student", device="cpu")
    examples = worked_answers(loaded, read_prompts(problems, "{prompt}", 3), 200)
    expected = 0.0
    for example in examples:
        ids = torch.tensor(np.concatenate([example.prompt_ids, example.token_ids])[None].astype(np.int64))
        labels = ids.clone()
        labels[:, : len(example.prompt_ids)] = -100
        expected += loaded.model(input_ids=ids, labels=labels).loss.item() * len(example.token_ids)
    assert answer_loss(loaded, examples).item() == pytest.approx(expected, rel=1e-5)


def test_every_epoch_sees_every_example_once():
    settings, examples = Settings(batch_size=3, seed=4), list(range(9))
    epochs = [
        [x for step in range(first, first + 3) for x in step_examples(examples, step, settings)] for first in (0, 3)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == examples and epochs[0] != epochs[1]


def test_a_killed_call_resumes_to_the_same_bytes(problems, tmp_path, monkeypatch, capsys):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(monkeypatch, problems, whole)
    made = json.loads((whole / "made.json").read_text())
    assert made["steps"] == 6 and made["loss_last"] > 0
    arguments = ["pebbles-student", str(problems), str(killed), *OPTIONS]
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(KILLED_AFTER_SAVE_OF_STEP_4, encoding="utf-8")
    process = start_script(program, arguments, log, {})
    process.join(300)
    assert process.exitcode == -signal.SIGKILL, log.read_text(encoding="utf-8")
    assert not (killed / "made.json").exists()
    with pytest.raises(RocktokensError, match="other models, data or settings"):
        run(monkeypatch, problems, killed, "--learning-rate", "1e-3")
    run(monkeypatch, problems, killed)
    assert (whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
    assert json.loads((killed / "made.json").read_text()) == made
    assert not (killed / ".unfinished").exists()
    run(monkeypatch, problems, killed)
    assert "is finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--epochs", "0"], "--epochs is '0': give a number above 0"),
        (["--epochs", "nan"], "--epochs is 'nan': give a number above 0"),
        (["--batch-size", "0"], "--batch-size is '0': give a whole number from 1 on"),
        (["--micro-batch-size", "x"], "--micro-batch-size is 'x': give a whole number from 1 on"),
        (["--learning-rate", "-1"], "--learning-rate is '-1': give a number above 0"),
        (["--warmup-share", "2"], "--warmup-share is '2': give a number from 0 to 1"),
        (["--save-steps", "0"], "--save-steps is '0': give a whole number from 1 on"),
        (["--limit", "0"], "--limit is '0': give a whole number from 1 on"),
        (["--seed", "-1"], "--seed is '-1': give a whole number from 0 on"),
        (["--dtype", "int8"], "--dtype is 'int8': give float32 or bfloat16"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(problems, tmp_path, monkeypatch, options, sentence):
    with pytest.raises(RocktokensError) as refused:
        run(monkeypatch, problems, tmp_path / "out", *options)
    assert str(refused.value) == sentence and not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_model_is_kept_and_the_program_ends_with_code_2(problems, tmp_path):
    before, log = problems.read_bytes(), tmp_path / "log"
    process = start_script(EXAMPLES / "make_teacher.py", ["pebbles-student", str(problems), str(problems)], log, {})
    process.join(300)
    assert process.exitcode == 2 and problems.read_bytes() == before
    assert log.read_text(encoding="utf-8") == f"error: {problems} is a file: give the folder of the finished model\n"


def test_fine_tuning_lowers_the_loss_and_another_seed_gives_other_weights(problems, tmp_path, monkeypatch):
    run(monkeypatch, problems, tmp_path / "a", "--epochs", "4", "--learning-rate", "1e-3")
    run(monkeypatch, problems, tmp_path / "b", "--seed", "1", "--limit", "8")
    examples = worked_answers(load_model("pebbles-student", device="cpu"), read_prompts(problems, "{prompt}"), 200)
    losses = [
        answer_loss(load_model(str(name), device="cpu"), examples) for name in ("pebbles-student", tmp_path / "a")
    ]
    assert losses[1] < 0.9 * losses[0]
    assert json.loads((tmp_path / "b" / "made.json").read_text())["examples"] == 8
    weights = [load_file(tmp_path / name / "model.safetensors")["model.norm.weight"] for name in ("a", "b")]
    assert not torch.equal(*weights)


def test_weights_are_trained_in_float32_and_rounded_when_they_are_saved(problems, tmp_path, monkeypatch):
    run(monkeypatch, problems, tmp_path / "wide")
    run(monkeypatch, problems, tmp_path / "half", "--dtype", "bfloat16")
    wide, half = (load_file(tmp_path / name / "model.safetensors") for name in ("wide", "half"))
    assert {name: tensor.bfloat16().tolist() for name, tensor in wide.items()} == {
        name: tensor.tolist() for name, tensor in half.items()
    }
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
