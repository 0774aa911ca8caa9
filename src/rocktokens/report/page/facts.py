"""Facts of a run: the line below the title of its report, and everything that is needed to make its numbers again."""

from dataclasses import asdict

from rocktokens.config import checkpoint_label
from rocktokens.display.numbers import counted
from rocktokens.display.text import printable
from rocktokens.report.views.run_view import RunView

RESULT_FILES = ("rocks.json", "find.json", "classes.json", "gradients.json", "knockout.json", "evaluations.json")
STUDY_FACTS = ("baseline", "seeds", "n_prompts", "alpha", "margin", "denominator")


def headline(run: RunView) -> dict[str, str]:
    """Say what the run is of, as far as it is known: both models, the task, the steps, and when it was started."""
    manifest, replay, sweep = run.manifest, run.replay, run.knockout
    tasks = [replay.task.get("name") if replay else None, sweep.settings.task if sweep else None]
    known = {
        "student": manifest.get("student"),
        "teacher": _teacher(run),
        "task": next(filter(None, (*tasks, *(own.task for own in run.evaluations))), None),
        "steps": _steps(run),
        "date": str(manifest.get("started", ""))[: len("2026-01-01")],
    }
    return {name: printable(str(fact)) for name, fact in known.items() if fact}


def _teacher(run: RunView) -> str | None:
    name = run.manifest.get("teacher") or (run.replay and run.replay.teacher)
    return f"{name} ({run.teacher_label})" if name and run.teacher_label else name


def _steps(run: RunView) -> str:
    steps = run.checkpoints
    if not steps:
        return f"{run.study.arms[0].end.step:,} (study)" if run.study else ""
    return f"{checkpoint_label(steps[-1], run.checkpoint_names)} ({counted(len(steps), 'checkpoint')})"


def reproduction_facts(run: RunView) -> dict[str, dict[str, str]]:
    """List everything that is needed to reproduce the numbers."""
    manifest, replay = run.manifest, run.replay
    models = {"student": manifest.get("student"), "teacher": _teacher(run)}
    source = run.rocks.source if run.rocks else {}
    files, steps = manifest["files"], replay.checkpoints if replay else {}
    banning = sorted(asdict(run.knockout.settings).items()) if run.knockout else []
    known = {
        "The run": {**models, **{name: manifest.get(name) for name in ("command", "seed", "started", "num_processes")}},
        "What makes a rock": run.rocks.criterion if run.rocks else {},
        "Knock-out": {name: value for name, value in banning if not isinstance(value, dict | list)},
        "Gradients": asdict(run.gradients.settings) if run.gradients else {},
        "Study": {name: getattr(run.study, name) for name in STUDY_FACTS} if run.study else {},
        "Versions": manifest.get("versions", {}),
        "SHA-256": {
            "tokenizer": manifest.get("tokenizer_sha256"),
            "trace parts": source.get("manifest_sha256"),
            **{f"checkpoint {checkpoint_label(step, run.checkpoint_names)}": steps[step] for step in sorted(steps)},
            **{name: files[name]["sha256"] for name in RESULT_FILES if name in files},
        },
    }
    return {
        title: {name.replace("_", " "): printable(str(fact)) for name, fact in facts.items() if fact not in (None, "")}
        for title, facts in known.items()
    }
