"""``rocktokens check``: what would go wrong in a run, and what it will need, before it starts (METHOD 9).

1. Without sampling (``static_checks``): tokenizers, LM heads, end tokens, chat templates, prompts, policy, run
   directory, disk.
2. A probe (``probe``): the student answers a few training prompts, the teacher scores them. Overlap, stop mass,
   lengths, the distance of the sampler from the trainer; from its timings and sizes an estimate of memory and time.

Every finding is ok, warn (the run works, its result may not be what you want) or fail (the run would stop or mislead).
A failure of what the probe stands on puts the probe off. Nothing is written to the run directory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import typer

from rocktokens.cli.common import AsJson, ConfigPath, Overrides, notes, print_json
from rocktokens.cli.tables import print_table
from rocktokens.config import Config, load_config
from rocktokens.display.table import Column, Table, text, verdict
from rocktokens.preflight.findings import Finding
from rocktokens.preflight.probe import check_probe
from rocktokens.preflight.static_checks import check_data, check_models, check_run, sample_prompts

PROBE_ROLLOUTS = 16
PROBE_NEEDS = ("tokenizers", "student head", "teacher head", "batch", "prompts")


def check(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Look for what would go wrong in a run, and estimate its memory and time, before it starts.

    Exits with 2 when something fails; warnings do not.

    Example: [bold]rocktokens check run.toml --set models.student=my/student[/bold]
    """
    record = run_check(load_config(config, overrides))
    if as_json:
        print_json(record)
    else:
        print_table(finding_table(record["findings"]))
    if record["level"] == "fail":
        raise typer.Exit(2)


def run_check(config: Config) -> dict[str, Any]:
    """All findings as a record, with the worst level among them."""
    with notes.status("loading"):
        from rocktokens.models.load import load_model
        from rocktokens.scoring.student import load_student
        from rocktokens.tasks import make_task

        task = make_task(config.task)
        student = load_student(config, None, config.models.device)
        teacher = load_model(config.models.teacher, config.models.dtype, config.models.device)
    with notes.status("looking at models and data"):
        prompts, lengths = sample_prompts(config, task, student.tokenizer)
        findings = [
            *check_models(config, student, teacher),
            *check_data(config, task, lengths, student, teacher),
            *check_run(config, student),
        ]
    if any(finding.level == "fail" and finding.name in PROBE_NEEDS for finding in findings):
        findings.append(Finding("probe", "warn", "put off", "mend the failures above, then check again"))
    else:
        findings += check_probe(config, student, teacher, prompts[:PROBE_ROLLOUTS], max(lengths.values()))
    levels = {finding.level for finding in findings}
    worst = next(level for level in ("fail", "warn", "ok") if level in levels)
    return {"level": worst, "findings": [asdict(finding) for finding in findings]}


def finding_table(findings: Sequence[Mapping[str, Any]]) -> Table:
    """Make the table of findings: a row each, with what to do about it."""
    columns: list[Column[Mapping[str, Any]]] = [
        Column("level", lambda own: verdict(own["level"])),
        Column("check", lambda own: text(own["name"])),
        Column("found", lambda own: text(own["value"])),
        Column("what to do", lambda own: text(own["remedy"])),
    ]
    return Table.of("preflight", columns, findings, "preflight")
