"""JSON of large documents in pieces."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rlcore import files

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), VALUES))
def test_pieces_make_the_text_that_one_call_makes(document):
    sizes = files.PIECE, files.CHARACTERS
    files.PIECE, files.CHARACTERS = 2, 3
    try:
        made = files.dump_large(document)
    finally:
        files.PIECE, files.CHARACTERS = sizes
    assert made == json.dumps(document, separators=(",", ":"))


def test_no_call_of_the_encoder_is_large(monkeypatch):
    """Else all other threads of the process would wait for it."""
    longest, plain = 0, files._encode

    def encode(value):
        nonlocal longest
        text = plain(value)
        longest = max(longest, len(text))
        return text

    monkeypatch.setattr(files, "_encode", encode)
    groups = [{"group_id": i, "samples": {"0": {"tokens": 5}}} for i in range(20_000)]
    text = files.dump_large({"groups": groups, "state": "x" * 5_000_000})
    assert len(text) > 5_800_000 and longest < 1_100_000
