"""The configuration of a run: one TOML file, strict models, overrides by ``--set section.key=value``.

An unknown key is an error that names the nearest valid key; every error is one sentence.
"""

from rocktokens.config.base import Divergence as Divergence
from rocktokens.config.base import Section as Section
from rocktokens.config.base import WholeOrAuto as WholeOrAuto
from rocktokens.config.checkpoints import checkpoint_label as checkpoint_label
from rocktokens.config.checkpoints import checkpoint_names as checkpoint_names
from rocktokens.config.checkpoints import find_step as find_step
from rocktokens.config.checkpoints import require_step as require_step
from rocktokens.config.checkpoints import run_checkpoint_names as run_checkpoint_names
from rocktokens.config.checkpoints import student_name as student_name
from rocktokens.config.checkpoints import traced_students as traced_students
from rocktokens.config.checkpoints import unknown_checkpoint as unknown_checkpoint
from rocktokens.config.files import apply_overrides as apply_overrides
from rocktokens.config.files import dump_config as dump_config
from rocktokens.config.files import dump_toml as dump_toml
from rocktokens.config.files import forget_removed as forget_removed
from rocktokens.config.files import has_config as has_config
from rocktokens.config.files import load_config as load_config
from rocktokens.config.files import parse_config as parse_config
from rocktokens.config.files import read_toml as read_toml
from rocktokens.config.files import run_config as run_config
from rocktokens.config.options import TraceOptions as TraceOptions
from rocktokens.config.partial_teacher import why_not_top_k as why_not_top_k
from rocktokens.config.policies import PolicySection as PolicySection
from rocktokens.config.sections import ETA as ETA
from rocktokens.config.sections import GAMMA as GAMMA
from rocktokens.config.sections import POSITIVE as POSITIVE
from rocktokens.config.sections import Config as Config
from rocktokens.config.sections import EvaluationSection as EvaluationSection
from rocktokens.config.sections import FindSection as FindSection
from rocktokens.config.sections import GradientsSection as GradientsSection
from rocktokens.config.sections import KnockoutSection as KnockoutSection
from rocktokens.config.sections import LoraSection as LoraSection
from rocktokens.config.sections import ModelsSection as ModelsSection
from rocktokens.config.sections import RolloutsSection as RolloutsSection
from rocktokens.config.sections import RunSection as RunSection
from rocktokens.config.sections import ScoringSection as ScoringSection
from rocktokens.config.sections import TeacherSection as TeacherSection
from rocktokens.config.sections import TraceSection as TraceSection
from rocktokens.config.sections import TrainingSection as TrainingSection
from rocktokens.config.sections import checkpoint_steps as checkpoint_steps
from rocktokens.config.sections import evaluation_task as evaluation_task
from rocktokens.config.sections import has_grades as has_grades
from rocktokens.config.sections import why_not_graded as why_not_graded
from rocktokens.config.sentences import validate as validate
from rocktokens.config.tasks import HubTask as HubTask
from rocktokens.config.tasks import JsonlTask as JsonlTask
from rocktokens.config.tasks import TaskSection as TaskSection
from rocktokens.config.tasks import WordmathTask as WordmathTask
