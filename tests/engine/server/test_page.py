"""The page's script, run in Node with just enough of a document around it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import kiln.engine.server.pages as package

SCRIPT = Path(package.__file__).parent.joinpath("static/chat.js").read_text(encoding="utf-8")
DOCUMENT = """
const made = new Map();
const fake = () => new Proxy(function () {}, {
  get: (target, name) => name in target ? target[name]
    : name === "value" || name === "textContent" ? "" : name === Symbol.toPrimitive ? () => 0
    : (target[name] = fake()),
  set: (target, name, value) => { target[name] = value; return true; },
  apply: () => fake(),
});
globalThis.document = {
  getElementById: (id) => made.get(id) ?? made.set(id, fake()).get(id),
  createElement: fake, createElementNS: fake, hidden: true,
};
const sent = [];
globalThis.setInterval = () => 0;
globalThis.fetch = async (url, options) => {
  if (!options) return { ok: true, json: async () => ({ data: [null] }), text: async () => "" };
  sent.push(JSON.parse(options.body));
  const text = 'data: {"choices": [{"delta": {"content": "part of an answer"}}]}\\n\\n';
  return { ok: true, body: new ReadableStream({
    start(stream) {
      stream.enqueue(new TextEncoder().encode(text));
      options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
    },
  }) };
};
"""
SCENE = """
const pause = () => new Promise((resolve) => setTimeout(resolve, 50));
ask("an old question");
pause().then(() => { $("fresh").onclick(); return pause(); })
  .then(() => { ask("a new question"); return pause(); })
  .then(() => console.log(JSON.stringify(sent)));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_a_new_chat_during_an_answer_begins_with_nothing():
    done = subprocess.run(
        ["node", "-e", DOCUMENT + SCRIPT + SCENE], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert [message["content"] for message in first["messages"]] == ["an old question"]
    assert [message["content"] for message in second["messages"]] == ["a new question"]
