"""Prompts with verifiable answers: the embedded word problems, JSON lines, and datasets of the Hugging Face Hub."""

from rocktokens.config import HubTask, JsonlTask, TaskSection, WordmathTask
from rocktokens.tasks.base import Task


def make_task(section: TaskSection) -> Task:
    """Make the task a config section describes."""
    match section:
        case WordmathTask():
            from rocktokens.tasks.wordmath import Wordmath

            return Wordmath(split=section.split, max_steps=section.max_steps)
        case JsonlTask():
            from rocktokens.tasks.jsonl import load_jsonl

            return load_jsonl(section)
        case HubTask():
            from rocktokens.tasks.hub import load_hub

            return load_hub(section)
