import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from rocktokens.cli.check import finding_table
from rocktokens.cli.main import app
from rocktokens.config import parse_config
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
    estimate_time,
    memory_need,
)
from rocktokens.preflight.static_checks import (
    check_directory,
    check_head,
    check_policy,
    check_templates,
    check_widths,
    misfit,
)
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
    toml.write_text(f'[run]\ndirectory = "{tmp_path}/run"\n[models]\ndevice = "cpu"\n')
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
    assert need == {"checkpoints": 3 * 12 * 1000, "traces": 40 * (6 * 8 + 3 * 10) * 12}
    listed = disk_need(run_config(pair, 'trace.checkpoints=["a", "b"]'), trainable=0)
    assert listed["traces"] == 40 * (6 * 8 + 2 * 10) * 12
    total = sum(need.values())
    assert [check_disk(need, free).level for free in (total, total - 1)] == ["ok", "warn"]


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
    assert adapted["disk"]["measured"]["checkpoints"] == 3 * 12 * adapters


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
