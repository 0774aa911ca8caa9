"""How ``rocktokens check --plan`` is printed: the conclusion, memory item by item, layouts, and what is assumed."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from rocktokens.cli.tables import heading, print_lines, print_table
from rocktokens.display.numbers import byte_size, counted, duration, parameter_count
from rocktokens.display.table import Column, Table, number, text, verdict

if TYPE_CHECKING:
    from rocktokens.preflight.plan import Layout, Plan
    from rocktokens.preflight.shapes import ModelShape


def print_plan(plan: "Plan") -> None:
    """Print the conclusion first, then what it rests on."""
    print_lines(plan.conclusion, _model("student", plan.student), _model("teacher", plan.teacher))
    heading("Memory", "at the fullest moment of a step")
    print_table(memory_table(plan.layouts))
    heading("Layouts", f"a rollout takes {byte_size(plan.cache_per_rollout)} of cache")
    print_table(layout_table(plan.layouts))
    heading("Assumed")
    print_lines(*(f"- {line}" for line in plan.assumptions))


def memory_table(layouts: Sequence["Layout"]) -> Table:
    """Make the table of items: a row each, and their sum."""
    items = [field.name for field in fields(layouts[0].memory)]
    rows = [(name.replace("_", " "), [getattr(own.memory, name) for own in layouts]) for name in items]
    rows.append(("all", [own.total for own in layouts]))

    def column(at: int) -> Column[tuple[str, list[float]]]:
        return Column(layout_name(layouts[at]), lambda row: number(row[1][at], byte_size))

    columns: list[Column[tuple[str, list[float]]]] = [Column("per GPU", lambda row: text(row[0]))]
    columns += map(column, range(len(layouts)))
    return Table.of("plan-memory", columns, rows)


def layout_table(layouts: Sequence["Layout"]) -> Table:
    """Make the table of layouts: what is left for rollouts, and how long a step takes."""
    columns: list[Column[Layout]] = [
        Column("layout", lambda own: text(layout_name(own))),
        Column("GB left", lambda own: number(own.room / 1e9, "{:.1f}".format)),
        Column("at once", lambda own: number(own.rollouts_at_once)),
        Column("verdict", lambda own: verdict(own.verdict)),
        Column("step", lambda own: number(own.step and own.step.total, _seconds)),
        Column("sampling", lambda own: number(own.step and own.step.sampling, _seconds)),
        Column("teacher", lambda own: number(own.step and own.step.teacher, _seconds)),
        Column("update", lambda own: number(own.step and own.step.update, _seconds)),
        Column("gathering", lambda own: number(own.step and own.step.gathering, _seconds)),
        Column("bottleneck", lambda own: text(own.step.bottleneck if own.step else "")),
    ]
    return Table.of("plan-layouts", columns, layouts)


def layout_name(layout: "Layout") -> str:
    """Name a layout: ``1 GPU``, ``whole on each``, ``over 8``."""
    if layout.is_sharded:
        return f"over {layout.gpus}"
    return "1 GPU" if layout.gpus == 1 else "whole on each"


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else duration(value)


def _model(role: str, shape: "ModelShape") -> str:
    size = shape.size
    of_them = []
    if size.trainable != size.parameters:
        of_them.append(f"{parameter_count(size.trainable)} trained")
    if shape.experts:
        active = shape.active_in_layers + shape.outside_layers
        of_them.append(f"{parameter_count(round(active))} active per token")
    details = f" ({', '.join(of_them)})" if of_them else ""
    parameters = f"{parameter_count(size.parameters)} parameters{details}"
    return f"{role}: {shape.name}, {parameters}, {counted(size.layers, 'layer')}"
