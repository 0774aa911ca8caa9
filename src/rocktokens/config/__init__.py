"""The configuration of a run: one TOML file, strict models, overrides by ``--set section.key=value``.

An unknown key is an error that names the nearest valid key; every error is one sentence.
"""

from rocktokens.config.base import Divergence, Section, WholeOrAuto
from rocktokens.config.files import (
    apply_overrides,
    dump_config,
    dump_toml,
    load_config,
    parse_config,
    read_toml,
    run_config,
    student_name,
)
from rocktokens.config.policies import PolicySection
from rocktokens.config.sections import (
    ETA,
    GAMMA,
    POSITIVE,
    Config,
    EvaluationSection,
    FindSection,
    GradientsSection,
    KnockoutSection,
    LoraSection,
    ModelsSection,
    RolloutsSection,
    RunSection,
    ScoringSection,
    TraceSection,
    TrainingSection,
    checkpoint_steps,
    evaluation_task,
)
from rocktokens.config.sentences import validate
from rocktokens.config.tasks import HubTask, JsonlTask, TaskSection, WordmathTask

__all__ = [
    "ETA",
    "GAMMA",
    "POSITIVE",
    "Config",
    "Divergence",
    "EvaluationSection",
    "FindSection",
    "GradientsSection",
    "HubTask",
    "JsonlTask",
    "KnockoutSection",
    "LoraSection",
    "ModelsSection",
    "PolicySection",
    "RolloutsSection",
    "RunSection",
    "ScoringSection",
    "Section",
    "TaskSection",
    "TraceSection",
    "TrainingSection",
    "WholeOrAuto",
    "WordmathTask",
    "apply_overrides",
    "checkpoint_steps",
    "dump_config",
    "dump_toml",
    "evaluation_task",
    "load_config",
    "parse_config",
    "read_toml",
    "run_config",
    "student_name",
    "validate",
]
