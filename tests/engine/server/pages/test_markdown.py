"""What a model writes is shown as Markdown, and never runs."""

import json

import pytest
from depth import at_depth
from writing_engine import Scribe, app_of, serving

HOSTILE = r"""
<script>hacked = 1</script>
<img src=x onerror="hacked = 2">
<svg onload="hacked = 3"><style><img src=x onerror=hacked=3></style></svg>
<math><mtext><table><mglyph><style><!--</style>
<img title="--&gt;&lt;img src=1 onerror=hacked=4&gt;">
<noscript><p title="</noscript><img src=x onerror=hacked=5>">
<form><math><mtext></form><form><mglyph><style></math><img src onerror=hacked=6>
<iframe srcdoc="<script>parent.hacked = 7</script>"></iframe><a href="javascript:hacked=8">a</a>

[a](javascript:hacked=9) [b](JaVaScRiPt:hacked=9) [c](&#106;avascript:hacked=9)
[d](data:text/html,<script>hacked=9</script>) [e](vbscript:x) [f]( java
script:hacked=9) <javascript:hacked=9> [g](/v1/models) [h](//127.0.0.2/x)

![pixel](http://127.0.0.2:9/pixel.png) ![x](x" onerror="hacked=10) ![own](/version)
![svg](data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9ImhhY2tlZD0xMSIvPg==)

[r]: javascript:hacked=12
[r] ![r][r]

| <img src=x onerror=hacked=13> | `<b>` |
|---|---|
| <script>hacked=14</script> | </td><script>hacked=15</script> |

```html" onclick="hacked=16
</code></pre><script>hacked=17</script><img src=x onerror=hacked=17>
```

``</code><img src=x onerror=hacked=18>``  &lt;img src=x onerror=hacked=19&gt;

# <img src=x onerror=hacked=20>
"""


def test_nothing_in_a_hostile_answer_runs_loads_or_leads_to_a_script(chat, fits):
    thought = f"<think>\n{HOSTILE}\n</think>\n\n{HOSTILE}"
    page = chat({"x": thought, "again": HOSTILE})
    tab = page.tab
    page.ask("x")
    page.ask("again <img src=x onerror=hacked=21>")
    tab.run("document.querySelectorAll('#talk a, #talk summary').forEach((one) => one.click())")
    tab.run("new Promise((done) => setTimeout(done, 200))")
    assert tab.run("typeof hacked") == "undefined"
    made = "script, iframe, svg:not(.icon), form:not(.respond), object, style, img, math, [onerror]"
    assert tab.run(f"document.querySelectorAll('#talk :is({made})').length") == 0
    hrefs = tab.run("[...document.querySelectorAll('#talk a')].map((one) => one.protocol)")
    assert set(hrefs) <= {"http:", "https:", "mailto:"}
    links = "[...document.querySelectorAll('#talk a')].every((one) => one.rel.includes('noopener'))"
    assert tab.run(links)
    assert "<script>hacked = 1</script>" in page.answer()
    assert tab.problems == []
    fits(tab, "chat-hostile")


SAMPLES = {
    "blocks": "# Title\n\nA paragraph with **bold** text\nand a break.\n\n- one\n- two\n\n  more\n"
    "- three\n\n1. a\n2. b\n   - c\n\n> quoted\nlazy\n\nSetext\n===\n\n---\n\nend",
    "code": "text\n```python\ndef f():\n    x = '''x'''\n\n\nmore\n```\n    in\n\n    more\n\n`a`",
    "links": "| a | b |\n|--|:-:|\n| 1 | 2 |\n\n[later][x] and [x]\n\n[x]: https://example.org\n\n**o",
    "returns": "a\r\nb\r\n\r\n* c\r\n\r\n* d\r\n\r\n```\r\ncode\r\n```\r\n"
    "![i](data:image/png;base64,AAAA) ~~s~~",
    "open fence": "~~~\nnever closed\n\n# no title\n",
}
COMPARE = """(async () => {
  const { MarkdownView } = await import("/static/markdown.js");
  const text = %s;
  const whole = new MarkdownView();
  whole.show(text, true);
  const wrong = [];
  for (let seed = 1; seed <= %d; seed++) {
    const grown = new MarkdownView();
    let state = seed;
    for (let end = 0; end < text.length;) {
      state = (state * 48271) %% 2147483647;
      end += 1 + state %% (seed %% 2 ? 4 : 40);
      grown.show(text.slice(0, end), end >= text.length);
    }
    if (grown.root.innerHTML !== whole.root.innerHTML) wrong.push(grown.root.innerHTML);
  }
  return [wrong, whole.root.innerHTML];
})()"""


@pytest.fixture(scope="module")
def page(tab, tokenizer):
    with serving(app_of(Scribe(tokenizer, "yes"), tokenizer)) as url:
        tab.go(url)
        tab.until("document.querySelector('.dot.ready')")
        yield tab


@pytest.mark.parametrize("name", SAMPLES)
def test_a_text_that_grows_looks_as_if_it_came_at_once(page, name):
    for language in ("python", "xml"):  # so that colours are there from the first moment
        block = json.dumps(f"```{language}\nx\n```")
        page.run(
            f"""import("/static/markdown.js").then(({{ MarkdownView }}) => {{
            const view = new MarkdownView(); view.show({block}); document.body.append(view.root);
            globalThis.probe = view.root; }})"""
        )
        page.until("probe.querySelector('code').innerText === 'x'")
    page.run("new Promise((done) => setTimeout(done, 100))")
    wrong, whole = page.run(COMPARE % (json.dumps(SAMPLES[name]), at_depth(6, 200)))
    assert wrong == []
    assert "undefined" not in whole


def test_a_long_answer_is_read_only_once(page):
    """All but the last block of a text stays as it is, however long the text grows."""
    script = """(async () => {
      const { MarkdownView } = await import("/static/markdown.js");
      const view = new MarkdownView();
      const block = "Some *words* of a paragraph.\\n\\n";
      const kept = [];
      for (let count = 1; count <= 400; count++) {
        view.show(block.repeat(count));
        kept.push(view.root.firstChild);
      }
      return [new Set(kept.slice(1)).size, view.root.childElementCount];
    })()"""
    assert page.run(script) == [1, 400]


def test_the_view_follows_a_growing_answer_only_while_its_end_is_in_view(page):
    script = """(async () => {
      const { Viewport } = await import("/static/viewport.js");
      const [box, button] = [document.createElement("div"), document.createElement("button")];
      box.style.height = "100px";
      box.style.overflow = "auto";
      document.body.append(box);
      const view = new Viewport(box, button);
      const grow = () => {
        const line = document.createElement("div");
        line.style.height = "90px";
        box.append(line);
      };
      const frame = () => new Promise(requestAnimationFrame);
      const frames = async () => { for (let i = 0; i < 4; i++) await frame(); };
      const seen = [];
      for (const at of [null, null, 20, null]) {
        if (at !== null) box.scrollTop = at;
        await frames();
        view.paint(grow);
        await frames();
        seen.push([box.scrollTop, button.hidden]);
      }
      view.toEnd();
      seen.push([box.scrollTop, button.hidden]);
      box.remove();
      return seen;
    })()"""
    assert page.run(script) == [[0, True], [80, True], [20, False], [20, False], [260, True]]
