"""An answer's deltas become blocks: each begins, grows and ends before the next one begins."""

from kiln.engine.server.blocks import Blocks
from kiln.engine.text.replies.deltas import ReplyDelta, ToolCallDelta

DELTAS = [
    ReplyDelta(reasoning="let me "),
    ReplyDelta(),
    ReplyDelta(reasoning="see", content="I'll "),
    ReplyDelta(content="look"),
    ReplyDelta(tool_calls=(ToolCallDelta(0, "", "f", "c0"), ToolCallDelta(0, '{"a"'))),
    ReplyDelta(tool_calls=(ToolCallDelta(0, ": 1}"), ToolCallDelta(1, "{}", "g", "c1"))),
    ReplyDelta(content="done"),
]


def changes_of(deltas):
    blocks = Blocks()
    found = [change for delta in deltas for change in blocks.push(delta)]
    return blocks, [*found, *blocks.finish()]


def test_each_run_of_a_kind_and_each_call_is_a_block():
    blocks, _ = changes_of(DELTAS)
    assert [(one.index, one.kind, one.text) for one in blocks.blocks] == [
        (0, "reasoning", "let me see"),
        (1, "text", "I'll look"),
        (2, "tool", '{"a": 1}'),
        (3, "tool", "{}"),
        (4, "text", "done"),
    ]
    assert [(one.name, one.call_id) for one in blocks.blocks[2:4]] == [("f", "c0"), ("g", "c1")]


def test_one_block_at_a_time_is_open():
    _, changes = changes_of(DELTAS)
    was_open = None
    texts = {}
    for change in changes:
        if change.what == "begin":
            assert was_open is None
            was_open = change.block
        assert change.block is was_open
        if change.what == "add":
            texts[change.block.index] = texts.get(change.block.index, "") + change.text
        if change.what == "end":
            assert texts.get(change.block.index, "") == change.block.text
            was_open = None
    assert was_open is None


def test_an_answer_of_nothing_has_no_block():
    blocks, changes = changes_of([ReplyDelta(), ReplyDelta()])
    assert (blocks.blocks, changes) == ([], [])
