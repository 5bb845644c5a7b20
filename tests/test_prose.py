"""The check of prose finds what it names; the pages that a reader sees first have none of it."""

import prose
import pytest


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("It is no table.", "'is no '"),
        ("Use those of the actor.", "'those of'"),
        ("It runs beside the learner.", "'beside'"),
        ("A folder of its own is made.", "'of its own'"),
        ("It is fast. Of two such runs, one ends.", "'Of two such runs, '"),
        ("word " * 31, "31 words"),
    ],
)
def test_a_phrase_is_found(text, begins):
    (found,) = prose.warnings(text)
    assert found.startswith(begins)


def test_plain_sentences_code_and_tables_are_left_alone():
    page = (
        "# Beside\n\n| beside | x |\n\n```bash\nbeside\n```\n\nIt is no longer here. All is well.\n"
    )
    assert list(prose.warnings(prose.plain(page))) == []


def test_formulas_tables_programs_and_identifiers_are_left_alone():
    source = (
        'def f():\n    """Add.\n\n    beside    what stands there\n\n    `beside`: the other."""\n'
        '    return """import this\nbeside of its own\n"""\n'
    )
    assert [w for text in prose.texts(source) for w in prose.warnings(text)] == []
    assert (
        list(prose.warnings("a = " + "b + 1 * c " * 20 + "is small. There is no such key.")) == []
    )


def test_words_by_hand_are_those_that_no_script_writes(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("one two\n<!-- keys -->\nthree\n<!-- end of the keys -->\n")
    (tmp_path / "docs" / "status.md").write_text("four five\n")
    assert list(prose.words(tmp_path).values()) == [14, 2]


def test_docstrings_and_messages_are_read():
    source = 'def f():\n    """It runs beside it."""\n    raise ValueError("is no such key here")\n'
    found = [w for text in prose.texts(source) for w in prose.warnings(text)]
    assert [w.split(" (")[0] for w in found] == ["'beside'", "'is no '"]


@pytest.mark.parametrize("page", prose.finished(), ids=lambda p: p.stem)
def test_the_first_pages_have_no_warning(page):
    assert prose.of_file(page) == []
