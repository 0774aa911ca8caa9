import importlib
import io
import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from rocktokens.cli.check import finding_table
from rocktokens.cli.main import app
from rocktokens.config import load_config, parse_config
from rocktokens.display.numbers import byte_size
from rocktokens.errors import ConfigError
from rocktokens.models.fingerprints import vocabulary_sha256
from rocktokens.models.load import load_model
from rocktokens.preflight.findings import Finding
from rocktokens.preflight.pair_probe import (
    PairProbe,
    check_overlap,
    check_sampler,
    check_stop_mass,
    check_truncation,
)
from rocktokens.preflight.resources import (
    MemoryNeed,
    ModelSize,
    check_disk,
    check_memory,
    disk_need,
    disk_use,
    estimate_time,
    memory_need,
)
from rocktokens.preflight.starter_rules import PairFacts, fit_settings
from rocktokens.preflight.static_checks import (
    check_directory,
    check_head,
    check_learning_rate,
    check_policy,
    check_retention,
    check_templates,
    check_widths,
    misfit,
)
from rocktokens.preflight.trackers import check_trackers
from rocktokens.recipes import recipes
from rocktokens.run_dir import RunDir
from rocktokens.types import RockSet, RockToken, Rollout

ENDS = [256, *range(32)]
NAMES = [
    "tokenizers",
    "head widths",
    "student head",
    "teacher head",
    "end tokens",
    "chat template",
    "batch",
    "learning rate",
    "prompts",
    "evaluation",
    "run directory",
    "disk",
    "divergence",
    "overlap",
    "stop mass",
    "lengths",
    "sampler",
    "memory",
    "time",
]


def byte_tokenizer(reverse: bool = False, template: str | None = None) -> PreTrainedTokenizerFast:
    """Every byte is a token; reversed, every byte is another token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = template
    return fast


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, vocab_size: int = 258, ends=ENDS) -> str:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        eos_token_id=256,
        pad_token_id=257,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_model(folder / "student", byte_tokenizer(), seed=1)
    save_model(folder / "teacher", byte_tokenizer(), seed=2)
    lines = [json.dumps({"question": f"What is {n} + {n % 5}?", "answer": str(n + n % 5)}) for n in range(40)]
    (folder / "task.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "run.toml").write_text(
        f"""
[run]
directory = "{folder}/run"
[models]
student = "{folder}/student"
teacher = "{folder}/teacher"
device = "cpu"
[task]
name = "jsonl"
path = "{folder}/task.jsonl"
[rollouts]
max_completion_length = 12
num_generations = 2
[training]
max_steps = 6
per_device_train_batch_size = 4
gradient_accumulation_steps = 2
save_steps = 4
[trace]
num_prompts = 10
[evaluation]
num_prompts = 30
[evaluation.task]
name = "jsonl"
path = "{folder}/task.jsonl"
"""
    )
    return folder


def run_json(pair: Path, *overrides: str) -> tuple[int, dict[str, dict]]:
    """The exit code, and the findings by name."""
    sets = [part for override in overrides for part in ("--set", override)]
    result = CliRunner().invoke(app, ["check", str(pair / "run.toml"), "--json", *sets])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}


def run_config(pair: Path, *overrides: str):
    return parse_config((pair / "run.toml").read_text(), list(overrides))


def test_the_embedded_pair_has_no_failure_and_its_run_directory_stays_untouched(tmp_path):
    toml = tmp_path / "run.toml"
    models = 'student = "pebbles-student"\nteacher = "pebbles-teacher"\ndevice = "cpu"\n'
    toml.write_text(f'[run]\ndirectory = "{tmp_path}/run"\n[models]\n{models}')
    result = CliRunner().invoke(app, ["check", str(toml), "--json", "--set", "rollouts.max_completion_length=80"])
    record = json.loads(result.stdout)
    assert result.exit_code == 0 and record["level"] != "fail"
    findings = {finding["name"]: finding for finding in record["findings"]}
    assert list(findings) == NAMES
    assert all(bool(finding["remedy"]) == (finding["level"] != "ok") for finding in findings.values())
    assert findings["overlap"]["level"] == findings["stop mass"]["level"] == findings["sampler"]["level"] == "ok"
    assert not (tmp_path / "run").exists()


def test_the_probe_is_the_same_every_time_and_follows_the_seed(pair):
    first, again, other = (run_json(pair, f"run.seed={seed}")[1] for seed in (0, 0, 1))
    for name in ("divergence", "overlap", "stop mass", "lengths"):
        assert first[name]["measured"] == again[name]["measured"], name
    assert first["divergence"]["measured"]["kl"] != other["divergence"]["measured"]["kl"]


def test_another_tokenizer_fails_with_one_sentence_and_puts_the_probe_off(pair, tmp_path):
    teacher = save_model(tmp_path / "teacher", byte_tokenizer(reverse=True), seed=2)
    code, findings = run_json(pair, f"models.teacher={teacher}")
    assert code == 2 and findings["tokenizers"]["level"] == "fail"
    assert findings["tokenizers"]["remedy"].startswith("student and teacher have different vocabularies, first at id 0")
    assert "\n" not in findings["tokenizers"]["remedy"]
    assert findings["probe"]["value"] == "put off" and "overlap" not in findings
    table = CliRunner().invoke(app, ["check", str(pair / "run.toml"), "--set", f"models.teacher={teacher}"])
    assert table.exit_code == 2
    assert "different vocabularies" in " ".join(table.stdout.replace("│", " ").split())
    assert f"fix what failed, then: rocktokens check {pair / 'run.toml'}" in table.stdout


def test_unequal_heads_other_ends_and_other_templates_are_warnings(pair, tmp_path):
    template = "{% for m in messages %}[user] {{ m['content'] }}{% endfor %}"
    teacher = save_model(tmp_path / "teacher", byte_tokenizer(template=template), seed=2, vocab_size=264, ends=[256, 7])
    code, findings = run_json(pair, f"models.teacher={teacher}")
    assert code == 0
    widths = findings["head widths"]
    assert widths["level"] == "warn" and widths["measured"] == {"student": 258, "teacher": 264, "tokenizer": 258}
    assert widths["remedy"].startswith("the 6 extra columns are excluded from both softmaxes")
    assert findings["end tokens"]["level"] == "warn"
    assert findings["end tokens"]["measured"] == {"student": sorted(ENDS), "teacher": [7, 256]}
    assert findings["chat template"]["level"] == "warn"
    assert findings["chat template"]["measured"] == {"student": None, "teacher": "[user] What is 3 + 4?"}
    unused = run_json(pair, f"models.teacher={teacher}", "rollouts.chat_template=false")[1]
    assert unused["chat template"]["level"] == "ok"


def test_a_template_is_compared_by_what_it_renders():
    spaced = "{%- for m in messages -%}   {{ m['content'] }}{%- endfor -%}"
    tight = "{%- for m in messages -%}{{ m['content'] }}{%- endfor -%}"
    same = check_templates(byte_tokenizer(template=spaced), byte_tokenizer(template=tight), used=True)
    assert same.level == "ok" and same.value == "the same"
    assert "none" in check_templates(byte_tokenizer(), byte_tokenizer(), used=True).value


def test_a_head_that_does_more_than_is_known_fails(pair):
    loaded = load_model(str(pair / "student"), device="cpu")
    assert check_head("student head", loaded).level == "ok"
    loaded.model.lm_head.register_forward_hook(lambda _module, _inputs, logits: 2 * logits)
    finding = check_head("student head", loaded)
    assert finding.level == "fail" and "computes logits in a way that is not known here" in finding.remedy


def test_a_tokenizer_longer_than_a_head_is_named():
    finding = check_widths(258, 258, 260)
    assert finding.level == "warn" and finding.remedy.startswith("2 entries of the tokenizer have no logit")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rollouts.max_prompt_length=14", "has 15 tokens, rollouts.max_prompt_length is 14"),
        ("rollouts.max_completion_length=114", "answered by 114 more, but the student sees only 128"),
    ],
)
def test_a_prompt_that_does_not_fit_fails(pair, override, sentence):
    code, findings = run_json(pair, override)
    assert code == 2 and findings["prompts"]["level"] == "fail" and "probe" in findings
    assert sentence in findings["prompts"]["remedy"]


def test_the_longest_prompt_that_fits_does(pair):
    lengths, contexts = {"a": 3, "b": 16}, {"student": 128, "teacher": None}
    fitting = run_config(pair, "rollouts.max_prompt_length=16", "rollouts.max_completion_length=112")
    assert misfit(fitting, lengths, contexts) == ""
    assert "the teacher sees only 127" in misfit(fitting, lengths, {"student": 128, "teacher": 127})


def test_prompts_are_counted(pair):
    prompts = run_json(pair)[1]["prompts"]["measured"]
    assert prompts == {"asked": 6 * 4, "available": 40, "looked_at": 24, "longest": 15}


def test_evaluation_that_cannot_be_graded_is_a_warning(pair):
    code, findings = run_json(pair, "evaluation.task.answer_field=", "evaluation.num_prompts=50")
    assert code == 0 and findings["evaluation"]["level"] == "warn"
    assert findings["evaluation"]["measured"] == {"asked": 50, "available": 40, "answered": 0}
    few = run_json(pair, "evaluation.num_prompts=50")[1]["evaluation"]
    assert few["remedy"] == "only 40 prompts are there: lower evaluation.num_prompts"
    missing = run_json(pair, "evaluation.task.path=/nowhere.jsonl")[1]["evaluation"]
    assert missing["level"] == "warn" and "/nowhere.jsonl" in missing["remedy"]


def test_evaluation_on_nothing_is_a_warning(pair, tmp_path):
    text = (pair / "run.toml").read_text().split("[evaluation.task]")[0]
    (tmp_path / "run.toml").write_text(text)
    code, findings = run_json(tmp_path)
    assert code == 0 and findings["evaluation"]["level"] == "warn"
    assert findings["evaluation"]["remedy"].startswith("evaluation.task is not set, and the run's task is jsonl")


def test_a_batch_that_generations_do_not_divide_fails(pair):
    code, findings = run_json(pair, "rollouts.num_generations=3")
    assert code == 2 and "rollouts.num_generations = 3 does not divide the 8" in findings["batch"]["remedy"]


def test_rocks_of_another_vocabulary_fail_but_the_probe_runs(pair, tmp_path):
    path = tmp_path / "rocks.json"
    rocks = RockSet("0" * 64, {}, {}, {}, [RockToken(3, "", 1, 2, 1.0, 2.0, None, None, "other")])
    rocks.save(path)
    settings = ("policy.name=rocks", f"policy.rocks={path}")
    code, findings = run_json(pair, *settings)
    assert code == 2 and "the rocks were found with tokenizer 000000000000" in findings["policy"]["remedy"]
    assert "overlap" in findings
    replace(rocks, tokenizer_sha256=vocabulary_sha256(byte_tokenizer().get_vocab())).save(path)
    assert check_policy(run_config(pair, *settings), byte_tokenizer()).level == "ok"
    path.unlink()
    assert "does not exist" in check_policy(run_config(pair, *settings), byte_tokenizer()).remedy


def test_classes_are_texts_of_one_token(pair):
    def checked(classes: str) -> Finding:
        return check_policy(run_config(pair, "policy.name=coarse", f"policy.classes={classes}"), byte_tokenizer())

    assert checked('[["a", "b"]]').level == "ok"
    assert "the text 'ab' of a class is 2 tokens, not one" in checked('[["ab", "c"]]').remedy
    assert "token id 3 is in the classes twice" in checked("[[3, 4], [3, 5]]").remedy


def test_the_run_directory(tmp_path):
    assert check_directory(tmp_path / "a" / "b").level == "ok"
    (tmp_path / "file").write_text("")
    assert check_directory(tmp_path / "file" / "run").level == "fail"
    RunDir(tmp_path / "taken").update_manifest(command="distill")
    taken = check_directory(tmp_path / "taken")
    assert taken.level == "warn" and "--resume" in taken.remedy


def test_disk_arithmetic(pair):
    need = disk_need(run_config(pair), trainable=1000)
    traces = (40 * (6 * 8 + 3 * 10) + 2 * 8 * 8 * 3 * 10) * 12
    assert need == {"checkpoints": 3 * 4 * 1000, "optimizer": 2 * 8 * 1000, "traces": traces}
    listed = disk_need(run_config(pair, 'trace.checkpoints=["a", "b"]', "trace.top_k=0"), trainable=0)
    assert listed["traces"] == 40 * (6 * 8 + 2 * 10) * 12
    total = sum(need.values())
    assert [check_disk(need, free, {}).level for free in (total, total - 1, 28000, 27999)] == [
        "ok",
        "warn",
        "warn",
        "fail",
    ]
    assert check_disk(need, 27999, {}).remedy.startswith(f"free {byte_size(total - 27999)}, raise training.save_steps")


@pytest.mark.parametrize(
    ("steps", "limit", "kept", "weights", "states", "replayed"),
    [
        (12, 9, "0, 3, 6, 9 and 12", 5, 2, 5),
        (12, 2, "0, 9 and 12", 4, 2, 3),
        (12, 1, "0 and 12", 3, 2, 2),
        (3, 1, "0 and 3", 2, 1, 2),
    ],
)
def test_checkpoints_that_are_dropped_take_no_disk_and_may_be_missed(
    pair, steps, limit, kept, weights, states, replayed
):
    """One more than stays is there while it is written; the state of the optimizer twice."""
    saving = (f"training.max_steps={steps}", "training.save_steps=3", f"training.save_total_limit={limit}")
    config = run_config(pair, *saving, "trace.top_k=0")
    need = disk_need(config, trainable=1000)
    assert need["checkpoints"] == weights * 4000 and need["optimizer"] == states * 8000
    assert need["traces"] == 40 * (steps * 8 + replayed * 10) * 12
    found = check_retention(config)
    assert found.value == f"steps {kept} stay"
    assert found.level == ("warn" if limit < 3 and steps > 3 else "ok")
    if found.level == "warn":
        instead = "it would take step 9 for it" if limit == 2 else "it would do without"
        assert "training.save_total_limit" in found.remedy and "drops step 6, the middle of the run" in found.remedy
        assert instead in found.remedy


def test_what_a_run_has_on_the_disk_is_not_needed_again(pair, tmp_path):
    run = RunDir(tmp_path)
    assert disk_use(run) == {}
    sizes = {"checkpoints/step-0/a": 300, "checkpoints/step-0/optimizer.safetensors": 40, "traces/training/b": 20}
    for path, size in {**sizes, "rollouts/c": 7, "find.json": 999}.items():
        run.commit(path, lambda target, size=size: target.write_bytes(bytes(size)))
    assert disk_use(run) == {"checkpoints": 300, "optimizer": 40, "traces": 27}
    need = {"checkpoints": 800, "optimizer": 140, "traces": 20}
    finding = check_disk(need, 600, disk_use(run))
    assert finding.level == "ok"
    assert finding.measured == {"checkpoints": 500, "optimizer": 100, "traces": 0, "free": 600, "in_all": need}
    assert finding.value == "at most 600 B more (checkpoints 500 B, optimizer 100 B, traces 0 B), 600 B free"
    written = {"checkpoints": 301, "optimizer": 40}
    assert [check_disk(need, 599, own).level for own in (disk_use(run), written)] == ["fail", "warn"]


@pytest.mark.parametrize(
    ("rate", "parameters", "lora", "remedy"),
    [
        (5e-4, 10**6, "false", ""),
        (5e-4, 10**9, "false", "250 times the usual rate, at which training may diverge: set training.learning_rate"),
        (1.9e-5, 10**9, "false", ""),
        (2.1e-5, 10**9, "false", "10 times the usual rate"),
        (1e-7, 10**9, "false", "1/20 of the usual rate, at which the student may hardly change: set training"),
        (1.9e-4, 10**9, "true", ""),
        (1e-6, 10**9, "true", "1/20 of the usual rate"),
    ],
)
def test_a_learning_rate_far_from_the_usual_is_a_warning(pair, rate, parameters, lora, remedy):
    config = run_config(pair, f"training.learning_rate={rate}", f"lora.enabled={lora}")
    finding = check_learning_rate(config, parameters)
    assert (finding.level, finding.remedy[: len(remedy)]) == ("warn" if remedy else "ok", remedy)
    usual = fit_settings(PairFacts(parameters, parameters, 50_000), lora=lora == "true").learning_rate
    assert finding.measured["usual"] == usual and f"{rate:g}; usual" in finding.value and f"{usual:g}" in finding.value


@pytest.mark.parametrize("name", sorted(own for own, recipe in recipes().items() if "[study]" not in recipe.text))
def test_no_recipe_has_an_unusual_learning_rate_unless_it_says_so(name):
    config = load_config(name)
    sizes = {"pebbles-student": 10**6, "runs/qwen-student": 1_169_331_712, "Qwen/Qwen3-4B": 4_022_468_096}
    finding = check_learning_rate(config, sizes.get(config.models.student, 135 * 10**6))
    is_on_purpose = "`check` warns of that" in recipes()[name].text
    assert finding.level == ("warn" if is_on_purpose else "ok")
    assert not is_on_purpose or config.training.learning_rate == pytest.approx(10 * finding.measured["usual"])


def test_trackers_are_imported_and_need_what_they_log_in_with(tmp_path, monkeypatch):
    """Packages of our own by these names: the finding says what the real import does, and nothing is sent."""

    def put(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    put("wandb", "__version__ = '9.1'")
    asked = check_trackers(["wandb"], {})
    assert asked.level == "fail"
    assert asked.remedy == "wandb has no key for api.wandb.ai: run `wandb login`, or set WANDB_MODE=offline"
    assert check_trackers(["wandb"], {"WANDB_MODE": "offline"}).value == "wandb 9.1"
    assert check_trackers(["wandb"], {"WANDB_API_KEY": "secret"}).level == "ok"
    own = {"WANDB_BASE_URL": "https://wandb.example.org:8080"}
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    assert check_trackers(["wandb"], {}).level == "ok"
    assert "no key for wandb.example.org" in check_trackers(["wandb"], own).remedy
    put("wandb", "raise OSError('libcuda is\\nmissing')")
    put("trackio", "")
    broken = check_trackers(["trackio", "wandb"], {})
    assert (broken.level, broken.value) == ("fail", "trackio of trackio, wandb can be used")
    assert broken.remedy == (
        "training.report_to names 'wandb', which cannot be imported (libcuda is): install it again"
    )
    put("wandb", "import a_package_it_needs")
    assert "'wandb', which is not installed (it needs a_package_it_needs): pip" in check_trackers(["wandb"]).remedy
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)


def test_trackers_that_are_asked_for_are_looked_at(pair):
    missing = next((own for own in ("trackio", "wandb", "tensorboard") if not find_spec(own)), None)
    if missing is None:
        pytest.skip("every tracker is installed")
    code, findings = run_json(pair, f'training.report_to=["{missing}"]')
    assert code == 2 and findings["trackers"]["level"] == "fail" and "overlap" in findings
    assert findings["trackers"]["remedy"].startswith(f"training.report_to names '{missing}', which is not installed")


def test_epochs_are_counted_out(pair):
    prompts = run_json(pair, "training.num_train_epochs=2.5")[1]["prompts"]["measured"]
    assert prompts == {"asked": 100, "available": 40, "looked_at": 40, "longest": 15}
    result = CliRunner().invoke(
        app, ["check", str(pair / "run.toml"), "--set", "task.name=wordmath", "--set", "training.num_train_epochs=2"]
    )
    assert isinstance(result.exception, ConfigError) and "'wordmath' makes prompts without end" in str(result.exception)


def test_memory_levels():
    need = MemoryNeed(student=300, teacher=100, update=400, sampling=200)
    assert [check_memory(need, available).level for available in (1000, 999, 800, 799)] == [
        "ok",
        "warn",
        "warn",
        "fail",
    ]


def test_on_a_gpu_the_sampler_stays_in_memory_during_the_update():
    need = MemoryNeed(student=300, teacher=100, update=400, sampling=200, is_kept=True)
    assert (need.peak, replace(need, is_kept=False).peak) == (1000, 800)
    shown = check_memory(need, 2000)
    assert "sampling 200 B; what is sampled with stays" in shown.value and "is_kept" not in shown.measured
    size = ModelSize(parameters=100, trainable=100, head=0, cache_per_token=10, layers=1, width=1)
    common = {"teacher_bytes": 0, "activation_bytes": 0, "chunk_positions": 0, "vocab_size": 0, "sampled_tokens": 5}
    assert memory_need(size, **common).sampling == 4 * 10 * 5
    assert memory_need(size, **common, on_gpu=True, bf16=True).sampling == 2 * 10 * 5 + 2 * 100


def test_lora_needs_less_memory_and_disk(pair):
    whole, adapted = (run_json(pair, f"lora.enabled={flag}", "lora.r=1")[1] for flag in ("false", "true"))
    parameters = 2 * 258 * 16 + 4 * 16 * 16 + 3 * 16 * 32 + 3 * 16
    adapters = 4 * (16 + 16) + 3 * (16 + 32)
    assert whole["memory"]["measured"]["student"] == 16 * parameters
    assert adapted["memory"]["measured"]["student"] == 4 * (parameters + adapters) + 12 * adapters
    assert adapted["disk"]["measured"]["checkpoints"] == 3 * 4 * adapters
    assert adapted["disk"]["measured"]["optimizer"] == 2 * 8 * adapters
    assert adapted["memory"]["measured"]["checkpoint"] == 12 * adapters


def test_time_of_the_run_is_steps_times_a_step(pair):
    probe = PairProbe(100, 1.0, None, 1.0, 1.0, None, None, seconds_student=1, seconds_teacher=2, seconds_heads=3)
    measured = estimate_time(run_config(pair), probe, sampled_in=5.0, rollouts=4, device="cpu").measured
    assert measured == pytest.approx({"tokens_per_step": 200, "sampling": 10, "update": 22, "run": 6 * 32})


def test_judgements_at_their_thresholds():
    assert [check_stop_mass(mass).level for mass in (0.01, 0.0099, None)] == ["ok", "warn", "warn"]
    assert "lengths may explode" in check_stop_mass(0.0).remedy
    assert [check_overlap(*pair).level for pair in ((0.2, 0.5), (0.19, 0.9), (0.9, 0.49))] == [
        "ok",
        "warn",
        "warn",
    ]
    assert [check_sampler(gap).level for gap in (0.01, 0.011, None)] == ["ok", "warn", "ok"]


def test_rollouts_that_are_cut_off():
    ids = torch.zeros(4).int().numpy()
    rollouts = [Rollout(i, "p", 0, ids, ids[: 2 + i], ids[: 2 + i], 0, finished=i == 0) for i in range(2)]
    half = check_truncation(rollouts, 3)
    assert half.level == "ok" and half.measured == {"mean_length": 2.5, "truncated_share": 0.5}
    assert check_truncation(rollouts[1:], 3).level == "warn"


def test_brackets_in_findings_are_shown_as_they_are():
    findings = [Finding("end tokens", "warn", "student [1], teacher [red]", "see [2]")]
    page = io.StringIO()
    Console(width=100, file=page).print(finding_table(findings))
    text = page.getvalue()
    assert "student [1], teacher [red]" in text and "see [2]" in text
