"""What the package exports: every name resolves, is listed by ``dir``, and is known to type checkers."""

import ast
from pathlib import Path

import pytest

import rocktokens

CONTRACT = (
    *("TraceWriter", "TraceStore", "find_rocks", "RockSet", "match_controls", "token_scores", "weighted_kl"),
    *("make_policy", "knockout_sweep", "gradient_shares", "load_config", "distill", "replay", "evaluate", "run_study"),
    *("build_report", "RunView", "FindRecord", "TokenClasses"),
)


@pytest.mark.parametrize("name", sorted({*CONTRACT, *rocktokens.__all__}))
def test_a_public_name_resolves_and_is_visible(name: str):
    assert name in rocktokens.__all__ and name in dir(rocktokens)
    assert name == "__version__" or callable(getattr(rocktokens, name))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'find_pebbles'"):
        getattr(rocktokens, "find_pebbles")  # noqa: B009


def test_type_checkers_see_the_same_names_from_the_same_modules():
    tree = ast.parse(Path(rocktokens.__file__).read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == rocktokens._HOME_OF
