from rocktokens.errors import LONGEST, ControlMatchError, RocktokensError


def test_a_long_value_leaves_the_start_and_the_remedy_of_a_sentence():
    sentence = f"run.toml: find.k = {'9' * 100_000}: give a whole number"
    said = str(RocktokensError(sentence))
    assert (
        len(said) < LONGEST + 50
        and said.startswith("run.toml: find.k = 999")
        and said.endswith(": give a whole number")
    )
    assert "(98,0" in said and "characters more" in said


def test_any_other_sentence_is_as_it_was():
    for sentence in ("", "a: b", "x" * LONGEST):
        assert str(RocktokensError(sentence)) == sentence
    assert str(ControlMatchError("no partner: lower it", [3])) == "no partner: lower it"


def test_a_value_with_lines_is_one_line():
    assert str(RocktokensError("version 1\n2\u2028\x0c3: use another")) == "version 1 2  3: use another"
